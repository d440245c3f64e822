"""Every text of a schema's pattern is JSON and valid; texts in the schema's order are among them."""

from __future__ import annotations

import json
import time
from functools import cache
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


def machine_of(schema: Any, *, distinct_keys: bool = False) -> Automaton:
    return build(schema_pattern(schema, JSON, distinct_keys=distinct_keys))


@cache
def machine_of_case(name: str) -> Automaton:
    return machine_of(CASES[name]["schema"])


def validator_of(schema: Any) -> Draft202012Validator:
    return Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), "a key stands twice"
    return dict(pairs)


@pytest.mark.parametrize("name", CASES)
def test_every_text_is_valid_json_of_the_schema(name: str) -> None:
    schema = CASES[name]["schema"]
    check = validator_of(schema)
    for text in Sampler(machine_of_case(name)).texts(25):
        assert check.is_valid(json.loads(text)), text


@pytest.mark.parametrize("name", CASES)
def test_no_key_stands_twice_where_keys_are_asked_to_differ(name: str) -> None:
    schema = CASES[name]["schema"]
    check = validator_of(schema)
    for text in Sampler(machine_of(schema, distinct_keys=True), seed=1).texts(8):
        assert check.is_valid(json.loads(text, object_pairs_hook=unique)), text


@pytest.mark.parametrize("name", CASES)
def test_valid_values_are_taken_and_others_are_not(name: str) -> None:
    schema, valid, invalid = (CASES[name][part] for part in ("schema", "valid", "invalid"))
    check = validator_of(schema)
    machine = machine_of_case(name)
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


def test_named_keys_never_stand_twice() -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}}
    machine = machine_of({**schema, "additionalProperties": True})
    for schema_machine in (machine, machine_of(schema)):
        assert not schema_machine.matches('{"a":1,"a":1}')
        assert not schema_machine.matches('{"b":2,"a":1}')


def test_recursion_gives_way_until_the_machine_fits() -> None:
    node = {"$ref": "#/$defs/node"}
    wide = {f"child_{number}": {"anyOf": [node, {"type": "null"}]} for number in range(4)}
    schema = {**node, "$defs": {"node": {"type": "object", "properties": wide, "required": ["child_0"]}}}
    machine = machine_of(schema)
    assert machine.matches('{"child_0":{"child_0":null}}')
    assert machine.num_states < 12_000


def test_a_value_that_has_to_be_deep_is_unfolded_as_deep_as_it_has_to_be() -> None:
    definitions: dict[str, Any] = {
        f"d{n}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{n + 1}"}}, "required": ["x"]}
        for n in range(12)
    }
    definitions["d12"] = {"anyOf": [{"$ref": "#/$defs/d0"}, {"type": "null"}]}
    machine = machine_of({"$ref": "#/$defs/d0", "$defs": definitions})
    assert machine.matches('{"x":' * 12 + "null" + "}" * 12)


def test_a_person_compiles_at_once() -> None:
    address = {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"pattern": "^\\d{5}$"}}}
    properties = {
        "name": {"type": "string", "minLength": 1, "maxLength": 80},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 5},
        "address": {"anyOf": [address, {"type": "null"}]},
        "friends": {"type": "array", "items": {"$ref": "#"}},
    }
    before = time.process_time()
    machine = machine_of({"type": "object", "properties": properties, "required": ["name", "age"]})
    assert time.process_time() - before < 2
    assert machine.num_states < 20_000


def test_properties_stand_in_the_order_in_which_the_schema_names_them() -> None:
    base, own = {"properties": {"z": {"const": 1}}}, {"a": {"const": 2}}
    first = machine_of({"type": "object", "allOf": [base], "properties": own})
    last = machine_of({"type": "object", "properties": own, "allOf": [base]})
    assert first.matches('{"z":1,"a":2}')
    assert not first.matches('{"a":2,"z":1}')
    assert last.matches('{"a":2,"z":1}')
