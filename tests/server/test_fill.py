"""A completion with a suffix fills the gap before it; so does Mercury's endpoint for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from inceptionai import Inception
from openai import AsyncOpenAI, OpenAI

from dgemma.engine.request import EngineRequest
from dgemma.engine.service import BusyError, EngineStats
from dgemma.errors import InputError
from dgemma.server import engine_rounds, gap
from server.canvas_bodies import FIM, GAP, PROMPT, SUFFIX
from server.canvas_served import KEY, served_tiny, tiny
from server.fake_engine import FakeEngine, Script
from server.raw_client import RawClient
from server.served import COMPLETIONS, HELLO, app_of, client_of, error_of, events_of, post, run, run_unhurried


def whole_of(engine: FakeEngine, path: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    response = post(app_of(engine), path, {**GAP, **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


def text_of(reply: dict[str, Any], index: int = 0) -> str:
    return str(reply["choices"][index]["text"])


# With a real engine, by the clients people have


@pytest.fixture(scope="module", params=[1, 2], ids=["one engine", "two engines"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    with served_tiny(replicas=request.param) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def test_openais_client_gets_the_gap_that_the_python_api_finds(client: OpenAI) -> None:
    expected = tiny().fill(PROMPT, SUFFIX, max_tokens=4, seed=7)
    first = client.completions.create(**GAP | {"max_tokens": 4})
    assert first.choices[0].text == expected.text
    assert first.choices[0].finish_reason in ("stop", "length")
    assert first.usage is not None
    tokenizer = tiny().tokenizer
    assert first.usage.prompt_tokens == 1 + len(tokenizer.encode(PROMPT)) + len(tokenizer.encode(SUFFIX))
    assert first.usage.completion_tokens == min(4, len(tokenizer.encode(expected.text)))
    details = (first.choices[0].model_extra or {})["dgemma"]
    assert details["seed"] == 7
    assert details["log_likelihood"] == pytest.approx(expected.log_likelihood)
    assert details["denoising_steps"] == expected.forwards


def test_mercurys_client_gets_the_same_whole_and_streamed(address: str) -> None:
    expected = tiny().fill(PROMPT, SUFFIX, max_tokens=2, seed=7).text
    asked: Any = {"model": "dgemma", "prompt": PROMPT, "suffix": SUFFIX, "max_tokens": 2, "top_k": -1}
    with Inception(base_url=address, api_key=KEY, max_retries=0) as mercury:
        whole = mercury.fim.completions.create(**asked, stop=[], extra_body={"seed": 7})
        assert (whole.object, whole.choices[0].text) == ("text_completion", expected)
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
        options = {"include_usage": True}
        stream = mercury.fim.completions.create(
            **asked, stream=True, stream_options=options, extra_body={"seed": 7}
        )
        chunks = list(stream)
    assert all(chunk.object == "text_completion" for chunk in chunks)
    assert "".join(chunk.choices[0].text or "" for chunk in chunks if chunk.choices) == expected
    assert chunks[-2].choices[0].finish_reason is not None
    assert not chunks[-1].choices


def test_two_at_once_and_a_chat_beside_them_do_not_disturb_each_other(address: str) -> None:
    gaps = [("The sea is", " salt.", 2), ("x = [", "]\n", 1)]

    async def ask() -> list[str]:
        async with AsyncOpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:

            async def filled(prompt: str, suffix: str, most: int) -> str:
                answer = await client.completions.create(
                    model="dgemma", prompt=prompt, suffix=suffix, max_tokens=most, seed=3
                )
                return answer.choices[0].text

            async def chatted() -> str:
                messages: Any = HELLO["messages"]
                answer = await client.chat.completions.create(
                    model="dgemma", messages=messages, seed=3, max_tokens=9
                )
                return answer.choices[0].message.content or ""

            return list(await asyncio.gather(*(filled(*gap) for gap in gaps), chatted()))

    alone = [tiny().fill(prompt, suffix, max_tokens=most, seed=3).text for prompt, suffix, most in gaps]
    assert asyncio.run(ask()) == [*alone, tiny().chat(HELLO["messages"], seed=3, max_tokens=9).text]


# What is asked for, without a model


def test_an_empty_suffix_is_an_ordinary_completion() -> None:
    engine = FakeEngine()
    assert text_of(whole_of(engine, suffix="")) == text_of(whole_of(FakeEngine(), suffix=None))
    assert [request.pinned for request in engine.requests] == [None]
    assert text_of(whole_of(FakeEngine(), FIM, suffix=None)) == text_of(whole_of(FakeEngine(), suffix=""))


def test_the_same_seed_gives_the_same_text_and_n_answers_have_seeds_in_a_row() -> None:
    engine = FakeEngine()
    both = whole_of(engine, n=2)
    assert [choice["dgemma"]["seed"] for choice in both["choices"]] == [7, 8]
    assert text_of(both) == text_of(whole_of(FakeEngine()))
    assert text_of(both, 1) == text_of(whole_of(FakeEngine(), seed=8))
    assert text_of(both) != text_of(both, 1)
    assert both["usage"]["prompt_tokens"] == whole_of(FakeEngine())["usage"]["prompt_tokens"]
    assert {request.seed for request in engine.requests if request.pinned is not None} == {7, 8}


def test_the_chunks_of_a_stream_join_to_the_whole_answer() -> None:
    whole = whole_of(FakeEngine(), n=2)
    asked = {**GAP, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events_of(post(app_of(FakeEngine()), COMPLETIONS, asked))
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["dgemma"] == choice["dgemma"]
    assert chunks[-1]["usage"] == whole["usage"]


def test_the_text_ends_before_a_stop_string() -> None:
    text = text_of(whole_of(FakeEngine()))
    stop = text[1:]
    assert stop
    stopped = whole_of(FakeEngine(), stop=["never in it", stop])["choices"][0]
    assert stopped["text"] == text[: text.index(stop)]
    assert (stopped["finish_reason"], stopped["dgemma"]["stop_string"]) == ("stop", stop)


def test_options_and_the_adapter_reach_the_engine() -> None:
    engine = FakeEngine(adapters=("sums",))
    whole_of(engine, model="sums", temperature=0.5, top_k=9, top_p=0.9, preset="fast", t_max=0.9)
    assert {request.adapter for request in engine.requests} == {"sums"}
    params = engine.requests[0].params
    assert (params.temperature, params.top_k, params.top_p, params.t_max) == (0.5, 9, 0.9, 0.9)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": ["a", "b"]}, "prompt", "with suffix it must be one text"),
        ({"prompt": [5, 6]}, "prompt", "with suffix it must be one text"),
        ({"logprobs": 1}, "logprobs", "not supported with suffix"),
        ({"echo": True}, "echo", "not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported with suffix"),
        ({"diffusing": True, "stream": True}, "diffusing", "not supported with suffix"),
        ({"decode": "causal"}, "decode", "only a canvas can see what follows"),
        ({"end_tokens": [3]}, "end_tokens", "not supported with suffix"),
        ({"suffix": 3}, "suffix", "suffix is 3; it should be a valid string."),
        ({"n": 17}, "n", "at most 16"),
        ({"seed": (1 << 64) - 1, "n": 2}, "seed", "would pass"),
        ({"max_tokens": 4097}, "max_tokens", "max_tokens is 4097; it must be a whole number from 1 to 4096."),
        ({"stop": 3}, "stop", "stop is 3"),
        ({"t_min": 9}, "t_min", "t_min is 9"),
        ({"deadline_s": 601}, "deadline_s", "ends answers after 600 seconds"),
        ({"stream_options": {}}, "stream_options", "is for streams"),
    ],
)
def test_what_a_gap_cannot_have_is_refused_by_name(fields: dict[str, Any], param: str, message: str) -> None:
    response = post(app_of(), COMPLETIONS, {**GAP, **fields})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("fields", "settings", "param"),
    [
        ({"prompt": "word " * 5000}, {}, "prompt"),
        ({"prompt": "word " * 50}, {"max_prompt_tokens": 20}, "prompt"),
        ({"max_tokens": 4096}, {}, "max_tokens"),
    ],
)
def test_what_is_too_long_says_so(fields: dict[str, Any], settings: dict[str, Any], param: str) -> None:
    error = error_of(post(app_of(**settings), COMPLETIONS, {**GAP, **fields}))
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")


def test_a_context_without_room_for_the_usual_gap_has_room_for_a_shorter_one() -> None:
    engine = FakeEngine(max_positions=80)
    fields = {name: value for name, value in GAP.items() if name != "max_tokens"}
    response = post(app_of(engine), COMPLETIONS, fields)
    assert response.status_code == 200, response.text
    assert max(len(request.prompt) for request in engine.requests) <= 80


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a"]}, "prompt"),
        ({"top_k": -2}, "top_k"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"suffx": "x"}, "suffx"),
    ],
)
def test_mercurys_endpoint_refuses_by_name(fields: dict[str, Any], param: str) -> None:
    assert error_of(post(app_of(), FIM, {**GAP, **fields}))["param"] == param


# How the engine is asked


def test_a_gap_keeps_few_requests_with_the_engine_at_once() -> None:
    engine = FakeEngine(Script(turns=3))
    whole_of(engine, max_tokens=40)
    assert len(engine.requests) > 25
    assert engine.most_running == 8

    class Narrow(FakeEngine):
        def stats(self) -> EngineStats:
            return replace(super().stats(), slots_total=2)

    narrow = Narrow(Script(turns=3))
    assert text_of(whole_of(narrow, max_tokens=40)) == text_of(whole_of(FakeEngine(), max_tokens=40))
    assert narrow.most_running == 2
    few = FakeEngine(Script(turns=3))
    assert post(app_of(few, max_choices=3), COMPLETIONS, GAP).status_code == 200
    assert few.most_running == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_busy_engine_refuses_the_first_request_of_a_gap(stream: bool) -> None:
    engine = FakeEngine()
    engine.busy_for_s = 7
    response = post(app_of(engine), COMPLETIONS, {**GAP, "stream": stream})
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")
    assert len(engine.requests) == 1, "nor is it asked again"


class Crowded(FakeEngine):
    """Takes one request at a time, and refuses every third one even so."""

    refusals = 0

    async def _events(self, request: EngineRequest) -> Any:
        if self.running or len(self.requests) % 3 == 2:
            self.refusals += 1
            self.requests.append(request)
            raise BusyError("full", retry_after_s=9)
        async for event in super()._events(request):
            yield event


def test_a_full_queue_in_the_middle_of_the_work_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_rounds, "_FIRST_RETRY_S", 0.001)
    engine = Crowded(Script(turns=2))
    assert text_of(whole_of(engine)) == text_of(whole_of(FakeEngine()))
    assert engine.refusals > 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_queue_that_stays_full_is_an_error_in_the_end(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(engine_rounds, "_FIRST_RETRY_S", 0.0001)
    engine = FakeEngine()
    engine.busy_after = 3
    response = post(app_of(engine), COMPLETIONS, {**GAP, "stream": stream})
    if stream:
        assert response.status_code == 200
        assert b"rate_limit_exceeded" in response.content.split(b"\n\n")[-2]
        assert b"[DONE]" not in response.content
    else:
        assert response.status_code == 429
    # While its own run it asks again when one of them ends; when none does, so often and no more.
    assert 0 <= len(engine.requests) - (3 + engine_rounds._MAX_RETRIES + 1) <= 3
    assert len(engine.finished) == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("holds", [Script(holds_at=0), Script(accepts=False)])
def test_leaving_ends_all_requests_of_a_gap(stream: bool, holds: Script) -> None:
    async def leave() -> FakeEngine:
        engine = FakeEngine(holds)
        client = RawClient(app_of(engine), COMPLETIONS, {**GAP, "stream": stream})
        expected = 6 if holds.accepts else 1
        while engine.running < expected:
            await asyncio.sleep(0)
        client.leave()
        await asyncio.wait_for(client.task, 60)
        assert engine.running == 0, "before the event loop ends, which closes all"
        return engine

    engine = run(leave())
    assert len(engine.cancelled) == len(engine.requests)
    assert engine.finished == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_one_request_ends_its_gap_and_no_other(stream: bool) -> None:
    def script(request: EngineRequest) -> Script:
        return Script(fails_at=0 if request.seed == 130 and request.score_from is None else None, turns=2)

    async def ask() -> None:
        engine = FakeEngine(script)
        app = app_of(engine)
        async with client_of(app) as client:
            good, bad, other = await asyncio.gather(
                *(
                    client.post(COMPLETIONS, json={**GAP, "seed": seed, "stream": stream})
                    for seed in (12, 130, 250)
                )
            )
            assert (good.status_code, other.status_code) == (200, 200)
            if bad.status_code == 200:  # it was accepted before it failed
                assert b"engine_failure" in bad.content
            else:
                assert (bad.status_code, error_of(bad)["code"]) == (500, "engine_failure")
            assert engine.running == 0

    run(ask())


def test_a_deadline_gives_an_empty_text_that_says_so() -> None:
    engine = FakeEngine(Script(holds_at=0))
    reply = post(app_of(engine), COMPLETIONS, {**GAP, "deadline_s": 0.05}, by=run_unhurried)
    choice = reply.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert choice["dgemma"]["finish_reason"] == "deadline"
    assert choice["dgemma"]["log_likelihood"] is None
    assert all((request.params.deadline_s or 1) <= 0.05 for request in engine.requests)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_says_nothing_is_given_up(stream: bool) -> None:
    app = app_of(FakeEngine(Script(accepts=False)), request_timeout_s=2, timeout_grace_s=0.02)
    response = post(app, COMPLETIONS, {**GAP, "stream": stream}, by=run_unhurried)
    assert (response.status_code, error_of(response)["code"]) == (504, "timeout")


def test_a_gap_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    app = app_of(log_text=True)
    with caplog.at_level("INFO", "dgemma.server"):
        reply = post(app, FIM, GAP).json()
    facts = caplog.records[-1].__dict__["facts"]
    usage = reply["usage"]
    assert (facts["path"], facts["status"], facts["choices"]) == (FIM, 200, 1)
    assert facts["prompt_tokens"] == usage["prompt_tokens"]
    assert facts["completion_tokens"] == usage["completion_tokens"]
    assert facts["prompt"] == [PROMPT, SUFFIX]
    assert facts["answers"] == [text_of(reply)]
    page = app.state.metrics.render(app.state.engine.stats(), num_active=0)
    assert f'dgemma_http_requests_total{{endpoint="{FIM}",status="200"}} 1' in page
    assert f"dgemma_prompt_tokens_total {usage['prompt_tokens']}" in page
    assert "dgemma_answers_total" in page


def test_draining_lets_a_gap_inside_finish() -> None:
    async def drained() -> None:
        engine = FakeEngine(Script(turns=5))
        app = app_of(engine)
        inside = RawClient(app, COMPLETIONS, GAP)
        while not engine.running:
            await asyncio.sleep(0)
        assert await app.state.drain()
        await inside.task
        assert json.loads(inside.body)["choices"][0]["text"]

    run(drained())


def test_a_gap_that_no_word_may_cross_is_filled_between_plain_borders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = gap.fill

    def without_words(bench: Any, before: str, behind: str, options: Any) -> Any:
        if options.heal:
            raise InputError("no text of these lengths fits between the two ends; give other lengths.")
        return plain(bench, before, behind, options)

    monkeypatch.setattr(gap, "fill", without_words)
    engine = FakeEngine()
    assert text_of(whole_of(engine))
    assert all(not request.pinned.among for request in engine.requests if request.pinned is not None)
