"""Nothing that a client sends makes a 5xx or stays in memory: bodies mutated, torn and made of anything."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import logging
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dgemma.server.decisions.protocol import ConversationMessage
from dgemma.server.decisions.serving import messages_of
from dgemma.server.http.errors import ApiError
from dgemma.server.messages.blocks import MessageInput
from dgemma.server.messages.conversation import MessageReader
from dgemma.server.reply import check_named_tool
from dgemma.server.responses.conversation import ItemReader
from dgemma.server.responses.items import InputMessage
from server.canvas_bodies import (
    DECIDE,
    DECIDE_BY_NAME,
    DECISIONS,
    EDIT,
    EDIT_ASKED,
    FIM,
    GAP,
    INFILL,
    SYSTEM_ONE,
    VIM_READS_AHEAD,
    VSCODE,
)
from server.fake_engine import FakeEngine, Script
from server.raw_client import RawClient
from server.served import CHAT, COMPLETIONS, HELLO, ONCE, WEATHER, app_of
from sizes import cases

APP = app_of(FakeEngine(Script(text="Yes.")), max_body_bytes=200_000)
RUNNER = asyncio.Runner()
FIELDS = (
    *HELLO, "prompt", "tools", "tool_choice", "stop", "stream", "stream_options", "diffusing", "n", "top_p",
    "top_k", "temperature", "logprobs", "top_logprobs", "logit_bias", "max_tokens", "max_completion_tokens",
    "preset", "decode", "end_tokens", "deadline_s", "chat_template_kwargs", "reasoning_effort", "extra_body",
    "response_format", "regex", "choice", "json_schema", "structured_outputs", "guided_json", "suffix",
    "user", "metadata", "t_min", "t_max", "frequency_penalty", "zzz",
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
bounded = settings(max_examples=cases(1000, 100), deadline=None, suppress_health_check=list(HealthCheck))


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
    if status != 200 and path.startswith(MESSAGES):
        assert json.loads(body)["error"].keys() == {"type", "message", "details"}
    elif status != 200:
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


# Turns of an agent, with all they may hold
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
AGENT_RESPONSES: list[dict[str, Any]] = [
    {
        "model": "dgemma",
        "instructions": "Be short.",
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "A"}]},
            {"type": "message", "role": "user", "content": "Weather?"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "id": "r"},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_text", "text": "Rain"}],
            },
        ],
        "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}],
        "tool_choice": "auto",
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}},
        "stream": True,
    },
    {
        "model": "dgemma",
        "input": "Hello",
        "tool_choice": {"type": "function", "name": "weather"},
        "tools": [{"type": "function", "name": "weather"}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}},
        "previous_response_id": None,
        "metadata": {"a": "b"},
        "include": ["reasoning.encrypted_content"],
    },
]
AGENT_MESSAGES: list[dict[str, Any]] = [
    {
        "model": "dgemma",
        "max_tokens": 9,
        "system": [
            {"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral", "ttl": "5m"}}
        ],
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "tool_use", "id": "t", "name": "weather", "input": {"place": "Oslo"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t",
                        "content": [{"type": "text", "text": "Rain"}],
                    },
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
        "tools": [{"name": "weather", "input_schema": {"type": "object"}, "strict": False}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "stop_sequences": ["a"],
        "stream": True,
    },
    {
        "model": "dgemma",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "Hello"}],
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "integer"}}},
        "metadata": {"user_id": "u"},
        "thread": False,
    },
]

# Fill, edit, decide and agents: wrong values at the top, and anywhere inside.
WORKS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {**GAP, "max_tokens": 2}),
    (FIM, {**GAP, "max_tokens": 2}),
    (INFILL, {**VSCODE, "n_predict": 2}),
    (INFILL, VIM_READS_AHEAD),
    (EDIT, EDIT_ASKED),
    (DECISIONS, DECIDE),
    (DECISIONS, DECIDE_BY_NAME),
    (SYSTEM_ONE, DECIDE_BY_NAME),
    *((RESPONSES, body) for body in AGENT_RESPONSES),
    (f"{RESPONSES}/input_tokens", {"model": "dgemma", "input": AGENT_RESPONSES[0]["input"]}),
    *((MESSAGES, body) for body in AGENT_MESSAGES),
    (f"{MESSAGES}/count_tokens", {"model": "dgemma", "messages": AGENT_MESSAGES[0]["messages"]}),
]
OF_WORKS = sorted({*FIELDS, *(name for _, body in WORKS for name in body), "response_fields", "n_predict"})
TAGS = ("<|code_to_edit|>", "<|/code_to_edit|>", "<|cursor|>", "<|current_file_content|>", "<turn|>", "a\n")
tagged = st.lists(st.sampled_from(TAGS), max_size=7).map("".join)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all values within a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def with_value(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = dict(body) if isinstance(body, dict) else list(body)
    changed[path[0]] = with_value(body[path[0]], path[1:], value)
    return changed


@bounded
@given(st.sampled_from(WORKS), st.data())
def test_mutated_work_never_gives_a_5xx(work: tuple[str, dict[str, Any]], data: st.DataObject) -> None:
    path, body = work
    if data.draw(st.booleans()):
        body = {**body, **data.draw(st.dictionaries(st.sampled_from(OF_WORKS), anything, max_size=2))}
    where = data.draw(st.sampled_from(places(body)[1:]))
    check(path, json.dumps(with_value(body, where, data.draw(anything | tagged))).encode())


@bounded
@given(tagged)
def test_messages_of_tags_never_give_a_5xx(content: str) -> None:
    message = {"role": "user", "content": content}
    check(EDIT, json.dumps({"model": "dgemma", "messages": [message]}).encode())


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


# Two thousand that are wrong in a known way, and what is left of them


WRONG_VALUES: dict[str, tuple[Any, ...]] = {
    "model": (3, "nobody", "x" * 201, ["dgemma"], {}),
    "messages": ("Hello", [], {}, [3], [[]], [{}], [{"role": "user"}], [{"role": "nobody", "content": "x"}]),
    "stream": (1, "true", {}), "stream_options": (True, {"include": 1}), "n": (0, -1, 1.5, "2", 1 << 70),
    "seed": ("7", 1 << 64, 1.5), "temperature": ("1", -1, 1e9, True), "top_p": (0, 1.1, "x"),
    "top_k": (0, 2.5, [1]), "stop": (3, [3], [""], ["x"] * 17, "y" * 5000),
    "logit_bias": ([], {"x": 1}, {"5": 101}),
    "max_tokens": (0, -1, "9", 1 << 40), "tools": ("x", [3], [{}], [{"type": "function"}]),
    "tool_choice": ("sometimes", 3, {"type": "function"}), "logprobs": (1, "x"), "top_logprobs": (2, -1, 21),
    "preset": ("quick", 3), "decode": ("fast", 1), "t_min": (-1, "x"), "metadata": ([], {"a": 1}, "x"),
    "response_format": ({"type": "json"}, {"type": "json_schema"}, 3), "regex": (3, "("), "choice": ([], "a"),
    "json_schema": (3, "{", {"type": "strin"}), "structured_outputs": (3, {"json": 3}),
    "reasoning_effort": ("lots", 3), "extra_body": (3, []),
    "deadline_s": (-1, "soon", 1e8), "end_tokens": ([-1], [1 << 40], "x"), "zzz": (1,), "temprature": (1,),
}  # fmt: skip


def wrong_body(rng: random.Random) -> bytes:
    """A body that cannot be answered: by its size, encoding, nesting, form, or the type of a field."""
    good = json.dumps(
        {**HELLO, "messages": [{"role": "user", "content": "ä" * rng.randrange(1, 200)}]}
    ).encode()
    match rng.randrange(9):
        case 0:  # sizes, from nothing to beyond what is taken
            return rng.choice([b"", b" " * rng.randrange(1, 3000), b"x" * rng.randrange(200_001, 400_000)])
        case 1:
            encoding = rng.choice(["utf-16", "utf-32", "utf-16-le", "utf-7"])
            return json.dumps({**HELLO, "user": "ä+"}, ensure_ascii=False).encode(encoding) + b"\xff"
        case 2:
            return rng.choice(
                [gzip.compress(good), b"\xef\xbb\xbf" + good, good.replace(b"user", b"\xc3\x28")]
            )
        case 3:  # nesting, closed and not
            opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
            depth = rng.choice([40, 1000, 20_000])
            inner = opening * depth + b"1" + closing * rng.choice([0, depth])
            return b'{"model": "dgemma", "messages": ' + inner + b"}"
        case 4:
            return good[: rng.randrange(1, len(good))]
        case 5:
            return (
                good[:-1]
                + b', "seed": '
                + rng.choice([b"NaN", b"1e999", b"9" * 5000, b"01", b"0x1", b""])
                + b"}"
            )
        case 6:  # twice the same name, a broken character, something behind the end
            return rng.choice(
                [good[:-1] + b', "seed": 7}', good[:-1] + b', "user": "\\ud800"}', good + b"{}"]
            )
        case 7:
            return rng.choice([b"[]", b"null", b"7", b'"text"', b"true", b"[" + good + b"]"])
        case _:
            name = rng.choice(sorted(WRONG_VALUES))
            return json.dumps({**HELLO, name: rng.choice(WRONG_VALUES[name])}).encode()


def test_two_thousand_wrong_bodies_are_refused_and_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Most of what is kept is kept by the first hundreds: caches, and counts by status."""
    monkeypatch.setattr(logging.getLogger("dgemma.server"), "propagate", False)  # pytest keeps log records
    rng = random.Random(1)

    async def refuse(count: int) -> None:
        for _ in range(count):
            body = wrong_body(rng)
            status, told = await sent(CHAT, body)
            assert status in (400, 404, 413), (body[:200], told)
            assert len(told) < 2000
            error = json.loads(told)["error"]
            assert (error["type"], bool(error["message"])) == ("invalid_request_error", True)

    tracemalloc.start()
    try:
        kept = []
        for count in (700, 650, 650):
            RUNNER.run(refuse(count))
            gc.collect()
            kept.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    # A leak grows in every part; a module that is imported late, or a cache of another test's, in one.
    growth = [after - before for before, after in pairwise(kept)]
    assert min(growth) < 32_000, "less than 50 bytes of each"


