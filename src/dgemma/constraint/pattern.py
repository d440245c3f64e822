"""Regular expressions, read into a small tree.

`parse`: the whole text must match, as with `re.fullmatch`. `parse_search`: a match may begin and end
anywhere, as `pattern` of JSON Schema means it. Known: literals, `.`, classes, `\\d \\w \\s` and their
opposites, escapes, groups (capturing ones capture nothing), `|`, `* + ?`, `{m,n}` up to a bound, also with
the `?` that makes them lazy, which changes no language; `^` and `$` at the edges. What needs memory or looks
around (`\\1`, `(?=`) is refused by name.

In ECMA-262, which JSON Schema names, kinds of characters are ASCII; Python reads them as Unicode. Who checks
a text may read it either way, so a text is taken only when both agree that it matches, or, asked for what
may match, when either does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from dgemma.errors import InputError

MAX_PATTERN_LEN = 1 << 20
MAX_REPEAT = 10_000
_MAX_DEPTH = 100
_LAST = 0x10FFFF

Ranges = tuple[tuple[int, int], ...]
"""Code points, ascending, apart, both ends included."""


@dataclass(frozen=True)
class Chars:
    """One character out of these."""

    ranges: Ranges


@dataclass(frozen=True)
class Control:
    """One special token of the vocabulary, by its id: no text spells it."""

    token: int


@dataclass(frozen=True)
class Sequence:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Either:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    part: Node
    least: int
    most: int | None  # None: without end


@dataclass(frozen=True, eq=False)
class Graph:
    """A machine that is known already: arrows on bytes (low, high, to) from each state; begins in state 0."""

    arrows: tuple[tuple[tuple[int, int, int], ...], ...]
    accepts: frozenset[int]


Node = Chars | Control | Sequence | Either | Repeat | Graph

EMPTY = Sequence(())
ANY_CHARACTER = Chars(((0, 0xD7FF), (0xE000, _LAST)))
ANYTHING = Repeat(ANY_CHARACTER, 0, None)


def literal(text: str) -> Node:
    """This very text."""
    return Sequence(tuple(Chars(((ord(char), ord(char)),)) for char in text))


def normal(ranges: list[tuple[int, int]]) -> Ranges:
    """The same characters in order, neighbours joined, without surrogates, which no text holds."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    found: list[tuple[int, int]] = []
    for low, high in joined:
        found += [(a, b) for a, b in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high)) if a <= b]
    return tuple(found)


def opposite(ranges: Ranges) -> Ranges:
    found: list[tuple[int, int]] = []
    at = 0
    for low, high in ranges:
        if at < low:
            found.append((at, low - 1))
        at = high + 1
    return normal([*found, (at, _LAST)] if at <= _LAST else found)


Reading = Literal["surely", "possibly"]
"""Which texts match: those that do in every reading, or those that do in some."""

_ASCII: dict[str, Ranges] = {
    "d": ((0x30, 0x39),),
    "w": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
    "s": ((0x09, 0x0D), (0x20, 0x20)),
}
_OTHER: dict[Reading, Reading] = {"surely": "possibly", "possibly": "surely"}
_NAME = re.compile(r"\?P?<[A-Za-z_][A-Za-z0-9_]*>")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0", "a": "\a"}


@cache
def _kind(name: str, reading: Reading) -> Ranges:
    """The characters of `\\d`, `\\D` and so on. What is surely not a digit is what is not possibly one."""
    if name.isupper():
        return opposite(_kind(name.lower(), _OTHER[reading]))
    if reading != "possibly":
        return _ASCII[name]
    everything = "".join(map(chr, range(_LAST + 1)))
    found = [(match.start(), match.end() - 1) for match in re.finditer(f"\\{name}+", everything)]
    return normal([*found, (0xFEFF, 0xFEFF)] if name == "s" else found)


def _dot(reading: Reading) -> Ranges:
    """All but the ends of lines, of which ECMA-262 has more."""
    return opposite(
        ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)) if reading == "surely" else ((0x0A, 0x0A),)
    )


def parse(pattern: str) -> Node:
    """The tree of `pattern`, or an InputError that says where and why not."""
    return _Parser(pattern, "surely", is_search=False).whole(EMPTY)


