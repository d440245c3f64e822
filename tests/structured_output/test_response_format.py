"""Response formats are read from options, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from dgemma.errors import InputError
from dgemma.structured_output.response_format import (
    MAX_FORMAT_CHARS,
    ChoiceFormat,
    JsonFormat,
    RegexFormat,
    ResponseFormat,
    Tool,
    ToolCallFormat,
    choice_format,
    pop_response_format,
    response_format_of,
    schema_text,
    tool_call_format,
)

NESTED: Any = {}
for _ in range(100_000):
    NESTED = {"not": NESTED}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"regex": None, "json_object": False}, None),
        ({"regex": "a+"}, RegexFormat("a+")),
        ({"choice": ["b", "a", "b"]}, ChoiceFormat(("b", "a"))),
        ({"json_schema": {"type": "null"}}, JsonFormat('{"type": "null"}')),
        ({"json_schema": '{"type": "null"}'}, JsonFormat('{"type": "null"}')),
        ({"json_schema": True}, JsonFormat("true")),
        ({"json_object": True}, JsonFormat()),
    ],
)
def test_options_become_a_response_format(options: dict[str, Any], expected: ResponseFormat | None) -> None:
    assert response_format_of(options) == expected


def test_a_format_is_popped_from_the_options() -> None:
    options = {"regex": "a", "seed": 1}
    assert pop_response_format(options) == RegexFormat("a")
    assert options == {"seed": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "a", "choice": ["b"]}, "regex and choice are both given"),
        ({"regex": 3}, "regex is 3"),
        ({"choice": "abc"}, "give a list of texts"),
        ({"choice": []}, "give a list of texts"),
        ({"choice": ["a", ""]}, "no text, or is empty"),
        ({"choice": ["a", 1]}, "no text, or is empty"),
        ({"choice": [str(n) for n in range(10_001)]}, "10001 options; at most 10000"),
        ({"choice": ["a" * (MAX_FORMAT_CHARS + 1)]}, "characters; at most"),
        ({"json_schema": 3}, "json_schema is a int"),
        ({"json_schema": "{"}, "json_schema is no JSON"),
        ({"json_schema": {"a": {1, 2}}}, "json_schema is no JSON"),
        ({"json_schema": {"minimum": float("nan")}}, "json_schema is no JSON"),
        ({"json_schema": NESTED}, "nested too deep"),
        ({"json_schema": '"' + "a" * MAX_FORMAT_CHARS + '"'}, "characters; at most"),
        ({"json_schema": {"const": "a" * MAX_FORMAT_CHARS}}, "characters; at most"),
    ],
)
def test_invalid_formats_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        response_format_of(options)


def test_a_field_is_called_as_its_caller_calls_it() -> None:
    with pytest.raises(InputError, match="guided_choice is 1"):
        choice_format(1, "guided_choice")
    with pytest.raises(InputError, match=r"tools.0. is a list"):
        schema_text([], "tools[0]")


WEATHER = {
    "type": "function",
    "function": {"name": "weather", "strict": True, "parameters": {"type": "object"}},
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"$ref": "elsewhere"}}}


def test_tool_calls_are_constrained_only_where_the_request_constrains_them() -> None:
    clock = Tool("clock", '{"$ref": "elsewhere"}')
    assert tool_call_format([CLOCK], required=False) is None
    odd = {"type": "function", "function": {"name": "odd", "parameters": "as the manual says"}}
    assert tool_call_format([odd], required=False) is None  # its schema is not used
    assert tool_call_format([], required=True) is None
    assert tool_call_format([CLOCK], required=True) == ToolCallFormat((clock,))
    both = ToolCallFormat((Tool("weather", '{"type": "object"}', strict=True), clock), allow_text=True)
    assert tool_call_format([WEATHER, CLOCK], required=False) == both
    assert both.relaxed().tools == (both.tools[0], Tool("clock"))
    assert tool_call_format([CLOCK], required=False, text_format=JsonFormat()) == ToolCallFormat(
        (clock,), text_format=JsonFormat()
    )
    assert tool_call_format([CLOCK], required=False, parallel=False) == ToolCallFormat(
        (clock,), allow_text=True, parallel=False
    )


def test_a_function_without_parameters_has_none() -> None:
    found = tool_call_format([{"type": "function", "function": {"name": "ping"}}], required=True)
    assert found == ToolCallFormat((Tool("ping", '{"properties": {}, "additionalProperties": false}'),))
