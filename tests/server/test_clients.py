"""The clients people have, over a real socket: OpenAI's, sync and async, and Mercury's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from inceptionai import AsyncInception, Inception
from openai import AsyncOpenAI, OpenAI

from dgemma.events import ToolCall
from server.fake_engine import FakeEngine, FakeText, Script, answer_text
from server.served import HELLO, WEATHER, app_of, on_a_port

KEY = "a-key"
MESSAGES: Any = HELLO["messages"]
TEXT = answer_text(7, FakeText().render_chat(MESSAGES).tokens)
CHAT: dict[str, Any] = {"model": "dgemma", "messages": MESSAGES}


def script(request: Any) -> Script:
    """What is asked decides what happens: the server is shared by all tests of this file."""
    spoken = bytes(token for token in request.prompt if token < 256).decode()
    if "call" in spoken:
        return Script(text="So.", tool_calls=(ToolCall(name="weather", arguments={"place": "Köln"}),))
    if "think" in spoken:
        return Script(text="Because.", thought="Hm.")
    if "fail" in spoken:
        return Script(text="x" * 40, fails_at=1)
    return Script(text=answer_text(request.seed, request.prompt), cached_tokens=3)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    app = app_of(
        FakeEngine(script, adapters=("sums", "org/other")),
        api_keys=(KEY,),
        keep_alive_s=0.05,
        max_body_bytes=100_000,
    )
    with on_a_port(app) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def mercury(address: str) -> Iterator[Inception]:
    with Inception(base_url=address, api_key=KEY, max_retries=0) as client:
        yield client


def says(text: str) -> Any:
    return [{"role": "user", "content": text}]


# OpenAI's client


def test_openai_reads_a_whole_answer(client: OpenAI) -> None:
    answer = client.chat.completions.create(**CHAT, seed=7, logprobs=True, top_logprobs=2, n=2)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[1].message.content != TEXT
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.content or []) == len(TEXT.encode()) + 1
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer.usage.model_extra is not None
    assert answer.usage.model_extra["denoising_steps"] > 0


@pytest.mark.parametrize("diffusing", [False, True])
def test_openai_joins_a_stream_to_the_same_text(client: OpenAI, diffusing: bool) -> None:
    stream = client.chat.completions.create(
        **CHAT,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"diffusing": diffusing},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert chunks[-1].usage is not None
    assert chunks[-2].choices[0].finish_reason == "stop"
    drafts = [c.choices[0].model_extra for c in chunks if c.choices and "draft" in c.choices[0].to_dict()]
    assert bool(drafts) == diffusing


def test_openais_own_accumulator_ends_at_the_same_message(client: OpenAI) -> None:
    with client.chat.completions.stream(
        **CHAT | {"messages": says("call")}, tools=[WEATHER], extra_body={"diffusing": True}
    ) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.content == "So."
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.arguments == '{"place": "Köln"}'


def test_openai_reads_calls_and_sends_their_results_back(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="dgemma", messages=says("call"), tools=[WEATHER])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    calls = choice.message.tool_calls
    assert calls is not None
    messages = [
        *says("call"),
        choice.message.to_dict(),
        {"role": "tool", "tool_call_id": calls[0].id, "content": "Rain"},
    ]
    assert client.chat.completions.create(model="dgemma", messages=messages, tools=[WEATHER]).choices


def test_openai_reads_calls_of_a_stream(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="dgemma",
        messages=says("call"),
        tools=[WEATHER],
        stream=True,
    )
    calls = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
    assert [(c.index, c.function and c.function.name) for c in calls] == [(0, "weather")]


def test_openai_reads_a_thought_as_an_extra_field(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="dgemma", messages=says("think"), reasoning_effort="high", max_completion_tokens=50
    )
    message = answer.choices[0].message
    assert (message.content, message.model_extra) == ("Because.", {"reasoning_content": "Hm."})


def test_openai_continues_texts(client: OpenAI) -> None:
    whole = client.completions.create(model="sums", prompt=["a", "b"], seed=3, logprobs=1, max_tokens=20)
    assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
    stream = client.completions.create(model="sums", prompt="a", seed=3, max_tokens=20, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_openai_lists_models_and_finds_one_with_a_slash(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["dgemma", "sums", "org/other"]
    assert client.models.retrieve("org/other").owned_by == "dgemma"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_openai_raises_its_own_errors(client: OpenAI, address: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**CHAT, extra_body={"temprature": 1})
    assert (caught.value.param, caught.value.code) == ("temprature", "unknown_parameter")
    assert "did you mean 'temperature'?" in caught.value.message
    assert caught.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**CHAT | {"model": "gpt-4"})
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(**CHAT | {"messages": says("fail")})
    with pytest.raises(openai.APIError) as failed:
        for _ in client.chat.completions.create(**CHAT | {"messages": says("fail")}, stream=True):
            pass
    assert "the engine failed" in failed.value.message
    with pytest.raises(openai.APIStatusError) as too_large:
        client.chat.completions.create(**CHAT | {"messages": says("x" * 300_000)})
    assert (too_large.value.status_code, too_large.value.code) == (413, "body_too_large")
    stranger = OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_openais_async_client_reads_the_same(address: str) -> None:
    async def ask() -> list[str]:
        async with AsyncOpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:

            async def whole() -> str:
                answer = await client.chat.completions.create(**CHAT, seed=7)
                return answer.choices[0].message.content or ""

            async def streamed() -> str:
                stream = await client.chat.completions.create(**CHAT, seed=7, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return list(await asyncio.gather(whole(), streamed(), whole(), streamed()))

    assert asyncio.run(ask()) == [TEXT] * 4


# Mercury's client


def test_mercury_reads_a_whole_answer_and_calls(mercury: Inception) -> None:
    answer = mercury.chat.completions.create(
        **CHAT, max_tokens=9, reasoning_effort="instant", extra_params={"seed": 7}
    )
    assert answer.choices[0].message.content == TEXT.encode()[:9].decode()
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 9
    called = mercury.chat.completions.create(model="dgemma", messages=says("call"), tools=[WEATHER])
    assert called.choices[0].finish_reason == "tool_calls"
    calls = called.choices[0].message.tool_calls or []
    assert calls[0].function.name == "weather"


@pytest.mark.parametrize("diffusing", [False, True])
def test_mercury_joins_a_stream_to_the_same_text(mercury: Inception, diffusing: bool) -> None:
    stream = mercury.chat.completions.create(
        **CHAT,
        stream=True,
        diffusing=diffusing,
        extra_body={"seed": 7},
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert all(c.object == "chat.completion.chunk" for c in chunks)
    drafts = [c for c in chunks if c.choices and "draft" in (c.choices[0].model_extra or {})]
    assert bool(drafts) == diffusing


def test_mercurys_own_accumulator_ends_at_the_same_message(mercury: Inception) -> None:
    with mercury.chat.completions.stream(
        **CHAT | {"messages": says("call")}, tools=[WEATHER], diffusing=True
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "So."
    assert (final.choices[0].message.tool_calls or [])[0].function.arguments == '{"place": "Köln"}'


def test_mercury_lists_models_with_all_it_wants_to_know(mercury: Inception) -> None:
    model = mercury.models.list().data[0]
    type(model).model_validate(model.to_dict())
    assert (model.id, model.context_length) == ("dgemma", 4096)


def test_mercurys_async_client_reads_the_same(address: str) -> None:
    async def ask() -> str:
        async with AsyncInception(base_url=address, api_key=KEY, max_retries=0) as client:
            stream = await client.chat.completions.create(**CHAT, stream=True, extra_body={"seed": 7})
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask()) == TEXT
