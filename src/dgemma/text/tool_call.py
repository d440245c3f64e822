"""The tool-call parser: `call:NAME{key:value,...}` from token ids."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dgemma.events import ToolCall
from dgemma.text.tokenizer import Tokenizer

QUOTE = '<|"|>'
_MAX_DEPTH = 64
NAME = re.compile(r"[^\s{}\[\],]+")  # of a tool
_HEAD = re.compile(rf"\s*call:({NAME.pattern})\s*")
_SYNTAX = re.compile(r"[{}\[\],:]|[^{}\[\],:]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,300})(\.[0-9]+)?([eE][+-]?[0-9]+)?")
# A released template writes null as Python does.
_CONSTANTS = {"true": True, "false": False, "null": None, "None": None}


def parse_tool_call(tokenizer: Tokenizer, ids: Sequence[int]) -> ToolCall:
    """Parse the ids between `<|tool_call>` and `<tool_call|>`. Never raises: see `ToolCall.error`."""
    quote = tokenizer.id_of(QUOTE)
    segments: list[list[int]] = [[]]  # syntax, string, syntax, ..., syntax
    for id_ in ids:
        if id_ == quote:
            segments.append([])
        else:
            segments[-1].append(id_)
    texts = [tokenizer.decode(segment) for segment in segments]
    head = _HEAD.match(texts[0])
    if head is None:
        return ToolCall(name="", error="the call does not begin with call:NAME")
    texts[0] = texts[0][head.end() :]
    try:
        return ToolCall(name=head[1], arguments=_ArgumentParser(texts).read())
    except _MalformedError as error:
        return ToolCall(name=head[1], error=str(error))


class _MalformedError(Exception):
    """Why a call cannot be parsed; it becomes `ToolCall.error`."""


@dataclass(frozen=True)
class _StringLiteral:
    """A string literal: the exact text between two quote tokens."""

    text: str


class _ArgumentParser:
    """Parses `{key:value,...}` from a list of syntax tokens and string literals."""

    def __init__(self, texts: list[str]) -> None:
        if len(texts) % 2 == 0:
            raise _MalformedError(f"a string is not closed by {QUOTE}")
        self._tokens = list(_tokens(texts))
        self._next = 0

    def read(self) -> dict[str, Any]:
        self._expect("{")
        arguments = self._object(depth=1)
        if self._peek() is not None:
            raise _MalformedError(f"{_shown(self._peek())} follows the closing brace")
        return arguments

    def _object(self, depth: int) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        while not self._closed("}", first=not entries):
            key = self._take()
            name = key.text if isinstance(key, _StringLiteral) else key
            if name is None or key in ("{", "}", "[", "]", ",", ":"):
                raise _MalformedError(f"{_shown(key)} stands where a key should")
            self._expect(":")
            # Of a duplicate key the last value counts, as in most JSON parsers.
            entries[name] = self._value(depth)
        return entries

    def _list(self, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self._closed("]", first=not items):
            items.append(self._value(depth))
        return items

    def _value(self, depth: int) -> Any:
        lexeme = self._take()
        if isinstance(lexeme, _StringLiteral):
            return lexeme.text
        if lexeme in ("{", "["):
            if depth == _MAX_DEPTH:
                raise _MalformedError(f"values are nested deeper than {_MAX_DEPTH} levels")
            return self._object(depth + 1) if lexeme == "{" else self._list(depth + 1)
        if lexeme in _CONSTANTS:
            return _CONSTANTS[lexeme]
        number = _NUMBER.fullmatch(lexeme) if lexeme is not None else None
        if number is None:
            raise _MalformedError(f"{_shown(lexeme)} is not a value; text stands between two {QUOTE}")
        value = float(number[0]) if number[1] or number[2] else int(number[0])
        if not math.isfinite(value):
            raise _MalformedError(f"the number {_shown(lexeme)} is out of range")
        return value

    def _closed(self, bracket: str, *, first: bool) -> bool:
        """Whether the list or object ends here; if not, the comma before its next entry is read."""
        if self._peek() == bracket:
            self._next += 1
            return True
        if not first:
            self._expect(",")
        return False

    def _expect(self, token: str) -> None:
        if (found := self._take()) != token:
            raise _MalformedError(f"{_shown(found)} stands where {token!r} should")

    def _peek(self) -> str | _StringLiteral | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def _take(self) -> str | _StringLiteral | None:
        token = self._peek()
        self._next += 1
        return token


def _tokens(texts: list[str]) -> Iterator[str | _StringLiteral]:
    for index, text in enumerate(texts):
        if index % 2:
            yield _StringLiteral(text)
        else:
            yield from (token for match in _SYNTAX.finditer(text) if (token := match[0].strip()))


def _shown(token: str | _StringLiteral | None) -> str:
    if token is None:
        return "the end"
    return repr((token.text if isinstance(token, _StringLiteral) else token)[:40])
