"""/v1/messages: what reaches the engine, what is refused, and what comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dgemma.events import ToolCall
from dgemma.server.messages.protocol import MessageEvent, MessageObject, MessagesErrorResponse
from server.fake_engine import CONTROLS, THINK, FakeEngine, FakeText, Script
from server.served import app_of, ask, named_events_of, post

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
USER = {"role": "user", "content": "Hello"}
HI: dict[str, Any] = {"model": "dgemma", "max_tokens": 99, "messages": [USER], "seed": 7}
TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a place.",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}},
}
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"place": "Köln"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "Rain"}
RAIN = ToolCall(name="weather", arguments={"place": "Köln"})
THOUGHTFUL = Script(text="So it rains.", thought="Hm.", tool_calls=(RAIN,), cached_tokens=3)


def prompt_of(**body: Any) -> str:
    """The text that the engine reads, as the fake template writes it."""
    engine = FakeEngine()
    response = post(app_of(engine), MESSAGES, {**HI, **body})
    assert response.status_code == 200, response.text
    return FakeText().decode(engine.requests[0].prompt)


def refusal(body: Any, path: str = MESSAGES, **settings: Any) -> tuple[int, str, str]:
    """Status, kind and text of an error, which must have Anthropic's form."""
    content = json.dumps(body).encode()
    response = ask(
        app_of(**settings), "POST", path, content=content, headers={"content-type": "application/json"}
    )
    found = MessagesErrorResponse.model_validate_json(response.content, strict=True)
    assert found.request_id == response.headers["x-request-id"]
    return response.status_code, found.error.type, found.error.message


def messages_of(monkeypatch: pytest.MonkeyPatch, **body: Any) -> list[Any]:
    """The messages that the chat template is given."""
    seen: list[Any] = []
    real = FakeText.render_chat

    def render(self: FakeText, messages: Any, **options: Any) -> tuple[int, ...]:
        seen.extend(messages)
        return real(self, messages, **options)

    monkeypatch.setattr(FakeText, "render_chat", render)
    prompt_of(**body)
    return seen


# What the model is asked


def test_texts_and_text_blocks_are_alike() -> None:
    blocks = [
        {"type": "text", "text": "Hel"},
        {"type": "text", "text": "lo", "cache_control": {"type": "ephemeral"}},
    ]
    assert prompt_of() == "<bos><|turn>user\nHello<turn|><|turn>"
    assert prompt_of(messages=[{"role": "user", "content": blocks}]) == prompt_of()


def test_system_is_a_text_or_blocks_and_leading_system_messages_join_it() -> None:
    blocks = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    said = prompt_of(system=blocks, messages=[{"role": "system", "content": "C"}, USER])
    assert said.startswith("<bos><|turn>system\nA\n\nB\n\nC<turn|><|turn>user\nHello")
    assert prompt_of(system="A").startswith("<bos><|turn>system\nA<turn|>")


def test_thoughts_texts_and_calls_are_one_message_and_each_result_is_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages = [
        USER,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"},
            {"type": "text", "text": "I look."}, USE, {**USE, "id": "t2"},
        ]},
        {"role": "user", "content": [
            RESULT,
            {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "Sun"}],
             "is_error": False},
            {"type": "text", "text": "And?"},
        ]},
    ]  # fmt: skip
    _, reply, first, second, user = messages_of(monkeypatch, messages=messages, tools=[TOOL])
    assert (reply["role"], reply["content"], reply["reasoning_content"]) == ("assistant", "I look.", "Hm.")
    assert [call["id"] for call in reply["tool_calls"]] == ["t1", "t2"]
    assert reply["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"place": "Köln"}}
    assert [(m["tool_call_id"], m["content"]) for m in (first, second)] == [("t1", "Rain"), ("t2", "Sun")]
    assert user == {"role": "user", "content": "And?"}


def test_a_result_may_be_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    result = {"type": "tool_result", "tool_use_id": "t1"}
    messages = [USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]
    assert messages_of(monkeypatch, messages=messages)[-1]["content"] == ""


@pytest.mark.parametrize(
    ("thinking", "thinks"),
    [
        (None, False), ({"type": "disabled"}, False), ({"type": "adaptive"}, True),
        ({"type": "enabled", "budget_tokens": 1024}, True),
    ],
)  # fmt: skip
def test_thinking_is_on_or_off(thinking: Any, thinks: bool) -> None:
    assert (CONTROLS[THINK] in prompt_of(thinking=thinking)) == thinks


def test_options_reach_the_engine() -> None:
    engine = FakeEngine(adapters=("sums",))
    body = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "decode": "causal", "model": "sums"}
    body |= {"max_tokens": 9, "stop_sequences": ["X", "Y"], "metadata": {"user_id": None}, "deadline_s": 5}
    assert post(app_of(engine), MESSAGES, {**HI, **body}).status_code == 200
    (request,) = engine.requests
    assert (request.seed, request.adapter) == (7, "sums")
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (9, 0.5, 0.9, 5)
    assert params.stop == ("X", "Y")


