"""Nothing that a client sends makes a 5xx: bodies mutated, torn and made of anything."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from server.fake_engine import FakeEngine, Script
from server.raw_client import RawClient
from server.served import CHAT, COMPLETIONS, HELLO, ONCE, WEATHER, app_of

APP = app_of(FakeEngine(Script(text="Yes.")), max_body_bytes=200_000)
RUNNER = asyncio.Runner()
FIELDS = (
    *HELLO, "prompt", "tools", "tool_choice", "stop", "stream", "stream_options", "diffusing", "n", "top_p",
    "top_k", "temperature", "logprobs", "top_logprobs", "logit_bias", "max_tokens", "max_completion_tokens",
    "preset", "decode", "end_tokens", "deadline_s", "chat_template_kwargs", "reasoning_effort", "extra_body",
    "response_format", "suffix", "user", "metadata", "t_min", "t_max", "frequency_penalty", "zzz",
)  # fmt: skip
FULL = {
    **HELLO,
    "tools": [WEATHER],
    "stop": ["a", "b"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "logit_bias": {"5": 1},
    "n": 2,
}
numbers = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([1 << 31, 1 << 63, 1 << 64, -(1 << 70), (1 << 1024) - 1, 1 << 1024, 0.5, -1e308, 1e-320]),
)
texts = st.one_of(
    st.sampled_from(["", "auto", "user", "role", "text", "none", "\ud800", "\x00"]), st.text(max_size=5)
)
anything = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "function", "name", "5"]) | texts, inner, max_size=3
        )
    ),
    max_leaves=6,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool"]) | anything},
        optional={"content": anything, "tool_calls": anything, "tool_call_id": anything, "name": anything},
    ),
    max_size=3,
)
# Few changes to a good body: with many, the first refusal hides the others.
changes = st.dictionaries(st.sampled_from(FIELDS), anything, min_size=1, max_size=3) | messages.map(
    lambda found: {"messages": found}
)
bounded = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module", autouse=True)
def one_loop() -> Iterator[None]:
    """One event loop for all examples: making one takes longer than a request."""
    with RUNNER:
        yield


async def sent(path: str, content: bytes) -> tuple[int | None, bytes]:
    client = RawClient(APP, path, content)
    await client.task
    return client.status, client.body


def check(path: str, content: bytes) -> None:
    status, body = RUNNER.run(sent(path, content))
    assert status in (200, 400, 404, 413), body
    if status != 200:
        (error,) = json.loads(body).values()
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"]
        assert error["type"] == "invalid_request_error"


@bounded
@given(changes)
@example({"temperature": (1 << 1024) - 1})
@example({"logit_bias": {"\ud800": 1}})
@example({"messages": [{"role": "user", "content": "\ud800"}]})
@example({"\ud800": 1})
def test_mutated_chats_never_give_a_5xx(changes: dict[str, Any]) -> None:
    check(CHAT, json.dumps({**FULL, **changes}).encode())


@bounded
@given(changes)
def test_mutated_completions_never_give_a_5xx(changes: dict[str, Any]) -> None:
    check(COMPLETIONS, json.dumps({**ONCE, **changes}).encode())


@bounded
@given(st.data())
def test_torn_and_garbled_bodies_never_give_a_5xx(data: st.DataObject) -> None:
    raw = bytearray(json.dumps(FULL).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        match data.draw(st.sampled_from(["cut", "byte", "insert", "repeat"])):
            case "cut":
                raw = raw[: at + 1]
            case "byte":
                raw[at] = data.draw(st.integers(0, 255))
            case "insert":
                raw[at:at] = data.draw(
                    st.sampled_from([b"[" * 3000, b"NaN", b"1e999", b'"', b"\xff", b"{}", b","])
                )
            case "repeat":
                raw = raw + raw[at:]
    check(CHAT, bytes(raw))