def parse_search(pattern: str, reading: Reading = "surely", around: Node = ANYTHING) -> Node:
    """The tree of all texts in which `pattern` is found somewhere; `^` and `$` say where."""
    return _Parser(pattern, reading, is_search=True).whole(around)


class _Parser:
    def __init__(self, pattern: str, reading: Reading, *, is_search: bool) -> None:
        if len(pattern) > MAX_PATTERN_LEN:
            raise InputError(
                f"the pattern has {len(pattern)} characters; at most {MAX_PATTERN_LEN} are taken."
            )
        self.text = pattern
        self.reading: Reading = reading
        self.is_search = is_search
        self.at = 0
        self.depth = 0

    def whole(self, around: Node) -> Node:
        """around: what may stand before and behind a match."""
        node = self.either()
        if self.at < len(self.text):
            raise self.wrong("a `)` without its `(`")
        node = self.with_edge(self.with_edge(node, "^", around), "$", around)
        self.refuse_edges(node)
        return node

    def wrong(self, what: str) -> InputError:
        shown = self.text[max(0, self.at - 10) : self.at + 10]
        return InputError(f"the pattern has {what} at position {self.at}, near {shown!r}.")

    # Until the whole is read, `^` and `$` are controls whose number is -1 minus their place.

    def with_edge(self, node: Node, mark: str, around: Node) -> Node:
        """What may stand before (`^`) or behind (`$`) a match is added, unless the mark is there."""
        if isinstance(node, Either):
            return Either(tuple(self.with_edge(part, mark, around) for part in node.parts))
        parts = list(node.parts if isinstance(node, Sequence) else [node])
        edge = 0 if mark == "^" else -1
        added = [] if around is EMPTY else [around]
        if parts and self.is_edge(parts[edge], mark):
            parts.pop(edge)
            while parts and self.is_edge(parts[edge], mark):
                parts.pop(edge)
            # Python's `$` is also before a line end that is the last character.
            line_end = mark == "$" and self.reading == "possibly"
            added = [Repeat(Chars(((0x0A, 0x0A),)), 0, 1)] if line_end else []
        elif parts and isinstance(parts[edge], Either | Sequence):
            parts[edge] = self.with_edge(parts[edge], mark, around)
            added = []
        parts = [*added, *parts] if mark == "^" else [*parts, *added]
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def is_edge(self, node: Node, mark: str) -> bool:
        return isinstance(node, Control) and self.text[-1 - node.token] == mark

    def refuse_edges(self, node: Node) -> None:
        if isinstance(node, Control):
            self.at = -1 - node.token
            mark = self.text[self.at]
            raise self.wrong(f"a `{mark}` that is not at the {'beginning' if mark == '^' else 'end'}")
        if isinstance(node, Repeat):
            self.refuse_edges(node.part)
        elif isinstance(node, Sequence | Either):
            for part in node.parts:
                self.refuse_edges(part)

    def next(self) -> str:
        return self.text[self.at] if self.at < len(self.text) else ""

    def take(self) -> str:
        char = self.next()
        self.at += 1
        return char

    def either(self) -> Node:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise self.wrong(f"groups deeper than {_MAX_DEPTH}")
        parts = [self.sequence()]
        while self.next() == "|":
            self.at += 1
            parts.append(self.sequence())
        self.depth -= 1
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def sequence(self) -> Node:
        parts: list[Node] = []
        while self.next() not in ("", "|", ")"):
            if self.next() in ("^", "$"):
                parts.append(Control(-1 - self.at))
                self.at += 1
                if self.next() in ("*", "+", "?"):
                    raise self.wrong("a repetition of nothing")
            else:
                parts.append(self.repeated(self.atom()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def repeated(self, node: Node) -> Node:
        char = self.next()
        if char in ("*", "+", "?"):
            self.at += 1
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        elif char == "{" and (counts := self.counts()) is not None:
            least, most = counts
        else:
            return node
        if self.next() == "?":
            self.at += 1
        elif self.next() == "+":
            raise self.wrong("a `+` behind a repetition (possessive), which is not supported")
        if self.next() in ("*", "+", "?", "{"):
            raise self.wrong("two repetitions in a row")
        return Repeat(node, least, most)

    def counts(self) -> tuple[int, int | None] | None:
        """`{m}`, `{m,}`, `{,n}`, `{m,n}`; None: braces that mean themselves."""
        end = self.text.find("}", self.at)
        low, comma, high = self.text[self.at + 1 : end].partition(",")
        numbers = (low, high) if comma else (low,)
        if end < 0 or not any(numbers) or not all(n == "" or (n.isascii() and n.isdigit()) for n in numbers):
            return None
        if self.is_search and not low:
            raise self.wrong("a repetition without its least number, which not everybody reads alike")
        if max(len(low), len(high)) > 9:
            raise self.wrong(f"a repetition of more than {MAX_REPEAT}")
        least = int(low or 0)
        most = least if not comma else int(high) if high else None
        if max(least, most or 0) > MAX_REPEAT:
            raise self.wrong(f"a repetition of more than {MAX_REPEAT}")
        if most is not None and most < least:
            raise self.wrong("a repetition whose end is before its beginning")
        self.at = end + 1
        return least, most

    def atom(self) -> Node:
        char = self.take()
        if char == "(":
            return self.group()
        if char == "[":
            return Chars(self.char_class())
        if char == ".":
            return Chars(_dot(self.reading))
        if char == "\\":
            return self.escape()
        if char in ("*", "+", "?"):
            self.at -= 1
            raise self.wrong("a repetition of nothing")
        return Chars(normal([(ord(char), ord(char))]))

    def group(self) -> Node:
        if self.next() == "?":
            if self.text.startswith("?:", self.at):
                self.at += 2
            elif (name := _NAME.match(self.text, self.at)) is not None:
                self.at = name.end()
            else:
                raise self.wrong(f"`({self.text[self.at : self.at + 2]}`, which is not supported")
        node = self.either()
        if self.take() != ")":
            raise self.wrong("a `(` without its `)`")
        return node

    def escape(self) -> Node:
        char = self.next()
        if char and char in "dDwWsS":
            return Chars(_kind(self.take(), self.reading))
        if char in ("b", "B", "A", "Z", "z", "G") or (char.isdigit() and char != "0"):
            raise self.wrong(f"`\\{char}`, which is not supported")
        return Chars(normal([(code := self.code_point(), code)]))

    def code_point(self) -> int:
        """Behind a backslash."""
        char = self.take()
        if not char:
            raise self.wrong("a `\\` at its end")
        if (self.is_search and char in ("U", "a")) or (char == "0" and self.next().isdigit()):
            raise self.wrong(f"`\\{char}`, which not everybody reads alike")
        size = {"x": 2, "u": 4, "U": 8}.get(char)
        if size is not None:
            digits = self.text[self.at : self.at + size]
            if not re.fullmatch(f"[0-9a-fA-F]{{{size}}}", digits) or (code := int(digits, 16)) > _LAST:
                raise self.wrong(f"`\\{char}` without {size} hexadecimal digits")
            self.at += size
            return code
        if char in _ESCAPES:
            return ord(_ESCAPES[char])
        if char.isalnum():
            self.at -= 1
            raise self.wrong(f"`\\{char}`, which is not supported")
        return ord(char)

    def char_class(self) -> Ranges:
        is_opposite = self.next() == "^"
        self.at += is_opposite
        # What a class surely does not have is what its members possibly are.
        reading = _OTHER[self.reading] if is_opposite else self.reading
        found: list[tuple[int, int]] = []
        is_first = True
        while True:
            char = self.next()
            if not char:
                raise self.wrong("a `[` without its `]`")
            if char == "]" and is_first and self.is_search:
                raise self.wrong("a `]` first in a class, which not everybody reads alike")
            if char == "]" and not is_first:
                self.at += 1
                break
            is_first = False
            low = self.member(found, reading)
            if low is None:
                continue
            high = low
            if self.next() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                upper = self.member([], reading)
                if upper is None or upper < low:
                    raise self.wrong("a range whose end is before its beginning")
                high = upper
            found.append((low, high))
        ranges = normal(found)
        ranges = opposite(ranges) if is_opposite else ranges
        if not ranges:
            raise self.wrong("a class without a character")
        return ranges

    def member(self, found: list[tuple[int, int]], reading: Reading) -> int | None:
        """A character of a class; a kind such as `\\d` is added to `found` at once."""
        char = self.take()
        if char != "\\":
            return ord(char)
        if self.next() and self.next() in "dDwWsS":
            found += _kind(self.take(), reading)
            return None
        if self.next() == "b":
            self.at += 1
            return 0x08
        return self.code_point()