def _many_blocks(count: int, text: str) -> None:
    blocks = [{"type": "text", "text": text}, {"type": "thinking", "thinking": text, "signature": ""}]
    reader = MessageReader(None)
    reader.add(MessageInput(role="assistant", content=blocks * (count // 2)), "messages.0")


def _many_items(count: int, text: str) -> None:
    reader = ItemReader(None)
    for _ in range(count):
        reader.add(InputMessage(role="assistant", content=text), "input.0")
    reader.add(InputMessage(role="user", content=text), "input.1")
    assert len(reader.messages()) == 2


def _many_turns(count: int, text: str) -> None:
    for role in ("user", "system"):
        (message,) = messages_of([ConversationMessage(role=role, content=text)] * count)
        assert message["role"] == role


@pytest.mark.parametrize("join", [_many_blocks, _many_items, _many_turns])
def test_a_conversation_of_many_parts_is_joined_in_linear_time(join: Callable[[int, str], None]) -> None:
    """To append each part to what is there already would copy all of that as often as there are parts."""
    began = time.process_time()
    join(10_000, "x" * 800)
    assert time.process_time() - began < 5


def test_a_near_name_is_not_looked_for_among_more_tools_than_are_taken() -> None:
    names = ["".join(random.Random(number).sample("abcdefghijklmnopqrst", 20)) for number in range(40_000)]
    began = time.process_time()
    with pytest.raises(ApiError, match="which is not among tools"):
        check_named_tool("abcdefghijklmnopqrst", names)
    assert time.process_time() - began < 3
