"""Arguments of a tool call in a schema's language are read back as valid arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from constraint_texts import Sampler
from dgemma.structured_output.dfa import DFA, build_dfa
from dgemma.structured_output.json_schema.grammar import json_object_grammar, schema_grammar
from dgemma.structured_output.json_schema.syntax import ToolCallSyntax
from dgemma.text.tool_call import QUOTE, parse_tool_call
from text.bundled import TOKENIZER

QUOTE_ID = TOKENIZER.id_of(QUOTE)
assert QUOTE_ID is not None
CALL = ToolCallSyntax(QUOTE_ID)
ID_OF_BYTE = {int((TOKENIZER.id_to_token(id_) or "")[3:5], 16): id_ for id_ in TOKENIZER.byte_ids}
DATA = Path(__file__).parent.parent / "data"
with (DATA / "json_schemas.jsonl").open(encoding="utf-8") as lines:
    CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in map(json.loads, lines)}


def read_back(walk: list[int]) -> Any:
    """Arguments, from bytes and special tokens, as the reply reader takes them."""
    ids = [-1 - step if step < 0 else ID_OF_BYTE[step] for step in walk]
    call = parse_tool_call(TOKENIZER, [*TOKENIZER.encode("call:f"), *ids])
    assert call.error is None, (call.error, walk)
    return call.arguments


def accepts(dfa: DFA, text: str) -> bool:
    """Whether a DFA accepts a text in which `\'` stands for the quote token."""
    state = 0
    for number, part in enumerate(text.split("'")):
        if number:
            state = int(dfa.transitions[state, dfa.symbol_of_token[CALL.quote]])
        state = dfa.run(part.encode(), state) if state >= 0 else -1
    return state >= 0 and bool(dfa.accepts[state])


@pytest.mark.parametrize("name", CASES)
def test_what_a_call_says_is_valid(name: str) -> None:
    schema = {"type": "object", "properties": {"a": CASES[name]["schema"]}, "required": ["a"]}
    if "#" in json.dumps(schema):  # references begin at the root
        schema = CASES[name]["schema"]
        if schema.get("type") != "object":
            return
    check = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    sampler = Sampler(build_dfa(schema_grammar(schema, CALL, distinct_keys=True)))
    for number in range(8):
        arguments = read_back(sampler.walk(number * 12))
        assert check.is_valid(arguments), arguments


def test_any_object_is_read_back() -> None:
    sampler = Sampler(build_dfa(schema_grammar({"type": "object"}, CALL, distinct_keys=True)))
    for number in range(60):
        read_back(sampler.walk(number * 3))
    assert build_dfa(json_object_grammar(CALL)).num_states < 1000


def test_a_call_is_written_as_models_write_it() -> None:
    schema = {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "n": {"type": "integer"},
            "xs": {"type": "array", "items": {"type": "boolean"}},
            "odd, key": {"type": "null"},
        },
        "additionalProperties": {"type": "string"},
    }
    dfa = build_dfa(schema_grammar(schema, CALL))
    assert accepts(dfa, "{text:'a \"quoted\" \\ text\n',n:3,xs:[true,false],'odd, key':null,first name:'b'}")
    assert not accepts(dfa, "{n: 3}")
    assert not accepts(dfa, "{'n':3}")
    assert not accepts(dfa, "{ n:3}")
    assert not accepts(dfa, "{text:'a'n:3}")


@pytest.mark.parametrize("key", ["", " a", "a ", "a:b", "{", "a,b", "[x]", "\u2003a"])
def test_a_key_that_cannot_stand_bare_is_quoted(key: str) -> None:
    schema = {"type": "object", "properties": {key: {"const": 1}}, "required": [key]}
    assert read_back(Sampler(build_dfa(schema_grammar(schema, CALL))).walk(0)) == {key: 1}
