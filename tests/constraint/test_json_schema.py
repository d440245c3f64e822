"""Every text of a schema's pattern is JSON and valid; texts in the schema's order are among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from constraint_texts import Sampler
from dgemma.constraint.automaton import Automaton, build
from dgemma.constraint.json_schema import any_json, json_object_pattern, schema_pattern
from dgemma.constraint.json_text import JsonStyle

JSON = JsonStyle()
DATA = Path(__file__).parent.parent / "data"
with (DATA / "json_schemas.jsonl").open(encoding="utf-8") as lines:
    CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in map(json.loads, lines)}


def machine_of(schema: Any) -> Automaton:
    return build(schema_pattern(schema, JSON))


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), "a key stands twice"
    return dict(pairs)


def has_others(schema: Any) -> bool:
    """Keys that nobody named may repeat."""
    text = json.dumps(schema)
    return schema is True or "additional" in text or "pattern" in text or '"properties"' not in text


@pytest.mark.parametrize("name", CASES)
def test_every_text_is_valid_json_of_the_schema(name: str) -> None:
    schema = CASES[name]["schema"]
    check = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    for text in Sampler(machine_of(schema)).texts(40):
        value = json.loads(text, object_pairs_hook=dict if has_others(schema) else unique)
        assert check.is_valid(value), text


@pytest.mark.parametrize("name", CASES)
def test_valid_values_are_taken_and_others_are_not(name: str) -> None:
    schema, valid, invalid = (CASES[name][part] for part in ("schema", "valid", "invalid"))
    check = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    machine = machine_of(schema)
    for separators in ((", ", ": "), (",", ":")):
        for value in valid:
            assert check.is_valid(value)
            assert machine.matches(json.dumps(value, ensure_ascii=False, separators=separators)), value
        for value in invalid:
            assert not machine.matches(json.dumps(value, ensure_ascii=False, separators=separators)), value


def test_any_json_is_json_of_some_depth() -> None:
    machine = build(any_json(JSON, 3))
    for text in Sampler(machine).texts(200):
        json.loads(text)
    assert machine.matches("[[[1], {}]]")
    assert not machine.matches("[[[[1]]]]")


def test_a_json_object_is_an_object() -> None:
    machine = build(json_object_pattern(JSON))
    assert machine.num_states < 1000
    for text in Sampler(machine).texts(100):
        assert isinstance(json.loads(text), dict)
    assert machine.matches('{"a": {"b": [{"c": 1}]}, "d": "x"}')
    assert not machine.matches('{"a": {"b": [{"c": [1]}]}}')
