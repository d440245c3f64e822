"""OpenAI's own client of responses, over a real socket: create, stream, parse, tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from dgemma.events import ToolCall
from server.fake_engine import FakeEngine, FakeText, Script, answer_text
from server.served import app_of, on_a_port

KEY = "a-key"
TEXT = answer_text(7, FakeText().render_chat([{"role": "user", "content": "Hello"}]).tokens)
HI: Any = {"model": "dgemma", "input": "Hello", "extra_body": {"seed": 7}}
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a place.",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string"}},
        "required": ["place"],
        "additionalProperties": False,
    },
    "strict": True,
}


class City(BaseModel):
    name: str
    people: int


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
def client(address: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def test_a_whole_response_is_read(client: OpenAI) -> None:
    response = client.responses.create(**HI)
    assert (response.output_text, response.status) == (TEXT, "completed")
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 3
    # The client reads loosely; its own types, read strictly, take every field.
    type(response).model_validate(response.to_dict())


@pytest.mark.parametrize("diffusing", [False, True])
def test_a_stream_ends_at_the_same_text(client: OpenAI, diffusing: bool) -> None:
    stream = client.responses.create(
        **HI | {"extra_body": {"seed": 7, "diffusing": diffusing}},
        stream=True,
        stream_options={"include_obfuscation": False},
    )
    events: list[Any] = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    assert events[-1].response.output_text == TEXT
    assert bool([event for event in events if event.type == "dgemma.draft"]) == diffusing


@pytest.mark.parametrize("diffusing", [False, True])
def test_the_clients_own_accumulator_ends_at_the_same_items(client: OpenAI, diffusing: bool) -> None:
    with client.responses.stream(
        model="dgemma", input="call", tools=[WEATHER], extra_body={"diffusing": diffusing}
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    call: Any = final.output[2]
    assert call.parsed_arguments == {"place": "Köln"}
    snapshots = [event.snapshot for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads(snapshots[-1]) == {"place": "Köln"}


def test_a_response_is_parsed_into_a_model(client: OpenAI) -> None:
    parsed = client.responses.parse(model="dgemma", input="city", text_format=City)
    assert parsed.output_parsed == City(name="Oslo", people=700000)
    with client.responses.stream(model="dgemma", input="city", text_format=City) as stream:
        assert stream.until_done().get_final_response().output_parsed == City(name="Oslo", people=700000)


def test_an_agents_loop_sends_items_back_as_they_came(client: OpenAI) -> None:
    """Items of the client's own types, as OpenAI's guide appends them."""
    items: list[Any] = [{"role": "user", "content": "call"}]
    first = client.responses.parse(model="dgemma", input=items, tools=[WEATHER])
    items += first.output
    for item in first.output:
        if item.type == "function_call":
            items.append({"type": "function_call_output", "call_id": item.call_id, "output": "Rain"})
    assert client.responses.create(model="dgemma", input=items, tools=[WEATHER]).output_text == "Take a coat."


def test_its_errors_are_raised(client: OpenAI, address: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="dgemma", input="Hi", background=True)
    assert (caught.value.param, caught.value.code) == ("background", "unsupported_parameter")
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="dgemma", input="fail")
    events = list(client.responses.create(model="dgemma", input="fail", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    stranger = OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.responses.create(**HI)


def test_the_async_client_reads_the_same(address: str) -> None:
    async def ask() -> list[str]:
        async with AsyncOpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
            whole = await client.responses.create(**HI)
            async with client.responses.stream(**HI) as stream:
                final = await stream.get_final_response()
            return [whole.output_text, final.output_text]

    assert asyncio.run(ask()) == [TEXT, TEXT]
