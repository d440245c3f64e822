"""The public test suite of JSON Schema: what is taken is taken right, what is not is refused by name."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter

import pytest
from jsonschema import Draft202012Validator

from constraint_texts import Sampler
from dgemma.errors import InputError
from dgemma.structured_output.dfa import DFA, build_dfa
from dgemma.structured_output.json_schema.grammar import schema_grammar
from dgemma.structured_output.json_schema.syntax import JsonSyntax
from json_schema_suite import Group, groups
from sizes import cases

# How many schemas of each file are refused; a file that is not here has none.
REFUSED = {
    "defs": 1, "dynamicRef": 11, "format": 1, "multipleOf": 3, "not": 1, "ref": 1, "refRemote": 15,
    "unevaluatedItems": 3, "unevaluatedProperties": 1, "uniqueItems": 3,
}  # fmt: skip
# Schemas that no value satisfies: there is nothing to write.
EMPTY = {"allOf": 2, "anyOf": 1, "boolean_schema": 1, "not": 2, "oneOf": 3, "ref": 1}


def dfa_of(group: Group) -> DFA | InputError:
    try:
        return build_dfa(schema_grammar(group.schema, JsonSyntax(), max_depth=cases(4, 3), free_depth=1))
    except InputError as error:
        return error


@pytest.fixture(scope="module")
def suite() -> list[Group]:
    try:
        return list(groups())
    except subprocess.CalledProcessError:
        pytest.skip("the suite is not here, and pip cannot bring it; see tests/json_schema_suite.py")


def test_what_is_taken_is_valid_and_what_is_not_is_refused_by_name(suite: list[Group]) -> None:
    refused: Counter[str] = Counter()
    empty: Counter[str] = Counter()
    for group in suite:
        file = group.name.split(":")[0]
        dfa = dfa_of(group)
        if isinstance(dfa, InputError):
            is_named = re.search(r"the JSON schema's '\$?\w+' at #", str(dfa))
            assert is_named or not any(test["valid"] for test in group.tests), str(dfa)
            (refused if is_named else empty)[file] += 1
            continue
        check = Draft202012Validator(group.schema)
        for text in Sampler(dfa).texts(cases(12, 4), 60):
            assert check.is_valid(json.loads(text)), (group.name, text)
        for test in group.tests:
            for separators in ((", ", ": "), (",", ":")):
                text = json.dumps(test["data"], ensure_ascii=False, separators=separators)
                assert test["valid"] or not dfa.matches(text), (group.name, text)
    assert dict(refused) == REFUSED
    assert dict(empty) == EMPTY
