"""Characters are written as `json.dumps` writes them, and in no other way."""

from __future__ import annotations

import json

import pytest

from dgemma.structured_output.dfa import build_dfa
from dgemma.structured_output.json_schema.grammar import schema_grammar
from dgemma.structured_output.json_schema.syntax import (
    FREE_CHARACTER,
    JsonSyntax,
    ToolCallSyntax,
    value_grammar,
)
from dgemma.structured_output.regex import CharClass, parse

JSON = JsonSyntax()
ODD = [*map(chr, range(0x100)), "\u2028", "\ufeff", "\uffff", "😀", "▁"]


def test_every_character_has_the_spelling_of_json_dumps() -> None:
    dfa = build_dfa(JSON.quoted(JSON.escaped(CharClass(((0, 0xD7FF), (0xE000, 0x10FFFF))))))
    for char in ODD:
        assert dfa.matches(json.dumps(char, ensure_ascii=False)), char
    for text in ('"\\u0041"', '"\\u000A"', '"\\/"', '"\n"', '"\\u001F"', '""', '"""', '"\\"', '"ab"'):
        assert not dfa.matches(text), text


@pytest.mark.parametrize("char", ODD[:0x80])
def test_a_class_of_one_character_is_its_spelling(char: str) -> None:
    dfa = build_dfa(JSON.quoted(JSON.escaped(parse(rf"[\u{ord(char):04x}]"))))
    assert dfa.matches(json.dumps(char, ensure_ascii=False))
    assert dfa.num_states <= 9


def test_free_text_has_no_controls_without_a_short_spelling() -> None:
    dfa = build_dfa(JSON.quoted(JSON.escaped(FREE_CHARACTER)))
    assert dfa.matches('"\\n"')
    assert dfa.matches('"\x7f"')
    assert not dfa.matches('"\\u0000"')
    assert build_dfa(schema_grammar({"type": "string", "pattern": "^\\x00$"}, JSON)).matches('"\\u0000"')


@pytest.mark.parametrize("value", [{"a": [1, -2.5, "x", None, True], "b": {}}, [], "é\n", 1e22, {"": [[]]}])
def test_a_value_is_written_with_spaces_or_without(value: object) -> None:
    dfa = build_dfa(value_grammar(value, JSON))
    assert dfa.matches(json.dumps(value, ensure_ascii=False))
    assert dfa.matches(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
    assert not dfa.matches(json.dumps(value, ensure_ascii=False) + " ")


def test_commas_have_spaces_after_them_and_nothing_else_has() -> None:
    """A model that puts fields at fixed places of its canvas fills up with spaces."""
    dfa = build_dfa(value_grammar({"a": "x", "b": [1, 2]}, JSON))
    assert dfa.matches('{"a": "x",' + " " * 200 + '"b":[1,   2]}')
    for text in (
        '{"a":  "x","b":[1,2]}',
        '{"a":"x" ,"b":[1,2]}',
        '{ "a":"x","b":[1,2]}',
        '{"a":"x","b":[1,2] }',
    ):
        assert not dfa.matches(text), text


def test_styles_are_compared_by_value() -> None:
    """They are parts of cache keys."""
    assert JsonSyntax() == JsonSyntax()
    assert ToolCallSyntax(5) == ToolCallSyntax(5) != ToolCallSyntax(6)
    assert hash(ToolCallSyntax(5)) == hash(ToolCallSyntax(5))