@pytest.mark.parametrize(
    ("choice", "is_shown"), [({"type": "auto"}, True), ({"type": "any"}, True), ({"type": "none"}, False)]
)
def test_tools_are_shown_unless_none_may_be_called(choice: Any, is_shown: bool) -> None:
    assert ("weather" in prompt_of(tools=[TOOL], tool_choice=choice)) == is_shown


@pytest.mark.parametrize(
    ("body", "is_constrained"),
    [
        ({"tools": [TOOL]}, False),
        ({"tools": [{**TOOL, "strict": True, "type": "custom"}]}, True),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, True),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}, True),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, True),
        ({"output_config": {"effort": "high"}}, False),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "integer"}}}}, True),
    ],
)
def test_formats_and_strict_tools_constrain_the_answer(body: dict[str, Any], is_constrained: bool) -> None:
    engine = FakeEngine()
    response = post(app_of(engine), MESSAGES, {**HI, **body})
    assert response.status_code == 200, response.text
    assert (engine.requests[0].constraint is not None) == is_constrained


# What comes back


def test_a_message_has_blocks_in_the_order_they_were_written() -> None:
    raw = post(app_of(FakeEngine(THOUGHTFUL)), MESSAGES, {**HI, "tools": [TOOL]})
    found = MessageObject.model_validate_json(raw.content, strict=True)
    thought, text, use = raw.json()["content"]
    assert thought == {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"}
    assert (text["type"], text["text"]) == ("text", "So it rains.")
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "weather", {"place": "Köln"})
    assert (found.stop_reason, found.stop_sequence) == ("tool_use", None)
    assert found.usage.cache_read_input_tokens == 3
    prompt = (
        FakeText().render_chat([USER], tools=[{"type": "function", "function": {"name": "weather"}}]).tokens
    )
    assert found.usage.input_tokens + 3 == len(prompt)
    assert found.usage.output_tokens_details is not None
    assert found.usage.output_tokens_details.thinking_tokens == 3, "a byte is a token here"


@pytest.mark.parametrize(
    ("script", "body", "reason", "sequence"),
    [
        (Script(text="Yes."), {}, "end_turn", None),
        (Script(text="Yes. No."), {"stop_sequences": ["No"]}, "stop_sequence", "No"),
        (Script(text="x" * 40), {"max_tokens": 9}, "max_tokens", None),
        (Script(text="x" * 40, holds_at=1), {"deadline_s": 0.01}, "max_tokens", None),
        (THOUGHTFUL, {"tools": [TOOL]}, "tool_use", None),
        (THOUGHTFUL, {}, "end_turn", None),
    ],
)
def test_the_reason_for_the_end_is_anthropics(
    script: Script, body: dict[str, Any], reason: str, sequence: str | None
) -> None:
    found = post(app_of(FakeEngine(script)), MESSAGES, {**HI, **body}).json()
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)


def test_a_thought_that_shall_be_omitted_is_an_empty_block() -> None:
    body = {**HI, "thinking": {"type": "adaptive", "display": "omitted"}}
    thought = post(app_of(FakeEngine(THOUGHTFUL)), MESSAGES, body).json()["content"][0]
    assert (thought["type"], thought["thinking"]) == ("thinking", "")
    deltas = [
        event["delta"]["type"]
        for event in streamed(THOUGHTFUL, body)
        if event["type"] == "content_block_delta"
    ]
    assert deltas == ["signature_delta", "text_delta"]


def test_tokens_are_counted_as_the_message_would_read_them() -> None:
    body = {"model": "dgemma", "messages": [USER], "system": "Be short.", "tools": [TOOL]}
    app = app_of()
    counted = post(app, COUNT, body).json()
    answered = post(app, MESSAGES, {**body, "max_tokens": 9}).json()
    assert counted == {"input_tokens": answered["usage"]["input_tokens"]}


# Streams


def streamed(script: Script, body: Any) -> list[dict[str, Any]]:
    response = post(app_of(FakeEngine(script)), MESSAGES, {**body, "stream": True})
    events = named_events_of(response)
    for name, event in events:
        assert name == event["type"]
        MessageEvent.model_validate(event, strict=True)
    return [event for _, event in events]


