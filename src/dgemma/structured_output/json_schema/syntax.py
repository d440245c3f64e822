"""How values are written: as JSON, or as the arguments of a tool call.

Each character of a string has one encoding. Between two values JSON has `: ` or `:`, and `,` with any number
of spaces, so that a model can put fields at fixed places of its canvas; a call has no spaces. So two texts of
one value differ only in the spelling of numbers and in spaces.

The content of a string is a tree of characters as they are meant; `escaped` makes it a tree of characters as
they are written, leaf by leaf. Therefore intersections and differences can be taken before or after it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from dgemma.structured_output.nfa import MAX_NFA_STATES, GrammarTooLargeError
from dgemma.structured_output.regex import (
    Alternation,
    CharClass,
    Concat,
    Node,
    Ranges,
    Repeat,
    SpecialToken,
    complement,
    literal,
    normalized,
)

_SHORT = {"\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t", '"': '"', "\\": "\\"}
_CONTROLS: Ranges = ((0x00, 0x07), (0x0B, 0x0B), (0x0E, 0x1F))  # control characters without a short escape
_PLAIN = complement(((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)))
FREE_CHARACTER = CharClass(complement(_CONTROLS))
"""Characters of a string that the schema does not constrain: no control characters without a short escape."""

_SYNTAX = "{}[],:"
# Characters of a key without quotes: no syntax, and no space that Python's `strip` would remove.
_SPACES: Ranges = normalized([(code, code) for code in range(0x3001) if chr(code).isspace()])
_BARE = complement(normalized([*_CONTROLS, *_SPACES, *((ord(char), ord(char)) for char in _SYNTAX)]))
_SPACE = Repeat(literal(" "), 0, 1)
_BARE_KEY = Concat((CharClass(_BARE), Repeat(Concat((_SPACE, CharClass(_BARE))), 0, None)))
FREE_CONTENT = Repeat(FREE_CHARACTER, 0, None)
_COLON, _COMMA = literal(":"), literal(",")
_COLON_SPACE, _COMMA_SPACES = Concat((_COLON, _SPACE)), Concat((_COMMA, Repeat(literal(" "), 0, None)))


class ValueSyntax(Protocol):
    """A notation of values."""

    @property
    def colon(self) -> Node: ...
    @property
    def comma(self) -> Node: ...
    @property
    def free_key(self) -> Node:
        """The content of keys that the schema does not name."""

    def escaped(self, content: Node) -> Node:
        """The characters of a string or key, as they are written between its quotes."""

    def written(self, text: str) -> str:
        """The same for a text that is known."""

    def quoted(self, escaped: Node) -> Node:
        """A string, or a key of any content, with its quotes."""

    def key(self, name: str) -> Node: ...
    def free_keys(self, escaped: Node) -> Node:
        """Keys of `free_key`, or a subset, with quotes if the syntax has them."""


@dataclass(frozen=True)
class JsonSyntax:
    """JSON: `{"a": [1, true], "b": "text"}`, without the spaces, or with more of them after commas."""

    colon: Node = _COLON_SPACE
    comma: Node = _COMMA_SPACES
    free_key: Node = FREE_CONTENT

    def escaped(self, content: Node) -> Node:
        return _each_leaf(content, _escape_char)

    def written(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False)[1:-1]

    def quoted(self, escaped: Node) -> Node:
        return Concat((literal('"'), escaped, literal('"')))

    def key(self, name: str) -> Node:
        return literal(json.dumps(name, ensure_ascii=False))

    def free_keys(self, escaped: Node) -> Node:
        return self.quoted(escaped)


@dataclass(frozen=True)
class ToolCallSyntax:
    """Arguments of a tool call: `{a:[1,true],b:<|"|>text<|"|>}`, where `<|"|>` is a special token."""

    quote: int  # id of the special token `<|"|>`
    colon: Node = _COLON
    comma: Node = _COMMA
    free_key: Node = _BARE_KEY

    def escaped(self, content: Node) -> Node:
        return content

    def written(self, text: str) -> str:
        return text

    def quoted(self, escaped: Node) -> Node:
        return Concat((SpecialToken(self.quote), escaped, SpecialToken(self.quote)))

    def key(self, name: str) -> Node:
        is_bare = name and name == name.strip() and not any(char in _SYNTAX for char in name)
        return literal(name) if is_bare else self.quoted(literal(name))

    def free_keys(self, escaped: Node) -> Node:
        return escaped


def value_grammar(value: Any, syntax: ValueSyntax) -> Node:
    """Exactly this value."""
    if isinstance(value, str):
        return syntax.quoted(syntax.escaped(literal(value)))
    if isinstance(value, list):
        return _list_grammar([value_grammar(item, syntax) for item in value], syntax, "[]")
    if isinstance(value, dict):
        members = [
            member_grammar(syntax.key(key), value_grammar(item, syntax), syntax)
            for key, item in value.items()
        ]
        return _list_grammar(members, syntax, "{}")
    return literal(json.dumps(value))


def member_grammar(key: Node, value: Node, syntax: ValueSyntax) -> Node:
    return Concat((key, syntax.colon, value))


def _list_grammar(parts: list[Node], syntax: ValueSyntax, brackets: str) -> Node:
    """All of these, separated by commas, in brackets."""
    found: list[Node] = [literal(brackets[0])]
    for number, part in enumerate(parts):
        found += [syntax.comma, part] if number else [part]
    return Concat((*found, literal(brackets[1])))


def _each_leaf(node: Node, change: Callable[[Ranges], Node]) -> Node:
    if isinstance(node, CharClass):
        return change(node.ranges)
    if isinstance(node, Repeat):
        return Repeat(_each_leaf(node.part, change), node.min_count, node.max_count)
    if isinstance(node, Concat):
        return Concat(tuple(_each_leaf(part, change) for part in node.parts))
    assert isinstance(node, Alternation), "the content of a string holds characters only"
    return Alternation(tuple(_each_leaf(part, change) for part in node.parts))


@lru_cache(maxsize=256)
def _escape_char(ranges: Ranges) -> Node:
    """One character of a JSON string, as `json.dumps` without `ensure_ascii` writes it."""
    if not any(low <= 0x5C for low, _ in ranges):
        return CharClass(ranges)
    plain = normalized(
        [(max(a, c), min(b, d)) for a, b in ranges for c, d in _PLAIN if max(a, c) <= min(b, d)]
    )
    short = [(ord(escape),) * 2 for char, escape in _SHORT.items() if _holds(ranges, ord(char))]
    ways: list[Node] = [CharClass(normalized(short))] if short else []
    for high in (0, 1):
        digits = [
            (ord(f"{low:x}"),) * 2
            for low in range(16)
            if _holds(ranges, code := high * 16 + low) and chr(code) not in _SHORT
        ]
        if digits:
            ways.append(Concat((literal(f"u00{high}"), CharClass(normalized(digits)))))
    escaped = Concat((literal("\\"), Alternation(tuple(ways))))
    if not ways:
        return CharClass(plain)
    return Alternation((CharClass(plain), escaped)) if plain else escaped


def _holds(ranges: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)


def check_size(cells: int, counted: str) -> None:
    """Refuse a grammar that could not be compiled, before it is built."""
    if cells > MAX_NFA_STATES:
        raise GrammarTooLargeError(f"the JSON schema counts too many {counted}; count fewer, or name fewer.")


def one_of(nodes: list[Node]) -> Node | None:
    """The alternation of these; None if there are none."""
    return None if not nodes else nodes[0] if len(nodes) == 1 else Alternation(tuple(nodes))
