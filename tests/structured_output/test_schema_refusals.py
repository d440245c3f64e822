"""What is not taken is refused with its name, its place, the rule and a remedy."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dgemma.errors import InputError
from dgemma.structured_output.budget import TimeBudget
from dgemma.structured_output.dfa import build_dfa
from dgemma.structured_output.json_schema.grammar import schema_grammar
from dgemma.structured_output.json_schema.syntax import JsonSyntax
from dgemma.structured_output.regex import Alternation, literal


def nested(depth: int, keyword: str, schema: Any) -> Any:
    for _ in range(depth):
        schema = {"type": "object", keyword: {"a": schema}, "required": ["a"]}
    return schema


def chain(count: int, last: Any = True) -> dict[str, Any]:
    """References that lead to each other."""
    names: dict[str, Any] = {f"d{n}": {"minimum": n, "$ref": f"#/$defs/d{n + 1}"} for n in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**names, f"d{count}": last}}


TREE = {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}
DYNAMIC = {"a": {"$dynamicAnchor": "t"}, "b": {"$dynamicAnchor": "t"}}
REFUSED: list[tuple[Any, str]] = [
    ({"minLenght": 1}, "'minLenght' at # is not a keyword that is supported; did you mean 'minLength'"),
    ({"qqq": 1}, "'qqq' at # is not a keyword that is supported; remove it"),
    ({"properties": {"a": {"nullable": True}}}, "'nullable' at #/properties/a is not supported: .*OpenAPI"),
    ({"dependencies": {}}, "'dependencies' at # .*use 'dependentRequired'"),
    ({"type": "strin"}, "'type' at # is 'strin'; did you mean 'string'"),
    ({"type": ["foo"]}, "'type' at # is 'foo'; known are"),
    ({"type": [["string"]]}, "'type' at #"),
    ({"minLength": -1}, "'minLength' at # is '-1'; give an integer from 0"),
    ({"minLength": 1.5}, "give an integer from 0"),
    ({"maxItems": True}, "'maxItems' at # is 'True'"),
    ({"minimum": "1"}, "'minimum' at # is '1'; give a number"),
    ({"pattern": 1}, "'pattern' at # is '1'; give a string"),
    ({"properties": [1]}, "'properties' at # is .*; give an object"),
    ({"required": "a"}, "'required' at # is 'a'; give a list of strings"),
    ({"required": [1]}, "give a list of strings"),
    ({"enum": 1}, "'enum' at # is '1'; give a list"),
    ({"anyOf": []}, "'anyOf' at # is empty"),
    ({"dependentRequired": {"a": 1}}, "'dependentRequired' at # has '1' in it; give lists of strings"),
    (
        {"enum": [{"x": {"a": 1}}], "properties": {"x": {"dependentRequired": {"a": 3}}}},
        "give lists of strings",
    ),
    ({"not": {"dependentRequired": {"a": 1}}}, "give lists of strings"),
    ({"enum": [{"a": 1}], "propertyNames": 3}, "where a schema has to stand"),
    ({"propertyNames": 3, "type": "object", "additionalProperties": True}, "where a schema has to stand"),
    ({"not": 3}, "'3' at #/not, where a schema has to stand; give an object, true or false"),
    ({"allOf": [1]}, "at #/allOf/0, where a schema has to stand"),
    ({"items": [True]}, "at #/items, where a schema has to stand"),
    (3, "'3' at #, where a schema has to stand"),
    ({"multipleOf": 0}, "'multipleOf' at # is 0; give a number above 0"),
    ({"type": "number", "multipleOf": 0.01}, "'multipleOf' at # is not taken: 0.01 has no exact binary form"),
    (
        {"type": "integer", "multipleOf": 3000, "minimum": 0.5, "maximum": 2**1024 - 1},
        "'multipleOf' at # is not taken: .*give a minimum and a maximum",
    ),
    (
        {"type": "integer", "multipleOf": 10**9},
        "'multipleOf' at # is not taken: .*give a minimum and a maximum",
    ),
    ({"type": "integer", "minimum": 10**50}, "'minimum' at # is not taken: it is beyond"),
    (
        {"type": "string", "pattern": "(?=a)"},
        r"'pattern' at # is not taken: .*`\(\?=`, which is not supported",
    ),
    ({"type": "object", "patternProperties": {"(": True}}, "'patternProperties' at # is not taken"),
    ({"type": "string", "format": "emial"}, "'format' at # is 'emial'; did you mean 'email'"),
    ({"type": "string", "format": "regex"}, "'format' at # is 'regex'; known are"),
    ({"type": "array", "uniqueItems": True}, "'uniqueItems' at # asks to remember every item"),
    (
        {"allOf": [{"contains": {}}, {"contains": {"minimum": 1}}]},
        "'contains' at #/allOf/0 stands there with",
    ),
    ({"contains": {"const": 1}, "minContains": 10**6}, "'contains' at # counts more than"),
    ({"type": "array", "minItems": 10**9}, "'minItems' at # asks for 1000000000 items; at most"),
    ({"$ref": 3}, "'\\$ref' at # is not a string"),
    ({"$ref": "#/$defs/x"}, "'\\$ref' at # points at '#/\\$defs/x', which is not in the schema"),
    ({"$ref": "https://example.com/x"}, "'\\$ref' at # points at 'https://example.com/x'"),
    ({"$ref": "#/allOf/x", "allOf": [True]}, "which is not in the schema"),
    ({"$ref": f"#/allOf/{'1' * 5000}", "allOf": [True]}, "which is not in the schema"),
    ({"$ref": "http://[#x"}, r"points at 'http://\[#x', which is not in the schema"),
    ({"$dynamicRef": "http://[#x"}, "which is not in the schema"),
    (
        {"$id": "http://a/", "properties": {"a": {"$id": "http://[x"}}},
        r"has 'http://\[x' at #/properties/a, which is no URI: Invalid IPv6 URL",
    ),
    ({"$id": "http://a/", "$ref": "http://[x"}, "at #, which is no URI"),
    ({"$ref": "#/title", "title": "a"}, "where a schema has to stand"),
    ({"$dynamicRef": "#t", "$defs": DYNAMIC}, "'\\$dynamicRef' at # has several targets"),
    ({"$ref": "#"}, "refers to itself without a value in between"),
    (
        {"enum": [{"a": 1}], "properties": {"a": {"$ref": "#/properties/a"}}},
        "refers to itself without a value",
    ),
    (chain(300), "follows more than 100 references"),
    (TREE, "no finite value is valid; make the reference optional"),
    (False, "nothing that can be written is valid for the JSON schema"),
    ({"type": "string", "const": 1}, "nothing that can be written"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "nothing that can be written"),
    ({"type": "object", "minProperties": 5}, "more members of an object than it names"),
    ({"not": {"uniqueItems": True}}, "'uniqueItems' at #/not has to be negated"),
    (
        {"allOf": [{"anyOf": [{"minimum": n}, {"maximum": n}]} for n in range(12)]},
        "more than 500 combinations",
    ),
    (nested(70, "properties", True), "nests values deeper than 60 levels"),
    (nested(10_000, "properties", True), "nested deeper than 150 levels"),
    ({"enum": [str(n) for n in range(60_000)]}, "more than 50000 values"),
    ({"const": "x" * 2_000_000}, "more than 1000000 characters"),
    ({"const": "x" * 300_000}, "'enum' at # has more than 200000 characters"),
    ({"const": 1 << 2000}, "an integer of 2001 bits at #/const"),
    ({"const": math.inf}, "has inf at #/const; JSON has finite numbers only"),
    ({"const": {1}}, "a value of type set at #/const; give JSON values only"),
    ({"properties": {1: True}}, "a key of type int at #/properties"),
    ({"const": "\ud800"}, "a lone surrogate at #/const"),
    ({"\0kinds": []}, "which is reserved; remove it"),
]


@pytest.mark.parametrize(("schema", "why"), REFUSED, ids=[why[:40] for _, why in REFUSED])
def test_what_is_not_taken_is_refused_by_name(schema: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        schema_grammar(schema, JsonSyntax())


def test_more_combinations_of_schemas_than_there_may_be_are_refused() -> None:
    names = {f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(6000)}
    with pytest.raises(InputError, match="more than 5000 combinations of its parts"):
        schema_grammar({"$ref": "#/$defs/d0", "$defs": {**names, "d6000": True}}, JsonSyntax())


def test_a_schema_that_is_a_deep_recursion_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: object) -> None:
        raise RecursionError

    monkeypatch.setattr("dgemma.structured_output.json_schema.grammar._GrammarWriter", endless)
    with pytest.raises(InputError, match="nested too deeply"):
        schema_grammar(True, JsonSyntax())


def test_time_that_is_up_is_refused() -> None:
    with pytest.raises(InputError, match="more than 0 seconds to compile"):
        schema_grammar(True, JsonSyntax(), budget=TimeBudget(0))


def test_a_language_without_texts_is_refused() -> None:
    with pytest.raises(InputError, match="no text at all"):
        build_dfa(Alternation(()))
    assert build_dfa(literal("")).matches("")


def test_more_states_than_there_may_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgemma.structured_output.dfa.MAX_STATES", 10)
    with pytest.raises(InputError, match="more than 10 states"):
        build_dfa(literal("a" * 20))


def test_a_keyword_that_does_not_apply_is_not_looked_at() -> None:
    schema = {
        "type": "integer",
        "format": "unheard-of",
        "pattern": "(",
        "uniqueItems": True,
        "minItems": 10**9,
    }
    assert build_dfa(schema_grammar(schema, JsonSyntax())).matches("1")
