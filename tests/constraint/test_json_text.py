"""Characters are written as `json.dumps` writes them, and in no other way."""

from __future__ import annotations

import json

import pytest

from dgemma.constraint.automaton import build
from dgemma.constraint.json_schema import schema_pattern
from dgemma.constraint.json_text import FREE_CHARACTER, CallStyle, JsonStyle, written
from dgemma.constraint.pattern import Chars, parse

JSON = JsonStyle()
ODD = [*map(chr, range(0x100)), "\u2028", "\ufeff", "\uffff", "😀", "▁"]


def test_every_character_has_the_spelling_of_json_dumps() -> None:
    machine = build(JSON.quoted(JSON.spelled(Chars(((0, 0xD7FF), (0xE000, 0x10FFFF))))))
    for char in ODD:
        assert machine.matches(json.dumps(char, ensure_ascii=False)), char
    for text in ('"\\u0041"', '"\\u000A"', '"\\/"', '"\n"', '"\\u001F"', '""', '"""', '"\\"', '"ab"'):
        assert not machine.matches(text), text


@pytest.mark.parametrize("char", ODD[:0x80])
def test_a_class_of_one_character_is_its_spelling(char: str) -> None:
    machine = build(JSON.quoted(JSON.spelled(parse(rf"[\u{ord(char):04x}]"))))
    assert machine.matches(json.dumps(char, ensure_ascii=False))
    assert machine.num_states <= 9


def test_free_text_has_no_controls_without_a_short_spelling() -> None:
    machine = build(JSON.quoted(JSON.spelled(FREE_CHARACTER)))
    assert machine.matches('"\\n"')
    assert machine.matches('"\x7f"')
    assert not machine.matches('"\\u0000"')
    assert build(schema_pattern({"type": "string", "pattern": "^\\x00$"}, JSON)).matches('"\\u0000"')


@pytest.mark.parametrize("value", [{"a": [1, -2.5, "x", None, True], "b": {}}, [], "é\n", 1e22, {"": [[]]}])
def test_a_value_is_written_with_spaces_or_without(value: object) -> None:
    machine = build(written(value, JSON))
    assert machine.matches(json.dumps(value, ensure_ascii=False))
    assert machine.matches(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
    assert not machine.matches(json.dumps(value, ensure_ascii=False) + " ")


def test_styles_are_compared_by_value() -> None:
    """They are parts of keys under which machines are kept."""
    assert JsonStyle() == JsonStyle()
    assert CallStyle(5) == CallStyle(5) != CallStyle(6)
    assert hash(CallStyle(5)) == hash(CallStyle(5))
