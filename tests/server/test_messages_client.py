"""Anthropic's own client, over a real socket: create, stream, parse, tools, its tool runner, count_tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic import Anthropic, AsyncAnthropic, beta_tool
from pydantic import BaseModel

from dgemma.events import ToolCall
from server.fake_engine import FakeEngine, FakeText, Script, answer_text
from server.served import app_of, on_a_port

KEY = "a-key"
TEXT = answer_text(7, FakeText().render_chat([{"role": "user", "content": "Hello"}]).tokens)
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a place.",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}},
}


class City(BaseModel):
    name: str
    people: int


def says(text: str) -> Any:
    return {"model": "dgemma", "max_tokens": 99, "messages": [{"role": "user", "content": text}]}


HI: Any = {**says("Hello"), "extra_body": {"seed": 7}}


def script(request: Any) -> Script:
    spoken = bytes(token for token in request.prompt if token < 256).decode()
    if "Rain" in spoken:
        return Script(text="Take a coat.")
    if "call" in spoken:
        return Script(
            text="So.", thought="Hm.", tool_calls=(ToolCall(name="weather", arguments={"place": "Köln"}),)
        )
    if "city" in spoken:
        return Script(text='{"name": "Oslo", "people": 700000}')
    if "fail" in spoken:
        return Script(text="x" * 40, fails_at=1)
    return Script(text=answer_text(request.seed, request.prompt), cached_tokens=3)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with on_a_port(app_of(FakeEngine(script), api_keys=(KEY,), keep_alive_s=0.05)) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=address, api_key=KEY, max_retries=0) as client:
        yield client


def test_a_whole_message_is_read(client: Anthropic) -> None:
    message = client.messages.create(**HI)
    assert [block.to_dict() for block in message.content] == [
        {"type": "text", "text": TEXT, "citations": None}
    ]
    assert (message.stop_reason, message.role) == ("end_turn", "assistant")
    assert message.usage.cache_read_input_tokens == 3
    # The client reads loosely; its own types, read strictly, take every field.
    type(message).model_validate(message.to_dict())


@pytest.mark.parametrize("diffusing", [False, True])
def test_the_clients_own_accumulator_ends_at_the_same_message(client: Anthropic, diffusing: bool) -> None:
    options: Any = {**says("call"), "tools": [WEATHER], "thinking": {"type": "adaptive"}}
    with client.messages.stream(**options, extra_body={"seed": 7, "diffusing": diffusing}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    whole = client.messages.create(**options, extra_body={"seed": 7})
    told = [{key: value for key, value in block.to_dict().items() if key != "id"} for block in whole.content]
    assert [
        {k: v for k, v in block.to_dict().items() if k in told[n]} for n, block in enumerate(final.content)
    ] == told
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert final.usage.input_tokens == whole.usage.input_tokens
    assert ("dgemma.draft" in kinds) == diffusing


def test_the_text_of_a_stream_is_joined(client: Anthropic) -> None:
    with client.messages.stream(**HI) as stream:
        assert "".join(stream.text_stream) == TEXT
        assert stream.get_final_text() == TEXT
    raw: list[Any] = list(client.messages.create(**HI, stream=True))
    assert "".join(event.delta.text for event in raw if event.type == "content_block_delta") == TEXT


def test_a_message_is_parsed_into_a_model(client: Anthropic) -> None:
    message = client.messages.parse(**says("city"), output_format=City)
    assert message.parsed_output == City(name="Oslo", people=700000)


def test_calls_are_read_and_their_results_sent_back(client: Anthropic) -> None:
    messages = says("call")["messages"]
    message = client.messages.create(**{**says("call"), "tools": [WEATHER]})
    assert message.stop_reason == "tool_use"
    (use,) = [block for block in message.content if block.type == "tool_use"]
    assert (use.name, use.input) == ("weather", {"place": "Köln"})
    messages += [
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "Rain"}]},
    ]
    last = client.messages.create(model="dgemma", max_tokens=99, messages=messages, tools=[WEATHER])
    assert last.content[0].to_dict()["text"] == "Take a coat."


@pytest.mark.parametrize("streams", [False, True])
def test_the_clients_tool_runner_runs_the_loop(client: Anthropic, streams: bool) -> None:
    asked: list[str] = []

    @beta_tool
    def weather(place: str) -> str:
        """The weather of a place.

        Args:
            place: A town.
        """
        asked.append(place)
        return "Rain"

    runner: Any = client.beta.messages.tool_runner(**says("call"), tools=[weather], stream=streams)
    assert runner.until_done().content[0].text == "Take a coat."
    assert asked == ["Köln"]


def test_tokens_are_counted(client: Anthropic) -> None:
    count = client.messages.count_tokens(model="dgemma", messages=HI["messages"])
    usage = client.messages.create(**HI).usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_its_errors_are_raised(client: Anthropic, address: str) -> None:
    with pytest.raises(
        anthropic.BadRequestError, match="unknown field 'temprature'; did you mean 'temperature'"
    ):
        client.messages.create(**{**HI, "extra_body": {"temprature": 1}})
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**HI | {"model": "claude"})
    with pytest.raises(anthropic.InternalServerError):
        client.messages.create(**says("fail"))
    with (
        pytest.raises(anthropic.APIStatusError, match="the engine failed"),
        client.messages.stream(**says("fail")) as stream,
    ):
        stream.until_done()
    stranger = Anthropic(base_url=address, api_key="wrong", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(**HI)


def test_the_key_may_come_as_x_api_key_or_as_a_token(address: str) -> None:
    with Anthropic(base_url=address, auth_token=KEY, max_retries=0) as client:
        assert client.messages.create(**HI).content
    body = says("Hello")
    for headers, status in (
        ({"x-api-key": KEY}, 200),
        ({"x-api-key": KEY, "authorization": f"Bearer {KEY}"}, 200),
        ({"x-api-key": KEY, "authorization": "Bearer other"}, 401),
        ({"x-api-key": "other", "authorization": f"Bearer {KEY}"}, 401),
        ({"x-api-key": ""}, 401),
    ):
        response = httpx2.post(f"{address}/v1/messages", json=body, headers=headers, timeout=60)
        assert response.status_code == status, headers


def test_the_async_client_reads_the_same(address: str) -> None:
    async def ask() -> list[str]:
        async with AsyncAnthropic(base_url=address, api_key=KEY, max_retries=0) as client:
            whole: Any = await client.messages.create(**HI)
            async with client.messages.stream(**HI) as stream:
                return [whole.content[0].text, await stream.get_final_text()]

    assert asyncio.run(ask()) == [TEXT, TEXT]
