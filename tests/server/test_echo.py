"""The prompt before its answer, and the log-probabilities of its tokens, in OpenAI's form and in vLLM's."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from dgemma.engine.request import EngineRequest
from dgemma.engine.service import Accepted, EngineEvent
from dgemma.events import Finish
from dgemma.server.serving import MAX_PROMPT_LOGPROBS
from server.fake_engine import BOS, END, FakeEngine, Script
from server.served import CHAT, COMPLETIONS, HELLO, ONCE, app_of, post
from server.test_completions import stream_of, whole_of


def refusal(path: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    body = {**(HELLO if path == CHAT else ONCE), **fields}
    response = post(app_of(FakeEngine()), path, body)
    assert response.status_code == 400
    error: dict[str, Any] = response.json()["error"]
    return error


def test_the_prompt_stands_before_its_answer() -> None:
    plain = whole_of(FakeEngine(), prompt=["ab", "c"], n=2)["choices"]
    echoed = whole_of(FakeEngine(), prompt=["ab", "c"], n=2, echo=True)["choices"]
    assert [choice["text"] for choice in echoed] == [
        prompt + choice["text"] for prompt, choice in zip(["ab", "ab", "c", "c"], plain, strict=True)
    ]
    assert all(choice["logprobs"] is None for choice in echoed)


def test_a_prompt_of_ids_has_its_text_without_controls() -> None:
    prompt = [BOS, 0xC3, 0x84, 98, END]
    reply = whole_of(FakeEngine(Script(text="!")), prompt=prompt, echo=True)
    assert reply["choices"][0]["text"] == "Äb!"


def test_log_probabilities_of_the_prompt_come_first_and_offsets_go_on() -> None:
    fields = {"prompt": "Äb", "echo": True, "logprobs": 1}
    logprobs = whole_of(FakeEngine(Script(text="cd")), **fields)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["<bos>", "bytes:\\xc3", "bytes:\\x84", "b", "c", "d", "<turn|>"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.1, -0.1, -0.1]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][3] == {"c": -0.25}
    assert logprobs["top_logprobs"][4] == {"c": -0.1}
    assert logprobs["text_offset"] == [0, 0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_stream_joins_to_the_whole_answer(logprobs: int | None, max_tokens: int) -> None:
    fields = {"prompt": ["ab", "c"], "n": 2, "echo": True, "logprobs": logprobs, "max_tokens": max_tokens}
    whole = whole_of(FakeEngine(), **fields)
    chunks = [chunk["choices"][0] for chunk in stream_of(FakeEngine(), **fields)]
    for choice in whole["choices"]:
        mine = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        for name, values in (choice["logprobs"] or {}).items():
            assert [v for chunk in mine if "logprobs" in chunk for v in chunk["logprobs"][name]] == values


def test_without_tokens_to_write_the_prompt_alone_is_read() -> None:
    engine = FakeEngine()
    reply = whole_of(engine, prompt="ab", echo=True, logprobs=0, max_tokens=0)
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["dgemma"]["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"] == [None, {}, {}]
    assert (reply["usage"]["completion_tokens"], reply["usage"]["prompt_tokens"]) == (0, 3)
    (request,) = engine.requests
    assert (request.score_from, request.prompt_logprobs) == (1, 0)
    whole_of(engine, prompt="ab", echo=True, max_tokens=0)
    assert (engine.requests[1].score_from, engine.requests[1].prompt_logprobs) == (3, None)


def test_vllms_field_has_the_token_itself_and_the_likeliest_by_id() -> None:
    reply = whole_of(FakeEngine(), prompt=["a", "b"], prompt_logprobs=1, max_tokens=2)
    assert [choice["prompt_logprobs"] for choice in reply["choices"]] == [
        [
            None,
            {
                "98": {"logprob": -0.25, "rank": 1, "decoded_token": "b"},
                "97": {"logprob": -0.5, "rank": 2, "decoded_token": "a"},
            },
        ],
        [
            None,
            {
                "99": {"logprob": -0.25, "rank": 1, "decoded_token": "c"},
                "98": {"logprob": -0.5, "rank": 2, "decoded_token": "b"},
            },
        ],
    ]
    assert "prompt_logprobs" not in whole_of(FakeEngine())["choices"][0]


def test_a_chat_has_them_once() -> None:
    engine = FakeEngine()
    response = post(app_of(engine), CHAT, {**HELLO, "prompt_logprobs": 0, "n": 2})
    found = response.json()["prompt_logprobs"]
    assert len(found) == response.json()["usage"]["prompt_tokens"]
    assert found[0] is None
    assert all(len(entry) == 1 for entry in found[1:])
    assert [request.prompt_logprobs for request in engine.requests] == [0, None]


def test_answers_of_one_prompt_share_what_was_computed_once_but_a_stream_does_not_wait() -> None:
    engine = FakeEngine()
    reply = whole_of(engine, n=2, echo=True, logprobs=1)
    assert [request.prompt_logprobs for request in engine.requests] == [1, None]
    first, second = (choice["logprobs"]["token_logprobs"][:5] for choice in reply["choices"])
    assert first == second
    stream_of(engine, n=2, echo=True, logprobs=1)
    assert [request.prompt_logprobs for request in engine.requests[2:]] == [1, 1]


def test_a_deadline_before_the_prompt_is_read_leaves_null() -> None:
    class Late(FakeEngine):
        """Its deadline comes while it reads: there is no score yet."""

        async def _events(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
            async for event in super()._events(request):
                if isinstance(event, Finish):
                    yield replace(event, answer=replace(event.answer, prompt_logprobs=()))
                elif isinstance(event, Accepted):
                    yield event

    fields = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 0}
    whole = whole_of(Late(), **fields)["choices"][0]
    assert whole["logprobs"]["token_logprobs"] == [None] * 3
    (chunk, *_) = stream_of(Late(), **fields)
    assert chunk["choices"][0]["logprobs"] == whole["logprobs"]
    assert chunk["choices"][0]["text"] == "ab"


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "max_tokens is 0, so nothing would be returned"),
        (
            COMPLETIONS,
            {"prompt_logprobs": 1, "stream": True},
            "prompt_logprobs",
            "prompt_logprobs is not returned in a stream",
        ),
        (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not returned in a stream"),
        (CHAT, {"echo": True}, "echo", "unknown field 'echo'"),
        (COMPLETIONS, {"prompt_logprobs": -1}, "prompt_logprobs", "prompt_logprobs is -1"),
        (COMPLETIONS, {"suffix": "s", "echo": True}, "echo", "echo is True, which is not supported"),
        (COMPLETIONS, {"suffix": "s", "prompt_logprobs": 0}, "prompt_logprobs", "not supported with suffix"),
        (COMPLETIONS, {"suffix": "s", "max_tokens": 0}, "max_tokens", "give the longest gap"),
        (COMPLETIONS, {"echo": 1}, "echo", "echo is 1"),
    ],
)
def test_what_cannot_be_returned_is_refused_by_name(
    path: str, fields: dict[str, Any], param: str, message: str
) -> None:
    error = refusal(path, **fields)
    assert error["param"] == param
    assert message in error["message"]


def test_the_numbers_of_a_response_are_bounded() -> None:
    engine = FakeEngine(max_positions=MAX_PROMPT_LOGPROBS)
    body = {**ONCE, "prompt": "a" * (MAX_PROMPT_LOGPROBS // 21), "prompt_logprobs": 20, "max_tokens": 0}
    response = post(app_of(engine), COMPLETIONS, body)
    assert response.status_code == 400
    assert f"at most {MAX_PROMPT_LOGPROBS} are returned" in response.json()["error"]["message"]
    assert not engine.requests


def test_a_prompt_that_is_only_read_may_fill_the_context() -> None:
    engine = FakeEngine(max_positions=64)
    fields: dict[str, Any] = {"prompt": "a" * 63, "echo": True, "logprobs": 1}
    assert whole_of(engine, **fields, max_tokens=0)["usage"]["prompt_tokens"] == 64
    for too_long in ({"max_tokens": 1}, {"max_tokens": 0, "prompt": "a" * 64}):
        assert refusal_of(engine, **{**fields, **too_long})["code"] == "context_length_exceeded"


def refusal_of(engine: FakeEngine, **fields: Any) -> dict[str, Any]:
    error: dict[str, Any] = post(app_of(engine), COMPLETIONS, {**ONCE, **fields}).json()["error"]
    return error
