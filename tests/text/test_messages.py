"""Messages and tool declarations are validated and normalized before rendering."""

from __future__ import annotations

from typing import Any

import pytest

from dgemma.errors import InputError
from dgemma.text.json_value import JsonReader
from dgemma.text.messages import MAX_MESSAGES, read_messages, read_tools

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def calling(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": function}]}


CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def read(*messages: Any, for_reply: bool = True) -> list[dict[str, Any]]:
    return read_messages(list(messages), JsonReader(), for_reply=for_reply)


def test_roles_have_one_name_each() -> None:
    chat = read({"role": "developer", "content": "s"}, USER, {"role": "model", "content": "m"}, USER, USER)
    assert [message["role"] for message in chat] == ["system", "user", "assistant", "user", "user"]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]
    assert read({"role": "user", "content": parts}) == [{"role": "user", "content": "a b"}]


def test_entries_that_say_nothing_are_as_if_absent() -> None:
    message = {**USER, "refusal": None, "annotations": [], "tool_calls": []}
    assert read(message) == [USER]


def test_a_call_may_stand_without_content_and_its_arguments_may_be_json_text() -> None:
    as_text = {**CALL, "function": {"name": "f", "arguments": '{"x": 1}'}}
    chat = read(USER, {"role": "assistant", "tool_calls": [CALL, as_text]}, for_reply=False)
    assert chat[1] == {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}
    (message,) = read(calling(name="f", arguments=""), for_reply=False)
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]


def test_a_result_knows_its_tool_by_id_or_by_name() -> None:
    results = [
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "name": "g", "content": "2"},
    ]
    assert [message["name"] for message in read(USER, CALLING, *results)[2:]] == ["f", "g"]


def test_a_result_with_an_id_goes_by_its_name_when_calls_have_no_ids() -> None:
    chat = read(USER, calling(name="f"), {"role": "tool", "tool_call_id": "c9", "name": "f", "content": "1"})
    assert chat[2]["name"] == "f"


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_is_found_under_each_of_its_names(key: str) -> None:
    (message,) = read({"role": "assistant", "content": "a", key: "r"}, for_reply=False)
    assert message["reasoning_content"] == message["reasoning"] == message["thinking"] == "r"


def test_what_comes_out_shares_nothing_with_what_went_in() -> None:
    arguments = {"x": [1]}
    (message,) = read(calling(name="f", arguments=arguments), for_reply=False)
    arguments["x"].append(2)
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": [1]}


def test_training_chats_may_end_with_the_model() -> None:
    assert len(read(USER, {"role": "assistant", "content": "a"}, for_reply=False)) == 2


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ("hi", "messages is of type str; give a list"),
        ({}, "messages is of type dict"),
        ([], "messages is empty"),
        ([USER] * (MAX_MESSAGES + 1), "messages has 10001 messages; at most 10000"),
        (["hi"], "message 1 is of type str; give an object"),
        ([{"content": "hi"}], "message 1 has role None; known are"),
        ([{"role": "usr", "content": "hi"}], "has role 'usr'; .* did you mean 'user'"),
        ([{"role": ["user"], "content": "hi"}], "message 1 has role"),
        ([{"role": 7, "content": "hi"}], "message 1 has role of type int"),
        ([{"role": "user", "contnet": "hi"}], "unknown key 'contnet'; did you mean 'content'"),
        ([{"role": "user", "content": "hi", 7: "x"}], "unknown key of type int"),
        ([{**USER, "tool_calls": [CALL]}], "message 1 has an unknown key 'tool_calls'"),
        ([{"role": "user"}], "message 1: content is missing or null"),
        ([{"role": "user", "content": None}], "message 1: content is missing or null"),
        ([{"role": "user", "content": 7}], "message 1: content is of type int"),
        ([{**USER, "name": 7}], "message 1: name is of type int"),
        ([{"role": "user", "content": ["hi"]}], "message 1: a content part is of type str"),
        ([{"role": "user", "content": [{"text": "hi"}]}], "content part of type None; only 'text'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "text of a content part is of type NoneType"),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}], "unknown key 'x'"),
        ([USER, {"role": "system", "content": "s"}, USER], "message 2 has role 'system'; only the first"),
        ([USER, {"role": "assistant", "content": "a"}], "message 2, the last, has role 'assistant'"),
        ([{"role": "system", "content": "s"}], "message 1, the last, has role 'system'"),
        ([USER, {"role": "tool", "content": "1"}], "message 2 has role 'tool', but no assistant message"),
        ([CALLING, USER, {"role": "tool", "content": "1"}], "message 3 has role 'tool', but no assistant"),
        ([CALLING, {"role": "tool", "content": "1"}], "does not say which call it answers"),
        ([CALLING, {"role": "tool", "tool_call_id": "c2", "content": "1"}], "answers tool call 'c2'"),
        ([{**CALLING, "tool_calls": "f"}], "tool_calls is of type str; give a list"),
        ([{**CALLING, "tool_calls": ["f"]}], "tool_calls is of type str; give an object"),
        ([{**CALLING, "tool_calls": [{**CALL, "fn": 1}]}], "unknown key 'fn'"),
        ([{**CALLING, "tool_calls": [{**CALL, "type": "custom"}]}], "call of type 'custom'"),
        ([{**CALLING, "tool_calls": [{"id": "c"}]}], "function is of type NoneType"),
        ([calling(arguments={})], "the function's name is of type NoneType"),
        ([calling(name="f", arguments="{")], "not valid JSON"),
        ([calling(name="f", arguments="[" * 99999)], "not valid JSON"),
        ([calling(name="f", arguments="[1]")], "arguments is of type list; give an object"),
        ([calling(name="f", arguments=7)], "arguments is of type int; give an object"),
        ([calling(name="f", args={})], "unknown key 'args'"),
        ([{"role": "assistant", "reasoning": "r", "thinking": "s", "content": ""}], "reasoning and thinking"),
    ],
)  # fmt: skip
def test_other_chats_are_refused_by_name(messages: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        read_messages(messages, JsonReader(), for_reply=True)


@pytest.mark.parametrize(
    ("kind", "medium"),
    [
        ("image", "image"), ("image_url", "image"), ("input_image", "image"), ("input_audio", "audio"),
        ("video_url", "video"), ("file", "file"), ("input_file", "file"),
    ],
)  # fmt: skip
def test_media_are_refused_by_name(kind: str, medium: str) -> None:
    message = {"role": "user", "content": [{"type": kind, kind: {"url": "https://example.org/x"}}]}
    with pytest.raises(InputError) as caught:
        read(USER, message)
    assert str(caught.value) == f"{medium}s are not supported yet; remove the {kind!r} part of message 2."


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
