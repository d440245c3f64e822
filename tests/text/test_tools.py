"""Tool declarations have OpenAI's form or are refused."""

from __future__ import annotations

from typing import Any

import pytest

from dgemma.errors import InputError
from dgemma.text.json_value import JsonReader
from dgemma.text.tools import read_tools

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_declarations_are_copied() -> None:
    tools = read_tools([TOOL], JsonReader())
    assert tools == [TOOL]
    assert tools is not None
    assert tools[0] is not TOOL


@pytest.mark.parametrize("nothing", [None, [], ()])
def test_no_tools_are_none(nothing: Any) -> None:
    assert read_tools(nothing, JsonReader()) is None


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        (TOOL, "tools is of type dict; give a list"),
        ([TOOL] * 1025, "tools has 1025 declarations; at most 1024"),
        ([TOOL, "f"], "tool 2 is not of the form"),
        ([{"name": "f"}], "tool 1 is not of the form"),
        ([{**TOOL, "type": "web_search"}], "tool 1 is not of the form"),
        ([{"type": "function", "function": {}}], "tool 1 has no name"),
        ([{"type": "function", "function": {"name": ""}}], "tool 1 has no name"),
        ([{"type": "function", "function": {"name": "f", "parameters": "x"}}], "parameters is not an object"),
        ([print], "tool 1 holds a value of type builtin_function_or_method"),
    ],
)
def test_other_tools_are_refused_by_name(tools: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        read_tools(tools, JsonReader())
