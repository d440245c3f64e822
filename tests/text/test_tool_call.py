"""Tool calls are parsed from token ids; malformed calls have an error."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.events import ToolCall
from dgemma.text.tool_call import QUOTE, parse_tool_call
from text.bundled import TOKENIZER, ids_of

texts = st.text().filter(lambda text: "▁" not in text)  # the vocabulary's own spelling of a space
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
keys = st.text("abcXYZ_0$- .é", min_size=1).filter(lambda key: key == key.strip())
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(keys, inner), max_leaves=12)


def parse(text: str) -> ToolCall:
    return parse_tool_call(TOKENIZER, ids_of(text))


def written(value: Any) -> list[int]:
    """A value as a model writes it."""
    match value:
        case str():
            return [52, *TOKENIZER.encode(value), 52]
        case dict():
            entries = [[*TOKENIZER.encode(key + ":"), *written(item)] for key, item in value.items()]
            return [*TOKENIZER.encode("{"), *joined(entries), *TOKENIZER.encode("}")]
        case list():
            return [
                *TOKENIZER.encode("["),
                *joined([written(item) for item in value]),
                *TOKENIZER.encode("]"),
            ]
    return TOKENIZER.encode(json.dumps(value))


def joined(items: list[list[int]]) -> list[int]:
    comma = TOKENIZER.encode(",")
    return [id_ for index, item in enumerate(items) for id_ in (comma if index else []) + item]


@settings(deadline=None)
@given(st.dictionaries(keys, values))
def test_any_arguments_come_back(arguments: dict[str, Any]) -> None:
    call = parse_tool_call(TOKENIZER, [*TOKENIZER.encode("call:do_it"), *written(arguments)])
    assert call == ToolCall(name="do_it", arguments=arguments)
    assert json.loads(call.arguments_json) == arguments


@settings(deadline=None)
@given(st.lists(st.one_of(st.just(52), st.integers(0, 2047), st.sampled_from(ids_of("{}[],:truecall1.")))))
def test_no_ids_make_it_fail_and_the_result_is_json(ids: list[int]) -> None:
    for call in (parse_tool_call(TOKENIZER, ids), parse_tool_call(TOKENIZER, [*ids_of("call:f{a:"), *ids])):
        json.dumps(dataclasses.asdict(call))
        assert call.error is None or not call.arguments


def test_strings_are_literal() -> None:
    literal = '{x:[1,2]},"\n'
    spelled = TOKENIZER.encode(f"{literal}{QUOTE}<tool_call|>")  # text that spells markers
    ids = [*ids_of("call:f{a:"), 52, *spelled, 52, *ids_of("}")]
    assert parse_tool_call(TOKENIZER, ids).arguments == {"a": f"{literal}{QUOTE}<tool_call|>"}


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("call:f{}", {}),
        (" call:f {\n a : 1 ,\n b : [ ] }\n", {"a": 1, "b": []}),
        ('call:f{key with space:<|"|><|"|>}', {"key with space": ""}),
        ('call:f{<|"|>quoted:key<|"|>:true}', {"quoted:key": True}),
        ("call:f{a:None,b:null,c:false}", {"a": None, "b": None, "c": False}),
        ("call:f{a:-0.5e3,b:0,c:1e-07}", {"a": -500.0, "b": 0, "c": 1e-07}),
        ("call:f{a:[[],{},[1,{b:2}]]}", {"a": [[], {}, [1, {"b": 2}]]}),
        ("call:f{a:1<|turn>2}", {"a": 12}),
    ],
)
def test_well_formed_calls_are_read(text: str, arguments: dict[str, Any]) -> None:
    assert parse(text) == ToolCall(name="f", arguments=arguments)


@pytest.mark.parametrize("name", ["get_weather", "http.post", "server:tool", "a-b/c"])
def test_names_are_taken_as_they_are(name: str) -> None:
    assert parse(f"call:{name}{{}}").name == name


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "does not begin with call:NAME"),
        ("f{}", "does not begin with call:NAME"),
        ("call:{}", "does not begin with call:NAME"),
        ("call:f", "the end stands where '{' should"),
        ("call:f{", "the end stands where a key should"),
        ("call:f{a", "the end stands where ':' should"),
        ("call:f{a:", "the end is not a value"),
        ("call:f{a:1", "the end stands where ',' should"),
        ("call:f{a:1}}", "'}' follows the closing brace"),
        ("call:f{a:1,}", "'}' stands where a key should"),
        ("call:f{a:[1,]}", "']' is not a value"),
        ("call:f{a:word}", "'word' is not a value"),
        ('call:f{a:"word"}', "is not a value"),
        ("call:f{a:007}", "'007' is not a value"),
        ("call:f{a:٣}", "is not a value"),
        ("call:f{a:1e999}", "the number '1e999' is out of range"),
        (f"call:f{{a:{'9' * 5000}}}", "is not a value"),
        ('call:f{a:<|"|>x}', "a string is not closed"),
        ('call:f{a:<|"|>x<|"|><|"|>y<|"|>}', "'y' stands where ',' should"),
        ("call:f{a:" + "[" * 65, "nested deeper than 64 levels"),
    ],
)
def test_malformed_calls_say_what_is_wrong(text: str, error: str) -> None:
    call = parse(text)
    assert call.error is not None
    assert error in call.error
    assert call.arguments == {}


def test_of_a_key_that_stands_twice_the_last_value_counts() -> None:
    assert parse("call:f{a:1,b:3,a:2}").arguments == {"a": 2, "b": 3}
