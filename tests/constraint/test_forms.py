"""What an answer can be asked to be, taken or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from dgemma.constraint.forms import (
    MAX_FORM_CHARS,
    Calls,
    Choice,
    Form,
    Json,
    Regex,
    Tool,
    calls_of,
    choice_of,
    form_of,
    schema_text,
    take_form,
)
from dgemma.errors import InputError

NESTED: Any = {}
for _ in range(100_000):
    NESTED = {"not": NESTED}


@pytest.mark.parametrize(
    ("options", "form"),
    [
        ({}, None),
        ({"regex": None, "json_object": False}, None),
        ({"regex": "a+"}, Regex("a+")),
        ({"choice": ["b", "a", "b"]}, Choice(("b", "a"))),
        ({"json_schema": {"type": "null"}}, Json('{"type": "null"}')),
        ({"json_schema": '{"type": "null"}'}, Json('{"type": "null"}')),
        ({"json_schema": True}, Json("true")),
        ({"json_object": True}, Json()),
    ],
)
def test_options_become_a_form(options: dict[str, Any], form: Form | None) -> None:
    assert form_of(options) == form


def test_a_form_is_taken_out_of_the_options() -> None:
    options = {"regex": "a", "seed": 1}
    assert take_form(options) == Regex("a")
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
        ({"choice": ["a" * (MAX_FORM_CHARS + 1)]}, "characters; at most"),
        ({"json_schema": 3}, "json_schema is a int"),
        ({"json_schema": "{"}, "json_schema is no JSON"),
        ({"json_schema": {"a": {1, 2}}}, "json_schema is no JSON"),
        ({"json_schema": {"minimum": float("nan")}}, "json_schema is no JSON"),
        ({"json_schema": NESTED}, "nested too deep"),
        ({"json_schema": '"' + "a" * MAX_FORM_CHARS + '"'}, "characters; at most"),
        ({"json_schema": {"const": "a" * MAX_FORM_CHARS}}, "characters; at most"),
    ],
)
def test_what_is_no_form_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        form_of(options)


def test_a_field_is_called_as_its_caller_calls_it() -> None:
    with pytest.raises(InputError, match="guided_choice is 1"):
        choice_of(1, "guided_choice")
    with pytest.raises(InputError, match=r"tools.0. is a list"):
        schema_text([], "tools[0]")


WEATHER = {
    "type": "function",
    "function": {"name": "weather", "strict": True, "parameters": {"type": "object"}},
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"$ref": "elsewhere"}}}


def test_tools_are_held_to_calls_only_where_something_is_asked_of_them() -> None:
    clock = Tool("clock", '{"$ref": "elsewhere"}')
    assert calls_of([CLOCK], required=False) is None
    odd = {"type": "function", "function": {"name": "odd", "parameters": "as the manual says"}}
    assert calls_of([odd], required=False) is None  # nobody asks for its schema
    assert calls_of([], required=True) is None
    assert calls_of([CLOCK], required=True) == Calls((clock,))
    both = Calls((Tool("weather", '{"type": "object"}', strict=True), clock), may_speak=True)
    assert calls_of([WEATHER, CLOCK], required=False) == both
    assert both.loose().tools == (both.tools[0], Tool("clock"))
    assert calls_of([CLOCK], required=False, instead=Json()) == Calls((clock,), instead=Json())
    assert calls_of([CLOCK], required=False, several=False) == Calls((clock,), may_speak=True, several=False)


def test_a_function_without_parameters_has_none() -> None:
    form = calls_of([{"type": "function", "function": {"name": "ping"}}], required=True)
    assert form == Calls((Tool("ping", '{"properties": {}, "additionalProperties": false}'),))
