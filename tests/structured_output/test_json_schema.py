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
from dgemma.structured_output.dfa import DFA, build_dfa
from dgemma.structured_output.json_schema.grammar import json_object_grammar, schema_grammar
from dgemma.structured_output.json_schema.syntax import JsonSyntax

JSON = JsonSyntax()
DATA = Path(__file__).parent.parent / "data"
with (DATA / "json_schemas.jsonl").open(encoding="utf-8") as lines:
    CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in map(json.loads, lines)}


def dfa_of(schema: Any, *, distinct_keys: bool = False) -> DFA:
    return build_dfa(schema_grammar(schema, JSON, distinct_keys=distinct_keys))


@cache
def dfa_of_case(name: str) -> DFA:
    return dfa_of(CASES[name]["schema"])


def validator_of(schema: Any) -> Draft202012Validator:
    return Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), "a key stands twice"
    return dict(pairs)


@pytest.mark.parametrize("name", CASES)
def test_every_text_is_valid_json_of_the_schema(name: str) -> None:
    schema = CASES[name]["schema"]
    check = validator_of(schema)
    for text in Sampler(dfa_of_case(name)).texts(25):
        assert check.is_valid(json.loads(text)), text


@pytest.mark.parametrize("name", CASES)
def test_no_key_stands_twice_where_keys_are_asked_to_differ(name: str) -> None:
    schema = CASES[name]["schema"]
    check = validator_of(schema)
    for text in Sampler(dfa_of(schema, distinct_keys=True), seed=1).texts(8):
        assert check.is_valid(json.loads(text, object_pairs_hook=unique)), text


@pytest.mark.parametrize("name", CASES)
def test_valid_values_are_taken_and_others_are_not(name: str) -> None:
    schema, valid, invalid = (CASES[name][part] for part in ("schema", "valid", "invalid"))
    check = validator_of(schema)
    dfa = dfa_of_case(name)
    for separators in ((", ", ": "), (",", ":")):
        for value in valid:
            assert check.is_valid(value)
            assert dfa.matches(json.dumps(value, ensure_ascii=False, separators=separators)), value
        for value in invalid:
            assert not dfa.matches(json.dumps(value, ensure_ascii=False, separators=separators)), value


def test_any_json_is_json_of_some_depth() -> None:
    dfa = build_dfa(schema_grammar(True, JSON, free_depth=3))
    for text in Sampler(dfa).texts(200):
        json.loads(text)
    assert dfa.matches("[[[1], {}]]")
    assert not dfa.matches("[[[[1]]]]")


def test_a_json_object_is_an_object() -> None:
    dfa = build_dfa(json_object_grammar(JSON))
    assert dfa.num_states < 1000
    for text in Sampler(dfa).texts(100):
        assert isinstance(json.loads(text), dict)
    assert dfa.matches('{"a": {"b": [{"c": 1}]}, "d": "x"}')
    assert not dfa.matches('{"a": {"b": [{"c": [1]}]}}')


def test_named_keys_never_stand_twice() -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}}
    dfa = dfa_of({**schema, "additionalProperties": True})
    for schema_dfa in (dfa, dfa_of(schema)):
        assert not schema_dfa.matches('{"a":1,"a":1}')
        assert not schema_dfa.matches('{"b":2,"a":1}')


def test_recursion_gives_way_until_the_machine_fits() -> None:
    node = {"$ref": "#/$defs/node"}
    wide = {f"child_{number}": {"anyOf": [node, {"type": "null"}]} for number in range(4)}
    schema = {**node, "$defs": {"node": {"type": "object", "properties": wide, "required": ["child_0"]}}}
    dfa = dfa_of(schema)
    assert dfa.matches('{"child_0":{"child_0":null}}')
    assert dfa.num_states < 12_000


def test_a_value_that_has_to_be_deep_is_unfolded_as_deep_as_it_has_to_be() -> None:
    definitions: dict[str, Any] = {
        f"d{n}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{n + 1}"}}, "required": ["x"]}
        for n in range(12)
    }
    definitions["d12"] = {"anyOf": [{"$ref": "#/$defs/d0"}, {"type": "null"}]}
    dfa = dfa_of({"$ref": "#/$defs/d0", "$defs": definitions})
    assert dfa.matches('{"x":' * 12 + "null" + "}" * 12)


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
    dfa = dfa_of({"type": "object", "properties": properties, "required": ["name", "age"]})
    assert time.process_time() - before < 2
    assert dfa.num_states < 20_000


def test_properties_stand_in_the_order_in_which_the_schema_names_them() -> None:
    base, own = {"properties": {"z": {"const": 1}}}, {"a": {"const": 2}}
    first = dfa_of({"type": "object", "allOf": [base], "properties": own})
    last = dfa_of({"type": "object", "properties": own, "allOf": [base]})
    assert first.matches('{"z":1,"a":2}')
    assert not first.matches('{"a":2,"z":1}')
    assert last.matches('{"a":2,"z":1}')
