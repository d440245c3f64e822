"""Regular expressions: the parser and the tree it returns, which all grammars are built from.

`parse`: the whole text must match, as with `re.fullmatch`. `parse_search`: a match may begin and end
anywhere, as JSON Schema defines `pattern`. Supported: literals, `.`, classes, `\\d \\w \\s` and their
complements, escapes, groups (capturing ones capture nothing), `|`, `* + ?`, `{m,n}` up to a bound, also lazy
(which does not change the language); `^` and `$` at the edges. Back references and lookaround (`\\1`, `(?=`)
are refused by name.

`\\d`, `\\w` and `\\s` are ASCII in ECMA-262, which JSON Schema refers to, and Unicode in Python. A validator
may use either, so a text matches certainly only if it matches in both dialects, and possibly if it matches in
one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from dgemma.errors import InputError, error_field

MAX_PATTERN_LEN = 1 << 20
MAX_REPEAT = 10_000
_MAX_DEPTH = 100
_LAST = 0x10FFFF

Ranges = tuple[tuple[int, int], ...]
"""Ranges of code points, ascending, disjoint, both ends included."""


@dataclass(frozen=True)
class CharClass:
    """One character of these ranges."""

    ranges: Ranges


@dataclass(frozen=True)
class SpecialToken:
    """One special token of the vocabulary, by its id. No text encodes to it."""

    token: int


@dataclass(frozen=True)
class Concat:
    """All parts, in this order."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Alternation:
    """One of the parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """`part`, from `min_count` to `max_count` times."""

    part: Node
    min_count: int
    max_count: int | None  # None: no limit


@dataclass(frozen=True, eq=False)
class DFANode:
    """A DFA as a leaf: transitions on byte ranges (low, high, to) by state; state 0 is the start.

    is_given: its size is that of a text of the caller, which no limit on depths or counts would reduce.
    """

    transitions: tuple[tuple[tuple[int, int, int], ...], ...]
    accepts: frozenset[int]
    is_given: bool = False


Node = CharClass | SpecialToken | Concat | Alternation | Repeat | DFANode

EMPTY = Concat(())
ANY_CHARACTER = CharClass(((0, 0xD7FF), (0xE000, _LAST)))
ANY_TEXT = Repeat(ANY_CHARACTER, 0, None)


def literal(text: str) -> Node:
    """Exactly this text."""
    return Concat(tuple(CharClass(((ord(char), ord(char)),)) for char in text))


def normalized(ranges: list[tuple[int, int]]) -> Ranges:
    """The same characters as sorted, merged ranges, without surrogates, which no text contains."""
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


def complement(ranges: Ranges) -> Ranges:
    found: list[tuple[int, int]] = []
    at = 0
    for low, high in ranges:
        if at < low:
            found.append((at, low - 1))
        at = high + 1
    return normalized([*found, (at, _LAST)] if at <= _LAST else found)


MatchMode = Literal["certain", "possible"]
"""Which texts match: those that match in every dialect, or those that match in some dialect."""

_ASCII: dict[str, Ranges] = {
    "d": ((0x30, 0x39),),
    "w": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
    "s": ((0x09, 0x0D), (0x20, 0x20)),
}
_OTHER_MODE: dict[MatchMode, MatchMode] = {"certain": "possible", "possible": "certain"}
_NAME = re.compile(r"\?P?<[A-Za-z_][A-Za-z0-9_]*>")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0", "a": "\a"}


@cache
def _kind(name: str, mode: MatchMode) -> Ranges:
    """The characters of `\\d`, `\\D` etc. A character is certainly no digit if it is not possibly one."""
    if name.isupper():
        return complement(_kind(name.lower(), _OTHER_MODE[mode]))
    if mode != "possible":
        return _ASCII[name]
    everything = "".join(map(chr, range(_LAST + 1)))
    found = [(match.start(), match.end() - 1) for match in re.finditer(f"\\{name}+", everything)]
    return normalized([*found, (0xFEFF, 0xFEFF)] if name == "s" else found)


def _dot(mode: MatchMode) -> Ranges:
    """All but line terminators, of which ECMA-262 has more."""
    return complement(
        ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)) if mode == "certain" else ((0x0A, 0x0A),)
    )


@error_field("regex")
def parse(pattern: str) -> Node:
    """The tree of `pattern`. An InputError names the position and the reason."""
    return _RegexParser(pattern, "certain", is_search=False).whole(EMPTY)


def parse_search(pattern: str, mode: MatchMode = "certain", around: Node = ANY_TEXT) -> Node:
    """The tree of all texts that contain a match of `pattern`; `^` and `$` anchor it.

    around: the texts allowed before and after the match.
    """
    return _RegexParser(pattern, mode, is_search=True).whole(around)


class _RegexParser:
    def __init__(self, pattern: str, mode: MatchMode, *, is_search: bool) -> None:
        if len(pattern) > MAX_PATTERN_LEN:
            raise InputError(
                f"the pattern has {len(pattern)} characters; at most {MAX_PATTERN_LEN} are allowed."
            )
        self.text = pattern
        self.mode: MatchMode = mode
        self.is_search = is_search
        self.at = 0
        self.depth = 0

    def whole(self, around: Node) -> Node:
        """around: the texts allowed before and after a match."""
        node = self.either()
        if self.at < len(self.text):
            raise self.wrong("a `)` without its `(`")
        node = self.with_edge(self.with_edge(node, "^", around), "$", around)
        self.refuse_edges(node)
        return node

    def wrong(self, what: str) -> InputError:
        shown = self.text[max(0, self.at - 10) : self.at + 10]
        return InputError(f"the pattern has {what} at position {self.at}, near {shown!r}.")

    # During parsing, `^` and `$` are special tokens with the id -1 minus their position.

    def with_edge(self, node: Node, mark: str, around: Node) -> Node:
        """Add `around` before (`^`) or after (`$`) a match, unless the anchor is there."""
        if isinstance(node, Alternation):
            return Alternation(tuple(self.with_edge(part, mark, around) for part in node.parts))
        parts = list(node.parts if isinstance(node, Concat) else [node])
        edge = 0 if mark == "^" else -1
        added = [] if around is EMPTY else [around]
        if parts and self.is_edge(parts[edge], mark):
            parts.pop(edge)
            while parts and self.is_edge(parts[edge], mark):
                parts.pop(edge)
            # Python's `$` also matches before a final newline.
            line_end = mark == "$" and self.mode == "possible"
            added = [Repeat(CharClass(((0x0A, 0x0A),)), 0, 1)] if line_end else []
        elif parts and isinstance(parts[edge], Alternation | Concat):
            parts[edge] = self.with_edge(parts[edge], mark, around)
            added = []
        parts = [*added, *parts] if mark == "^" else [*parts, *added]
        return parts[0] if len(parts) == 1 else Concat(tuple(parts))

    def is_edge(self, node: Node, mark: str) -> bool:
        return isinstance(node, SpecialToken) and self.text[-1 - node.token] == mark

    def refuse_edges(self, node: Node) -> None:
        if isinstance(node, SpecialToken):
            self.at = -1 - node.token
            mark = self.text[self.at]
            raise self.wrong(f"a `{mark}` that is not at the {'beginning' if mark == '^' else 'end'}")
        if isinstance(node, Repeat):
            self.refuse_edges(node.part)
        elif isinstance(node, Concat | Alternation):
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
        return parts[0] if len(parts) == 1 else Alternation(tuple(parts))

    def sequence(self) -> Node:
        parts: list[Node] = []
        while self.next() not in ("", "|", ")"):
            if self.next() in ("^", "$"):
                parts.append(SpecialToken(-1 - self.at))
                self.at += 1
                if self.next() in ("*", "+", "?"):
                    raise self.wrong("a repetition of nothing")
            else:
                parts.append(self.repeated(self.atom()))
        return parts[0] if len(parts) == 1 else Concat(tuple(parts))

    def repeated(self, node: Node) -> Node:
        char = self.next()
        if char in ("*", "+", "?"):
            self.at += 1
            min_count, max_count = {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        elif char == "{" and (counts := self.counts()) is not None:
            min_count, max_count = counts
        else:
            return node
        if self.next() == "?":
            self.at += 1
        elif self.next() == "+":
            raise self.wrong("a `+` after a repetition (possessive), which is not supported")
        if self.next() in ("*", "+", "?", "{"):
            raise self.wrong("two repetitions in a row")
        return Repeat(node, min_count, max_count)

    def counts(self) -> tuple[int, int | None] | None:
        """`{m}`, `{m,}`, `{,n}`, `{m,n}`; None: literal braces."""
        end = self.text.find("}", self.at)
        low, comma, high = self.text[self.at + 1 : end].partition(",")
        numbers = (low, high) if comma else (low,)
        if end < 0 or not any(numbers) or not all(n == "" or (n.isascii() and n.isdigit()) for n in numbers):
            return None
        if self.is_search and not low:
            raise self.wrong("a repetition without its minimum, which dialects read differently")
        if max(len(low), len(high)) > 9:
            raise self.wrong(f"a repetition of more than {MAX_REPEAT}")
        min_count = int(low or 0)
        max_count = min_count if not comma else int(high) if high else None
        if max(min_count, max_count or 0) > MAX_REPEAT:
            raise self.wrong(f"a repetition of more than {MAX_REPEAT}")
        if max_count is not None and max_count < min_count:
            raise self.wrong("a repetition whose end is before its beginning")
        self.at = end + 1
        return min_count, max_count

    def atom(self) -> Node:
        char = self.take()
        if char == "(":
            return self.group()
        if char == "[":
            return CharClass(self.char_class())
        if char == ".":
            return CharClass(_dot(self.mode))
        if char == "\\":
            return self.escape()
        if char in ("*", "+", "?"):
            self.at -= 1
            raise self.wrong("a repetition of nothing")
        return CharClass(normalized([(ord(char), ord(char))]))

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
            return CharClass(_kind(self.take(), self.mode))
        if char in ("b", "B", "A", "Z", "z", "G") or (char.isdigit() and char != "0"):
            raise self.wrong(f"`\\{char}`, which is not supported")
        return CharClass(normalized([(code := self.code_point(), code)]))

    def code_point(self) -> int:
        """The code point of an escape, after the backslash."""
        char = self.take()
        if not char:
            raise self.wrong("a `\\` at its end")
        if (self.is_search and char in ("U", "a")) or (char == "0" and self.next().isdigit()):
            raise self.wrong(f"`\\{char}`, which dialects read differently")
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
        is_negated = self.next() == "^"
        self.at += is_negated
        # A character is certainly not in a class if it is not possibly in it.
        mode = _OTHER_MODE[self.mode] if is_negated else self.mode
        found: list[tuple[int, int]] = []
        is_first = True
        while True:
            char = self.next()
            if not char:
                raise self.wrong("a `[` without its `]`")
            if char == "]" and is_first and self.is_search:
                raise self.wrong("a `]` first in a class, which dialects read differently")
            if char == "]" and not is_first:
                self.at += 1
                break
            is_first = False
            low = self.member(found, mode)
            if low is None:
                continue
            high = low
            if self.next() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                upper = self.member([], mode)
                if upper is None or upper < low:
                    raise self.wrong("a range whose end is before its beginning")
                high = upper
            found.append((low, high))
        ranges = normalized(found)
        ranges = complement(ranges) if is_negated else ranges
        if not ranges:
            raise self.wrong("a class without a character")
        return ranges

    def member(self, found: list[tuple[int, int]], mode: MatchMode) -> int | None:
        """A character of a class; the ranges of `\\d` etc. are added to `found`."""
        char = self.take()
        if char != "\\":
            return ord(char)
        if self.next() and self.next() in "dDwWsS":
            found += _kind(self.take(), mode)
            return None
        if self.next() == "b":
            self.at += 1
            return 0x08
        return self.code_point()
