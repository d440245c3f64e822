"""Random schemas: every generated text is valid, and no invalid value is accepted."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from constraint_texts import Sampler
from dgemma.errors import InputError
from dgemma.structured_output.dfa import DFA, build_dfa
from dgemma.structured_output.json_schema.grammar import schema_grammar
from dgemma.structured_output.json_schema.syntax import JsonSyntax
from sizes import cases

NAMES = st.sampled_from(["a", "b", "c"])
SMALL = st.integers(0, 3)
NUMBERS = st.integers(-6, 6) | st.sampled_from([-2.5, 0.5, 1.0, 3.25])
SCALARS = st.none() | st.booleans() | NUMBERS | st.sampled_from(["", "a", "ab", "b1", "é"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)
PATTERNS = st.sampled_from(["^a", "b$", "^[a-c]*$", "\\d", "^\\D*$", "."])
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
PLAIN = {
    "type": TYPES | st.lists(TYPES, min_size=1, max_size=3, unique=True),
    "const": VALUES,
    "enum": st.lists(VALUES, min_size=1, max_size=4),
    "minimum": NUMBERS,
    "maximum": NUMBERS,
    "exclusiveMinimum": NUMBERS,
    "exclusiveMaximum": NUMBERS,
    "multipleOf": st.sampled_from([1, 2, 3, 0.5, 2.5, 1.0]),
    "minLength": SMALL,
    "maxLength": SMALL,
    "pattern": PATTERNS,
    "minItems": SMALL,
    "maxItems": SMALL,
    "uniqueItems": st.just(False),
    "minProperties": SMALL,
    "maxProperties": SMALL,
    "required": st.lists(NAMES, max_size=2, unique=True),
    "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=1), max_size=1),
}


def holding(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    several = st.lists(inner, min_size=1, max_size=2)
    keywords: dict[str, st.SearchStrategy[Any]] = {
        **PLAIN,
        "items": inner,
        "prefixItems": several,
        "contains": inner,
        "properties": st.dictionaries(NAMES, inner, max_size=3),
        "additionalProperties": inner,
        "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2),
        "propertyNames": inner,
        "allOf": several,
        "anyOf": several,
        "oneOf": several,
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "dependentSchemas": st.dictionaries(NAMES, inner, max_size=1),
        "unevaluatedProperties": inner,
        "unevaluatedItems": inner,
    }
    return st.lists(st.sampled_from(sorted(keywords)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: keywords[name] for name in names})
    )


SCHEMAS = st.recursive(st.booleans() | holding(st.booleans()), holding, max_leaves=8)


def dfa_of(schema: Any) -> DFA | None:
    try:
        return build_dfa(schema_grammar(schema, JsonSyntax(), max_depth=2, free_depth=1))
    except InputError:
        return None


@given(SCHEMAS, st.lists(VALUES, max_size=8), st.integers(0, 1000))
@settings(max_examples=cases(200, 100), deadline=None, derandomize=True, database=None)
def test_every_text_of_a_random_schema_is_valid(schema: Any, values: list[Any], seed: int) -> None:
    dfa = dfa_of(schema)
    if dfa is None:
        return
    check = Draft202012Validator(schema)
    for text in Sampler(dfa, seed).texts(8, 60):
        assert check.is_valid(json.loads(text)), text
    for value in values:
        assert check.is_valid(value) or not dfa.matches(json.dumps(value, ensure_ascii=False)), value