def test_the_events_of_a_stream_are_in_anthropics_order() -> None:
    events = streamed(THOUGHTFUL, {**HI, "tools": [TOOL]})
    assert [event.get("delta", {}).get("type") or event["type"] for event in events] == [
        "message_start", "ping",
        "content_block_start", "thinking_delta", "signature_delta", "content_block_stop",
        "content_block_start", "text_delta", "content_block_stop",
        "content_block_start", "input_json_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert [event["index"] for event in events if "index" in event] == [0] * 4 + [1] * 3 + [2] * 3
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    whole = post(app_of(FakeEngine(THOUGHTFUL)), MESSAGES, {**HI, "tools": [TOOL]}).json()
    assert {name: events[-2][name] for name in ("usage", "dgemma")} == {
        name: whole[name] for name in ("usage", "dgemma")
    }


def test_drafts_are_events_of_their_own_and_only_if_asked_for() -> None:
    script = Script(text="x" * 20)
    drafts = [
        event for event in streamed(script, {**HI, "diffusing": True}) if event["type"] == "dgemma.draft"
    ]
    assert [event["draft"]["step"] for event in drafts] == [1, 2, 3, 1, 2, 3]
    assert not [event for event in streamed(script, HI) if event["type"] == "dgemma.draft"]


def test_a_stream_that_fails_ends_with_an_error() -> None:
    last = streamed(Script(text="x" * 40, fails_at=1), HI)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "secret" not in last["error"]["message"]


# What is refused


def content(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


@pytest.mark.parametrize(
    ("body", "beginning"),
    [
        ({"messages": []}, "messages is a list"),
        ({"messages": [{"role": "user"}]}, "messages.0.content is missing"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages.0.role is 'bot'"),
        ({"messages": [USER, {"role": "assistant", "content": "So"}]}, "messages ends without a message"),
        ({"messages": [USER, {"role": "system", "content": "x"}]}, "messages.1.role is 'system' after"),
        ({"messages": [{"role": "system", "content": [PICTURE]}, USER]}, "messages.0.content.0 is of type"),
        ({"messages": [USER, {"role": "assistant", "content": [PICTURE]}, USER]}, "messages.1.content.0 is"),
        (content({"type": "document"}), "messages.0.content.0.type is 'document'; it must be one of"),
        (content({"type": "redacted_thinking", "data": "x"}), "messages.0.content.0.type is 'redacted"),
        (content({"type": "text"}), "messages.0.content.0.text is missing"),
        (content({"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "9m"}}),
         "messages.0.content.0.cache_control.ttl is '9m'"),
        (content(USE), "messages.0.content.0 is of type 'tool_use', which a user's message cannot hold"),
        (content(RESULT), "messages.0.content.0.tool_use_id is 't1', but"),
        ({"messages": [USER, {"role": "assistant", "content": [USE]},
                       {"role": "user", "content": [{"type": "text", "text": "x"}, RESULT]}]},
         "messages.2.content.1 is a tool_result after other content"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type is 'web"),
        ({"tools": [{**TOOL, "input_examples": [{}]}]}, "unknown field 'tools.0.input_examples'"),
        ({"tools": [{**TOOL, "strict": True, "input_schema": {"properties": {"a": {"type": "x"}}}}]},
         "tools: "),
        ({"tool_choice": {"type": "any"}}, "tool_choice asks for a call, but there are no tools"),
        ({"tool_choice": {"type": "tool", "name": "wether"}, "tools": [TOOL]},
         "tool_choice names the function 'wether'"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is missing"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type is 'between_tools'"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "output_config: "),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"description": "x" * (4 << 20)}}}},
         "output_config.format.schema has"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences is a list"),
        ({"stop_sequences": [""]}, "stop_sequences.0 is ''"),
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": 99_999}, "max_tokens is 99999; this model's context leaves"),
        ({"container": "x"}, "container is 'x', which is not supported"),
        ({"speed": "fast"}, "speed is 'fast', which is not supported"),
        ({"trace": True}, "trace is True, which is not supported"),
        ({"thread": {"type": "create"}}, "thread is an object, which is not supported"),
        ({"n": 2}, "unknown field 'n'"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages holds the lone surrogate"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(body: dict[str, Any], beginning: str) -> None:
    status, kind, message = refusal({**HI, **body})
    assert (status, kind) == (400, "invalid_request_error")
    assert message.startswith(beginning), message


def test_an_error_names_its_field_and_what_is_wrong_with_it() -> None:
    found = post(app_of(), MESSAGES, {**HI, "temprature": 1}).json()["error"]["details"]
    assert found == {"error_code": "unknown_parameter", "param": "temprature"}


def test_every_error_has_anthropics_form_and_kind() -> None:
    assert refusal({**HI, "model": "claude"})[:2] == (404, "not_found_error")
    assert refusal(HI, api_keys=("k",))[:2] == (401, "authentication_error")
    assert refusal(HI, max_body_bytes=9)[:2] == (413, "request_too_large")
    assert refusal({"model": "dgemma"}, COUNT)[:2] == (400, "invalid_request_error")
    assert refusal({"model": "claude", "messages": [USER]}, COUNT)[:2] == (404, "not_found_error")
    assert refusal(HI, f"{MESSAGES}/batches")[:2] == (404, "not_found_error")
    for script, status, kind in (
        (Script(fails_at=0), 500, "api_error"),
        (Script(error=Exception("secret"), fails_at=0), 500, "api_error"),
    ):
        response = post(app_of(FakeEngine(script)), MESSAGES, HI)
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
        assert "secret" not in response.text
    busy = FakeEngine()
    busy.busy_for_s = 3
    response = post(app_of(busy), MESSAGES, HI)
    assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
    assert response.headers["retry-after"] == "3"
    leaving = FakeEngine()
    leaving.is_draining = True
    response = post(app_of(leaving), MESSAGES, HI)
    assert (response.status_code, response.json()["error"]["type"]) == (503, "overloaded_error")
