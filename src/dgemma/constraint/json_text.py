"""How JSON values are written: as JSON, or as the arguments of a tool call.

There is one way to write a character of a string, and what stands between two values is `: ` or `:`, `, ` or
`,` in JSON and never a space in a call. So two texts are the same value only where numbers or spaces
differ.

What a string says (its content) is a tree of characters as they are meant. `spelled` makes it a tree of
characters as they are written: each leaf for itself, which is why languages of contents and of their
spellings have the same intersections and differences.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from dgemma.constraint.pattern import (
    Chars,
    Control,
    Either,
    Node,
    Ranges,
    Repeat,
    Sequence,
    literal,
    normal,
    opposite,
)

_SHORT = {"\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t", '"': '"', "\\": "\\"}
_CONTROLS: Ranges = ((0x00, 0x07), (0x0B, 0x0B), (0x0E, 0x1F))  # those without a short way to write them
_PLAIN = opposite(((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)))
FREE_CHARACTER = Chars(opposite(_CONTROLS))
"""What a string holds where nothing is said about it. Other controls stand only where they are asked for."""

_SYNTAX = "{}[],:"
# Characters of a key without quotes: none that is syntax, none that Python's `strip` takes off its ends.
_SPACES: Ranges = normal([(code, code) for code in range(0x3001) if chr(code).isspace()])
_BARE = opposite(normal([*_CONTROLS, *_SPACES, *((ord(char), ord(char)) for char in _SYNTAX)]))
_SPACE = Repeat(literal(" "), 0, 1)
_BARE_KEY = Sequence((Chars(_BARE), Repeat(Sequence((_SPACE, Chars(_BARE))), 0, None)))
FREE_CONTENT = Repeat(FREE_CHARACTER, 0, None)
_COLON, _COMMA = literal(":"), literal(",")
_COLON_SPACE, _COMMA_SPACE = Sequence((_COLON, _SPACE)), Sequence((_COMMA, _SPACE))


class Style(Protocol):
    """A way to write values."""

    @property
    def colon(self) -> Node: ...
    @property
    def comma(self) -> Node: ...
    @property
    def free_key(self) -> Node:
        """The content of keys that nobody named."""

    def spelled(self, content: Node) -> Node:
        """The characters of a string or key, as they are written between its quotes."""

    def quoted(self, spelled: Node) -> Node:
        """A string, or a key of any content."""

    def key(self, name: str) -> Node: ...
    def free_keys(self, spelled: Node) -> Node:
        """Keys out of `free_key`, or some of them."""


@dataclass(frozen=True)
class JsonStyle:
    """`{"a": [1, true], "b": "text"}`, also without the spaces."""

    colon: Node = _COLON_SPACE
    comma: Node = _COMMA_SPACE
    free_key: Node = FREE_CONTENT

    def spelled(self, content: Node) -> Node:
        return _each_leaf(content, _escaped)

    def quoted(self, spelled: Node) -> Node:
        return Sequence((literal('"'), spelled, literal('"')))

    def key(self, name: str) -> Node:
        return literal(json.dumps(name, ensure_ascii=False))

    def free_keys(self, spelled: Node) -> Node:
        return self.quoted(spelled)


@dataclass(frozen=True)
class CallStyle:
    """`{a:[1,true],b:<|"|>text<|"|>}`, a special token for quotes: the arguments of a tool call."""

    quote: int  # the id of `<|"|>`
    colon: Node = _COLON
    comma: Node = _COMMA
    free_key: Node = _BARE_KEY

    def spelled(self, content: Node) -> Node:
        return content

    def quoted(self, spelled: Node) -> Node:
        return Sequence((Control(self.quote), spelled, Control(self.quote)))

    def key(self, name: str) -> Node:
        is_bare = name and name == name.strip() and not any(char in _SYNTAX for char in name)
        return literal(name) if is_bare else self.quoted(literal(name))

    def free_keys(self, spelled: Node) -> Node:
        return spelled


def written(value: Any, style: Style) -> Node:
    """This very value."""
    if isinstance(value, str):
        return style.quoted(style.spelled(literal(value)))
    if isinstance(value, list):
        return listed([written(item, style) for item in value], style, "[]")
    if isinstance(value, dict):
        members = [member(style.key(key), written(item, style), style) for key, item in value.items()]
        return listed(members, style, "{}")
    return literal(json.dumps(value))


def member(key: Node, value: Node, style: Style) -> Node:
    return Sequence((key, style.colon, value))


def listed(parts: list[Node], style: Style, brackets: str) -> Node:
    """All of these, one after another."""
    found: list[Node] = [literal(brackets[0])]
    for number, part in enumerate(parts):
        found += [style.comma, part] if number else [part]
    return Sequence((*found, literal(brackets[1])))


def _each_leaf(node: Node, change: Callable[[Ranges], Node]) -> Node:
    if isinstance(node, Chars):
        return change(node.ranges)
    if isinstance(node, Repeat):
        return Repeat(_each_leaf(node.part, change), node.least, node.most)
    if isinstance(node, Sequence):
        return Sequence(tuple(_each_leaf(part, change) for part in node.parts))
    assert isinstance(node, Either), "the content of a string is characters"
    return Either(tuple(_each_leaf(part, change) for part in node.parts))


@lru_cache(maxsize=4096)
def _escaped(ranges: Ranges) -> Node:
    """One character of a JSON string, as `json.dumps` without `ensure_ascii` writes it."""
    if not any(low <= 0x5C for low, _ in ranges):
        return Chars(ranges)
    plain = normal([(max(a, c), min(b, d)) for a, b in ranges for c, d in _PLAIN if max(a, c) <= min(b, d)])
    short = [(ord(letter),) * 2 for char, letter in _SHORT.items() if _holds(ranges, ord(char))]
    ways: list[Node] = [Chars(normal(short))] if short else []
    for high in (0, 1):
        digits = [
            (ord(f"{low:x}"),) * 2
            for low in range(16)
            if _holds(ranges, code := high * 16 + low) and chr(code) not in _SHORT
        ]
        if digits:
            ways.append(Sequence((literal(f"u00{high}"), Chars(normal(digits)))))
    escaped = Sequence((literal("\\"), Either(tuple(ways))))
    if not ways:
        return Chars(plain)
    return Either((Chars(plain), escaped)) if plain else escaped


def _holds(ranges: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)
