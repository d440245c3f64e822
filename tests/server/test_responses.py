"""/v1/responses: what reaches the engine, what is refused, and what comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dgemma.events import ToolCall
from dgemma.server.responses.protocol import ResponseEvent, ResponseObject
from server.fake_engine import CONTROLS, THINK, FakeEngine, FakeText, Script
from server.served import app_of, ask, error_of, named_events_of, post

RESPONSES = "/v1/responses"
HI: dict[str, Any] = {"model": "dgemma", "input": "Hello", "seed": 7}
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"place": "Köln"}'}
RETURNED = {"type": "function_call_output", "call_id": "c1", "output": "Rain"}
RAIN = ToolCall(name="weather", arguments={"place": "Köln"})
THOUGHTFUL = Script(text="So it rains.", thought="Hm.", tool_calls=(RAIN,), cached_tokens=3)


def prompt_of(**body: Any) -> str:
    """The text that the engine reads, as the fake template writes it."""
    engine = FakeEngine()
    response = post(app_of(engine), RESPONSES, {**HI, **body})
    assert response.status_code == 200, response.text
    return FakeText().decode(engine.requests[0].prompt)


def refusal(body: Any, **settings: Any) -> dict[str, Any]:
    content = json.dumps({**HI, **body}).encode()
    response = ask(
        app_of(**settings), "POST", RESPONSES, content=content, headers={"content-type": "application/json"}
    )
    assert response.status_code in (400, 404), response.text
    return error_of(response)


# What the model is asked


def test_a_text_is_a_message_of_the_users() -> None:
    assert prompt_of() == "<bos><|turn>user\nHello<turn|><|turn>"
    items = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Hel"}, {"type": "input_text", "text": "lo"}],
        }
    ]
    assert prompt_of(input=items) == prompt_of()


def test_instructions_and_leading_developer_messages_are_one_system_message() -> None:
    items = [
        {"role": "developer", "content": "B"},
        {"role": "system", "content": "C"},
        {"role": "user", "content": "D"},
    ]
    assert prompt_of(instructions="A", input=items).startswith(
        "<bos><|turn>system\nA\n\nB\n\nC<turn|><|turn>user\nD"
    )


def test_a_thought_a_text_and_calls_become_one_message_and_results_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    real = FakeText.render_chat

    def render(self: FakeText, messages: Any, **options: Any) -> tuple[int, ...]:
        seen.extend(messages)
        return real(self, messages, **options)

    monkeypatch.setattr(FakeText, "render_chat", render)
    items = [
        {"type": "message", "role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "r", "summary": [],
         "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed",
         "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
        CALL, {**CALL, "call_id": "c2"},
        RETURNED, {**RETURNED, "call_id": "c2", "output": [{"type": "input_text", "text": "Sun"}]},
    ]  # fmt: skip
    prompt_of(input=items, tools=[TOOL])
    user, reply, first, second = seen
    assert user == {"role": "user", "content": "Weather?"}
    assert (reply["role"], reply["content"], reply["reasoning_content"]) == ("assistant", "I look.", "Hm.")
    assert [call["id"] for call in reply["tool_calls"]] == ["c1", "c2"]
    assert [(m["tool_call_id"], m["content"]) for m in (first, second)] == [("c1", "Rain"), ("c2", "Sun")]


def test_a_summary_stands_for_a_thought_without_content() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    items = [
        {"role": "user", "content": "A"},
        thought,
        {"role": "assistant", "content": "B"},
        {"role": "user", "content": "C"},
    ]
    assert "assistant\nB" in prompt_of(input=items)


@pytest.mark.parametrize(
    ("reasoning", "thinks"),
    [
        (None, False), ({}, False), ({"effort": "none"}, False), ({"effort": "low"}, True),
        ({"summary": "auto"}, True), ({"effort": "none", "summary": "auto"}, False),
        ({"generate_summary": "detailed"}, True),
    ],
)  # fmt: skip
def test_effort_or_summary_switch_thinking(reasoning: Any, thinks: bool) -> None:
    assert (CONTROLS[THINK] in prompt_of(reasoning=reasoning)) == thinks


def test_options_reach_the_engine() -> None:
    engine = FakeEngine(adapters=("sums",))
    body = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "max_output_tokens": 9,
        "decode": "causal",
        "model": "sums",
    }
    assert (
        post(app_of(engine), RESPONSES, {**HI, **body, "logit_bias": {"5": 1}, "deadline_s": 5}).status_code
        == 200
    )
    (request,) = engine.requests
    assert (request.seed, request.adapter, request.logit_bias) == (7, "sums", ((5, 1.0),))
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (9, 0.5, 0.9, 5)


def test_tools_are_shown_unless_none_may_be_called() -> None:
    assert "weather" in prompt_of(tools=[TOOL])
    assert "weather" not in prompt_of(tools=[TOOL], tool_choice="none")


@pytest.mark.parametrize(
    ("body", "is_constrained"),
    [
        ({"tools": [TOOL]}, False),
        ({"tools": [{**TOOL, "strict": True}]}, True),
        ({"tools": [TOOL], "tool_choice": "required"}, True),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}}, True),
        ({"tools": [TOOL], "parallel_tool_calls": False}, True),
        ({"text": {"format": {"type": "text"}}}, False),
        ({"text": {"format": {"type": "json_object"}, "verbosity": "medium"}}, True),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}}}, True),
    ],
)
def test_formats_and_strict_tools_constrain_the_answer(body: dict[str, Any], is_constrained: bool) -> None:
    engine = FakeEngine()
    response = post(app_of(engine), RESPONSES, {**HI, **body})
    assert response.status_code == 200, response.text
    assert (engine.requests[0].constraint is not None) == is_constrained


# What comes back


def test_a_response_has_items_in_the_order_they_were_written_and_says_what_was_asked() -> None:
    body = {
        **HI,
        "tools": [TOOL],
        "instructions": "Be short.",
        "metadata": {"a": "b"},
        "max_output_tokens": 99,
    }
    raw = post(app_of(FakeEngine(THOUGHTFUL)), RESPONSES, body)
    found = ResponseObject.model_validate_json(raw.content, strict=True)
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call"]
    thought, message, call = raw.json()["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "So it rains."
    assert (call["name"], json.loads(call["arguments"]), call["status"]) == (
        "weather",
        {"place": "Köln"},
        "completed",
    )
    assert len({thought["id"], message["id"], call["id"], call["call_id"], found.id}) == 5
    assert (found.status, found.incomplete_details, found.error) == ("completed", None, None)
    assert (found.instructions, found.metadata, found.max_output_tokens) == ("Be short.", {"a": "b"}, 99)
    assert found.tools == [TOOL]
    assert found.usage is not None
    assert found.usage.input_tokens_details.cached_tokens == 3
    assert found.usage.output_tokens_details.reasoning_tokens == 3, "a byte is a token here"
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    assert found.dgemma is not None
    assert found.dgemma.seed == 7


def test_with_summary_the_thought_is_sent_as_a_summary() -> None:
    body = {**HI, "reasoning": {"effort": "low", "summary": "auto"}}
    thought = post(app_of(FakeEngine(THOUGHTFUL)), RESPONSES, body).json()["output"][0]
    assert thought["summary"] == [{"type": "summary_text", "text": "Hm."}]
    assert "content" not in thought
    names = [event["type"] for event in streamed(THOUGHTFUL, body)]
    assert names[2:8] == [
        "response.output_item.added", "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta", "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done", "response.output_item.done",
    ]  # fmt: skip


def test_an_answer_that_was_cut_off_is_incomplete() -> None:
    app = app_of(FakeEngine(Script(text="x" * 40)))
    found = post(app, RESPONSES, {**HI, "max_output_tokens": 9}).json()
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert found["output"][0]["status"] == "incomplete"
    held = app_of(FakeEngine(Script(text="x" * 40, holds_at=1)))
    found = post(held, RESPONSES, {**HI, "deadline_s": 0.01}).json()
    assert (found["status"], found["dgemma"]["finish_reason"]) == ("incomplete", "deadline")


def test_calls_of_tools_that_were_not_offered_are_no_items() -> None:
    found = post(app_of(FakeEngine(THOUGHTFUL)), RESPONSES, HI).json()
    assert [item["type"] for item in found["output"]] == ["reasoning", "message"]
    assert found["dgemma"]["unread_tool_calls"][0]["name"] == "weather"


# Streams


def streamed(script: Script, body: Any) -> list[dict[str, Any]]:
    response = post(app_of(FakeEngine(script)), RESPONSES, {**body, "stream": True})
    events = named_events_of(response)
    for name, event in events:
        assert name == event["type"]
        ResponseEvent.model_validate(event, strict=True)
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    return [event for _, event in events]


def test_the_events_of_a_stream_are_in_openais_order() -> None:
    events = streamed(THOUGHTFUL, {**HI, "tools": [TOOL]})
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    whole = events[-1]["response"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == whole[
        "output"
    ]
    again = post(app_of(FakeEngine(THOUGHTFUL)), RESPONSES, {**HI, "tools": [TOOL]}).json()
    same = ("status", "usage", "dgemma", "tools", "text")
    assert {name: whole[name] for name in same} == {name: again[name] for name in same}


def test_drafts_are_events_of_their_own_and_only_if_asked_for() -> None:
    script = Script(text="x" * 20)
    drafted = streamed(script, {**HI, "diffusing": True})
    drafts = [event for event in drafted if event["type"] == "dgemma.draft"]
    assert [event["draft"]["step"] for event in drafts] == [1, 2, 3, 1, 2, 3]
    assert not [event for event in streamed(script, HI) if event["type"] == "dgemma.draft"]
    assert refusal({"diffusing": True})["param"] == "diffusing"


def test_a_stream_that_fails_ends_with_a_failed_response() -> None:
    events = streamed(Script(text="x" * 40, fails_at=1), HI)
    last = events[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert "secret" not in last["response"]["error"]["message"]
    assert last["response"]["output"][0]["status"] == "incomplete"


# What is refused


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": 3}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": [{"role": "assistant", "content": "x"}]}, "input", "invalid_value"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type", "invalid_value"),
        ({"input": [{"type": 3}]}, "input.0.type", "invalid_value"),
        ({"input": [3]}, "input.0", "invalid_value"),
        ({"input": [{"role": "user"}]}, "input.0.content", "missing_required_parameter"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text",
         "missing_required_parameter"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0.type",
         "invalid_value"),
        ({"input": [RETURNED]}, "input.0.call_id", "invalid_value"),
        ({"input": [{"role": "user", "content": "x"}, CALL]}, "input", "invalid_value"),
        ({"input": [{"role": "user", "content": "x"}, {**CALL, "arguments": "{"}, RETURNED]}, "input",
         "invalid_value"),
        ({"input": [{"role": "user", "content": "x"}, {"role": "developer", "content": "y"}]}, "input.1.role",
         "unsupported_parameter"),
        ({"input": [{"role": "system", "content": [{"type": "input_image", "image_url": "data:"}]}]},
         "input.0.content", "invalid_value"),
        ({"input": [{"type": "reasoning", "encrypted_content": "gAAA"}]}, "input.0.encrypted_content",
         "invalid_value"),
        ({"input": "\ud800"}, "input", "invalid_value"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "invalid_value"),
        ({"tools": [{**TOOL, "defer_loading": 0}]}, "tools.0.defer_loading", "invalid_value"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools.0.defer_loading", "invalid_value"),
        ({"tools": [{**TOOL, "name": ""}]}, "tools.0.name", "invalid_value"),
        ({"tools": [{**TOOL, "parameters": {"properties": {"a": {"type": "x"}}}, "strict": True}]}, "tools",
         "invalid_value"),
        ({"tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "function", "name": "wether"}, "tools": [TOOL]}, "tool_choice",
         "invalid_value"),
        ({"tool_choice": {"type": "web_search"}, "tools": [TOOL]}, "tool_choice.type", "invalid_value"),
        ({"reasoning": {"effort": "lots"}}, "reasoning.effort", "invalid_value"),
        ({"text": {"format": {"type": "json"}}}, "text.format.type", "invalid_value"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "strin"}}}}, "text", "invalid_value"),
        ({"text": {"format": {"type": "json_schema", "schema": {"description": "x" * (4 << 20)}}}}, "text",
         "invalid_value"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "invalid_value"),
        ({"include": ["file_search_call.results"]}, "include.0", "invalid_value"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"conversation": "c"}, "conversation", "unsupported_parameter"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
        ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
        ({"max_tool_calls": 3}, "max_tool_calls", "unsupported_parameter"),
        ({"top_logprobs": 3}, "top_logprobs", "unsupported_parameter"),
        ({"trace": True}, "trace", "unsupported_parameter"),
        ({"max_output_tokens": 99_999}, "max_output_tokens", "context_length_exceeded"),
        ({"input": "x" * 5000}, "input", "context_length_exceeded"),
        ({"instrctions": "x"}, "instrctions", "unknown_parameter"),
        ({"ignore_end": True, "text": {"format": {"type": "json_object"}}}, "ignore_end",
         "unsupported_parameter"),
        ({"model": "gpt-4"}, "model", "model_not_found"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(body: dict[str, Any], param: str, code: str) -> None:
    error = refusal(body)
    assert (error["param"], error["code"]) == (param, code), error


def test_a_near_miss_of_a_tools_name_is_suggested() -> None:
    body = {"tool_choice": {"type": "function", "name": "wether"}, "tools": [TOOL]}
    assert "did you mean 'weather'?" in refusal(body)["message"]
