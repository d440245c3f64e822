"""Responses that are kept: continued, read, listed and forgotten, within bounds, by their own key alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from dgemma.server.http.api_key import ApiKey
from dgemma.server.responses.kept import InputItemList
from dgemma.server.responses.protocol import ResponseObject
from dgemma.server.responses.store import KeptResponse, ResponseStore
from server.fake_engine import FakeEngine, FakeText, Script
from server.raw_client import RawClient
from server.served import app_of, ask, error_of, named_events_of, on_a_port, post, run
from server.test_responses import HI, RESPONSES, THOUGHTFUL, TOOL

ONE = ApiKey(name="a", digest=b"a")
OTHER = ApiKey(name="a", digest=b"b")  # the name is not what counts


def kept(size: int = 4) -> KeptResponse:
    return KeptResponse(response=b"x" * (size - 2), inputs=b"[]", num_inherited=0)


# The store


def test_a_response_belongs_to_the_key_that_asked_for_it() -> None:
    store = ResponseStore(9, 99)
    store.of(ONE).put("r", kept())
    assert store.of(OTHER).get("r") is None
    assert not store.of(OTHER).delete("r")
    assert store.of(ONE).get("r") == kept()
    assert store.of(ONE).delete("r")
    assert not store.of(ONE).delete("r")
    assert (store.count, store.num_bytes) == (0, 0)


def test_the_oldest_of_the_largest_key_goes_first() -> None:
    store = ResponseStore(99, 20)
    store.of(OTHER).put("modest", kept(4))
    for number in range(5):
        store.of(ONE).put(f"r{number}", kept(5))
    assert [number for number in range(5) if store.of(ONE).get(f"r{number}")] == [2, 3, 4]
    assert store.of(OTHER).get("modest") is not None


def test_what_is_larger_than_all_that_may_be_kept_is_not_kept_and_drops_nothing() -> None:
    store = ResponseStore(9, 20)
    store.of(ONE).put("small", kept(9))
    store.of(ONE).put("large", kept(21))
    assert store.of(ONE).get("large") is None
    assert store.of(ONE).get("small") is not None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(2, 30), st.booleans()), max_size=40))
def test_the_bounds_hold_whatever_is_kept(puts: list[tuple[str, int, bool]]) -> None:
    store = ResponseStore(5, 60)
    for number, (name, size, is_deleted) in enumerate(puts):
        view = store.of(ApiKey(name=name, digest=name.encode()))
        view.put(str(number), kept(size))
        if is_deleted:
            view.delete(str(number))
        assert store.count <= 5
        assert store.num_bytes <= 60
        held = [k for entries in store._kept.values() for k in entries.values()]
        assert store.num_bytes == sum(k.num_bytes for k in held)
        assert store.count == len(held)


# Over HTTP


def test_a_conversation_goes_on_from_a_kept_response() -> None:
    engine = FakeEngine(THOUGHTFUL)
    app = app_of(engine)
    first = post(app, RESPONSES, {**HI, "instructions": "Be short.", "tools": [TOOL]}).json()
    assert first["store"] is True
    result = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "Rain"}
    body = {"model": "dgemma", "previous_response_id": first["id"], "tools": [TOOL]}
    second = post(app, RESPONSES, {**body, "input": [result]})
    assert second.status_code == 200, second.text
    assert second.json()["previous_response_id"] == first["id"]
    third = post(app, RESPONSES, {**body, "previous_response_id": second.json()["id"], "input": "And?"})
    assert third.status_code == 200, third.text
    spoken = FakeText().decode(engine.requests[2].prompt)
    parts = ("user\nHello", "assistant\nSo it rains.", "tool\nRain", "assistant\nSo it rains.", "user\nAnd?")
    at = -1
    for part in parts:
        at = spoken.index(part, at + 1)
    assert "Be short." not in spoken


def test_a_kept_response_is_read_as_it_was_sent_and_can_be_forgotten() -> None:
    app = app_of(FakeEngine(THOUGHTFUL))
    sent = post(app, RESPONSES, {**HI, "tools": [TOOL]})
    path = f"{RESPONSES}/{sent.json()['id']}"
    ResponseObject.model_validate_json(sent.content, strict=True)
    assert ask(app, "GET", path).json() == sent.json()
    assert error_of(ask(app, "GET", path, params={"stream": "true"}))["param"] == "stream"
    forgotten = ask(app, "DELETE", path)
    assert forgotten.json() == {"id": sent.json()["id"], "object": "response", "deleted": True}
    for method in ("GET", "DELETE"):
        response = ask(app, method, path)
        assert (response.status_code, error_of(response)["code"]) == (404, "response_not_found")
    body = {**HI, "previous_response_id": sent.json()["id"]}
    assert error_of(post(app, RESPONSES, body))["code"] == "previous_response_not_found"


def test_a_streamed_response_is_kept_before_its_end_is_told() -> None:
    app = app_of(FakeEngine(THOUGHTFUL))
    last = named_events_of(post(app, RESPONSES, {**HI, "stream": True}))[-1][1]["response"]
    assert ask(app, "GET", f"{RESPONSES}/{last['id']}").json() == last


def test_with_store_false_nothing_is_kept() -> None:
    app = app_of()
    found = post(app, RESPONSES, {**HI, "store": False}).json()
    assert found["store"] is False
    assert app.state.responses.count == 0
    keepless = app_of(max_stored_responses=0)
    assert post(keepless, RESPONSES, HI).json()["store"] is False
    assert error_of(post(keepless, RESPONSES, {**HI, "store": True}))["param"] == "store"


def test_what_failed_or_was_left_is_not_kept() -> None:
    failing = app_of(FakeEngine(Script(text="x" * 40, fails_at=1)))
    post(failing, RESPONSES, HI)
    post(failing, RESPONSES, {**HI, "stream": True})
    assert failing.state.responses.count == 0

    async def left() -> int:
        app = app_of(FakeEngine(Script(text="x" * 40, holds_at=1)))
        client = RawClient(app, RESPONSES, {**HI, "stream": True})
        await client.until_sent(b"response.output_text.delta")
        client.leave()
        await asyncio.wait_for(client.task, 60)
        return app.state.responses.count

    assert run(left()) == 0


def test_another_key_finds_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice sk-a\nbob sk-b\n")
    app = app_of(api_key_file=file)
    alice, bob = ({"authorization": f"Bearer sk-{name}"} for name in "ab")
    id_ = post(app, RESPONSES, HI, headers=alice).json()["id"]
    for path in (f"{RESPONSES}/{id_}", f"{RESPONSES}/{id_}/input_items"):
        assert ask(app, "GET", path, headers=bob).status_code == 404
        assert ask(app, "GET", path).status_code == 401
        assert ask(app, "GET", path, headers=alice).status_code == 200
    assert ask(app, "DELETE", f"{RESPONSES}/{id_}", headers=bob).status_code == 404
    body = {**HI, "previous_response_id": id_}
    assert error_of(post(app, RESPONSES, body, headers=bob))["code"] == "previous_response_not_found"
    assert post(app, RESPONSES, body, headers=alice).status_code == 200


def test_input_items_are_those_of_the_request_in_pages() -> None:
    app = app_of()
    before = post(app, RESPONSES, HI).json()["id"]
    items = [{"role": "user", "content": text} for text in "ABC"]
    id_ = post(app, RESPONSES, {**HI, "input": items, "previous_response_id": before}).json()["id"]
    path = f"{RESPONSES}/{id_}/input_items"

    def listed(**params: Any) -> InputItemList:
        response = ask(app, "GET", path, params=params)
        assert response.status_code == 200, response.text
        return InputItemList.model_validate_json(response.content, strict=True)

    whole = listed(order="asc")
    assert [item["content"] for item in whole.data] == ["A", "B", "C"]
    assert [item["content"] for item in listed().data] == ["C", "B", "A"]
    page = listed(order="asc", limit=2)
    assert (len(page.data), page.has_more) == (2, True)
    rest = listed(order="asc", limit=2, after=page.last_id)
    assert ([item["content"] for item in rest.data], rest.has_more) == (["C"], False)
    assert listed(after=whole.first_id).data == []
    wrong: tuple[tuple[str, str], ...] = (
        ("limit", "0"), ("limit", "101"), ("limit", "x"), ("limit", "9" * 5000), ("limit", "²"),
        ("order", "up"), ("after", "nobody"),
    )  # fmt: skip
    for name, value in wrong:
        refused = ask(app, "GET", path, params={name: value})
        assert (refused.status_code, error_of(refused)["param"]) == (400, name)


def test_input_tokens_are_those_that_a_response_reads() -> None:
    app = app_of(FakeEngine(THOUGHTFUL))
    before = post(app, RESPONSES, HI).json()["id"]
    body = {"model": "dgemma", "input": "And?", "previous_response_id": before, "tools": [TOOL]}
    counted = post(app, f"{RESPONSES}/input_tokens", body).json()
    usage = post(app, RESPONSES, body).json()["usage"]
    assert counted == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}
    assert (
        error_of(post(app, f"{RESPONSES}/input_tokens", {**body, "model": "x"}))["code"] == "model_not_found"
    )


def test_a_wrong_method_is_told_all_that_an_address_takes() -> None:
    refused = ask(app_of(), "PUT", f"{RESPONSES}/x")
    assert (refused.status_code, refused.headers["allow"]) == (405, "DELETE, GET")
    # Its own route, not that of a response with this id.
    assert ask(app_of(), "PUT", f"{RESPONSES}/input_tokens").headers["allow"] == "POST"


def test_paths_of_kept_responses_are_one_label_of_the_metrics() -> None:
    app = app_of()
    for name in ("a", "b"):
        ask(app, "GET", f"{RESPONSES}/{name}")
    page = app.state.metrics.render(app.state.engine.stats(), num_active=0)
    assert 'dgemma_http_requests_total{endpoint="/v1/responses/{response_id}",status="404"} 2.0' in page


# OpenAI's client


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    with (
        on_a_port(app_of(FakeEngine(THOUGHTFUL))) as address,
        OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client


def test_openais_client_continues_reads_lists_and_forgets(client: OpenAI) -> None:
    tools: Any = [TOOL]
    first = client.responses.create(model="dgemma", input="Hello", tools=tools)
    call: Any = first.output[2]
    answer: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}]
    second = client.responses.create(model="dgemma", input=answer, tools=tools, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(second.id).output_text == "So it rains."
    listed: Any = list(client.responses.input_items.list(first.id))
    assert [(item.type, item.role) for item in listed] == [("message", "user")]
    counted = client.responses.input_tokens.count(model="dgemma", input="Hello")
    assert counted.input_tokens > 0
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="dgemma", input="x", previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"
