"""Regular expressions, read into a small tree.

The whole text must match, as with `re.fullmatch`. Known: literals, `.`, classes, `\\d \\w \\s` (ASCII) and
their opposites, escapes, groups (capturing ones capture nothing), `|`, `* + ?`, `{m,n}` up to a bound; `^`
and `$` at the ends, where they change nothing. What needs memory or looks around (`\\1`, `(?=`) is refused by
name, and so are lazy marks, which change no language but look as if they did.
"""

from __future__ import annotations

from dataclasses import dataclass

from dgemma.errors import InputError

MAX_PATTERN_LEN = 1 << 20
MAX_REPEAT = 10_000
_MAX_DEPTH = 200
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


_DIGIT = ((0x30, 0x39),)
_WORD = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE = ((0x09, 0x0D), (0x20, 0x20))
_KINDS: dict[str, Ranges] = {
    "d": _DIGIT, "D": opposite(_DIGIT), "w": _WORD, "W": opposite(_WORD), "s": _SPACE, "S": opposite(_SPACE),
}  # fmt: skip
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0", "a": "\a"}
_ANY = opposite(((0x0A, 0x0A),))


def parse(pattern: str) -> Node:
    """The tree of `pattern`, or an InputError that says where and why not."""
    if len(pattern) > MAX_PATTERN_LEN:
        raise InputError(f"the pattern has {len(pattern)} characters; at most {MAX_PATTERN_LEN} are taken.")
    return _Parser(pattern).whole()


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.text = pattern
        self.at = 0
        self.depth = 0

    def whole(self) -> Node:
        node = self.either()
        if self.at < len(self.text):
            raise self.wrong("a `)` without its `(`")
        return node

    def wrong(self, what: str) -> InputError:
        shown = self.text[max(0, self.at - 10) : self.at + 10]
        return InputError(f"the pattern has {what} at position {self.at}, near {shown!r}.")

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
            if self.next() == "^":
                if parts or self.depth > 1:
                    raise self.wrong("a `^` that is not at the beginning")
                self.at += 1
                continue
            if self.next() == "$":
                self.at += 1
                if self.next() or self.depth > 1:
                    self.at -= 1
                    raise self.wrong("a `$` that is not at the end")
                continue
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
        if self.next() in ("?", "+"):
            raise self.wrong(
                f"a `{self.next()}` behind a repetition (lazy or possessive), which is not supported"
            )
        if self.next() in ("*", "{"):
            raise self.wrong("two repetitions in a row")
        return Repeat(node, least, most)

    def counts(self) -> tuple[int, int | None] | None:
        """`{m}`, `{m,}`, `{,n}`, `{m,n}`; None: braces that mean themselves."""
        end = self.text.find("}", self.at)
        low, comma, high = self.text[self.at + 1 : end].partition(",")
        numbers = (low, high) if comma else (low,)
        if end < 0 or not any(numbers) or not all(n == "" or (n.isascii() and n.isdigit()) for n in numbers):
            return None
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
            return Chars(_ANY)
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
            elif self.text.startswith("?P<", self.at):
                end = self.text.find(">", self.at)
                if end < 0:
                    raise self.wrong("a group's name without its end")
                self.at = end + 1
            else:
                raise self.wrong(f"`({self.text[self.at : self.at + 2]}`, which is not supported")
        node = self.either()
        if self.take() != ")":
            raise self.wrong("a `(` without its `)`")
        return node

    def escape(self) -> Node:
        if self.next() in _KINDS:
            return Chars(_KINDS[self.take()])
        char = self.next()
        if char in ("b", "B", "A", "Z", "z", "G") or (char.isdigit() and char != "0"):
            raise self.wrong(f"`\\{char}`, which is not supported")
        return Chars(normal([(code := self.code_point(), code)]))

    def code_point(self) -> int:
        """Behind a backslash."""
        char = self.take()
        if not char:
            raise self.wrong("a `\\` at its end")
        size = {"x": 2, "u": 4, "U": 8}.get(char)
        if size is not None:
            digits = self.text[self.at : self.at + size]
            try:
                code = int(digits, 16) if len(digits) == size else -1
            except ValueError:
                code = -1
            if not 0 <= code <= _LAST:
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
        found: list[tuple[int, int]] = []
        is_first = True
        while True:
            char = self.next()
            if not char:
                raise self.wrong("a `[` without its `]`")
            if char == "]" and not is_first:
                self.at += 1
                break
            is_first = False
            low = self.member(found)
            if low is None:
                continue
            high = low
            if self.next() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                inside: list[tuple[int, int]] = []
                upper = self.member(inside)
                if upper is None or upper < low:
                    raise self.wrong("a range whose end is before its beginning")
                high = upper
            found.append((low, high))
        ranges = normal(found)
        ranges = opposite(ranges) if is_opposite else ranges
        if not ranges:
            raise self.wrong("a class without a character")
        return ranges

    def member(self, found: list[tuple[int, int]]) -> int | None:
        """A character of a class; a kind such as `\\d` is added to `found` at once."""
        char = self.take()
        if char != "\\":
            return ord(char)
        if self.next() in _KINDS:
            found += _KINDS[self.take()]
            return None
        if self.next() == "b":
            self.at += 1
            return 0x08
        return self.code_point()
