"""A client's trace over HTTP: lines of a trace file, of its own request alone, if the server allows it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI

import dgemma
from dgemma import LanguageModel
from dgemma.engine.request import EngineRequest
from dgemma.engine.service import ServedModel
from dgemma.events import CanvasStep
from dgemma.params import GenerationParams
from dgemma.server.canvas_trace import CanvasTrace, TracedModel
from dgemma.trace.trace import Trace
from dgemma.trace.trace_reader import trace_of_bytes
from server.fake_engine import FakeText
from server.real_server import RealServer, serving, write_model
from server.served import HELLO, app_of, error_of, post

CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Why is the sea salty?"}],
    "seed": 7,
    "max_tokens": 40,
    "trace": True,
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def lm(model_path: Path) -> LanguageModel:
    return dgemma.load(model_path, exact=True)


@pytest.fixture(scope="module")
def server(model_path: Path) -> Iterator[RealServer]:
    with serving(str(model_path), "--exact", "--traces") as server:
        yield server


def trace_of(lines: list[dict[str, Any]]) -> Trace:
    return trace_of_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))


def asked(server: RealServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = (
        httpx2.post(server.address + path, json=body, timeout=60).raise_for_status().json()
    )
    return found


def test_a_whole_answer_brings_its_trace_and_it_replays(server: RealServer, lm: LanguageModel) -> None:
    answer = asked(server, "/v1/chat/completions", CHAT)
    trace = trace_of(answer["trace"])
    (request,) = trace.requests
    assert request.answer is not None
    assert request.answer.text == answer["choices"][0]["message"]["content"]
    assert trace.about["command"] == "/v1/chat/completions"
    found = trace.compare(lm.replay(trace))
    assert found.is_same, found.parting
    assert found.steps == sum(answer["choices"][0]["dgemma"]["steps"])


def test_a_stream_sends_each_line_when_it_happens(server: RealServer) -> None:
    with OpenAI(base_url=f"{server.address}/v1", api_key="-", max_retries=0) as client:
        body = {name: value for name, value in CHAT.items() if name != "trace"}
        chunks = list(client.chat.completions.create(**body, stream=True, extra_body={"trace": True}))
    lines = [(chunk.model_extra or {})["trace"] for chunk in chunks if chunk.object == "dgemma.trace"]  # type: ignore[comparison-overlap]
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    trace = trace_of(lines)
    assert trace.requests[0].answer is not None
    assert trace.requests[0].answer.text == "".join(texts)
    kinds = [next(iter(line)) for line in lines]
    assert kinds[0] == "format"
    assert kinds.index("step") < kinds.index("commit")
    assert kinds[-1] == "end"


def test_a_trace_is_returned_beside_the_entries_that_were_chosen(server: RealServer) -> None:
    gap = {"input_prefix": "The sea is", "input_suffix": " salt.", "n_predict": 2}
    answer = asked(server, "/infill", {**gap, "response_fields": ["content"], "trace": True})
    assert answer.keys() == {"content", "trace"}
    assert trace_of(answer["trace"]).about["command"] == "/infill"


def test_a_trace_may_be_asked_for_among_the_fields_of_extra_body(server: RealServer) -> None:
    body = {name: value for name, value in CHAT.items() if name != "trace"}
    answer = asked(server, "/v1/chat/completions", {**body, "extra_body": {"trace": True}})
    assert trace_of(answer["trace"]).requests


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": ["The sea", "Once"], "max_tokens": 20}),
        (
            "/v1/fim/completions",
            {"model": "tiny", "prompt": "The sea is", "suffix": " salt.", "max_tokens": 4},
        ),
    ],
)
def test_every_request_of_a_task_is_in_the_trace(
    server: RealServer, lm: LanguageModel, path: str, body: dict[str, Any]
) -> None:
    answer = asked(server, path, {**body, "seed": 3, "trace": True})
    trace = trace_of(answer["trace"])
    assert len(trace.requests) > 1
    found = trace.compare(lm.replay(trace))
    assert found.is_same, found.parting


def test_a_server_without_the_option_refuses_by_name(server: RealServer) -> None:
    refused = error_of(post(app_of(), "/v1/chat/completions", {**HELLO, "trace": True}))
    assert refused["param"] == "trace"
    assert "--traces" in refused["message"]
    plain = asked(server, "/v1/chat/completions", {**CHAT, "trace": False})
    assert "trace" not in plain


def test_beyond_the_limit_steps_are_left_out_and_the_end_says_so() -> None:
    request = EngineRequest(prompt=(2,), seed=1, params=GenerationParams(), row=0)
    served = ServedModel(max_positions=64, canvas_len=4, vocab_size=100)
    trace = CanvasTrace(TracedModel("tiny", served, FakeText()), "/v1/completions", max_bytes=900)
    lines = [*trace.head(), *trace.begin([request])]
    for number in range(1, 30):
        step = CanvasStep(
            row=0,
            canvas=0,
            step=number,
            at_s=0.1 * number,
            tokens=(1, 2, 3, 4),
            accepted=(0,),
            pinned=(),
            argmax=(1, 2, 3, number),
            entropy=(0.1, 0.2, 0.3, 0.4),
        )
        lines += trace.add(0, step)
    found = trace_of([*lines, trace.end()])
    assert found.about["is_cut"] is True
    assert 1 <= found.num_steps < 29
    assert len(json.dumps(lines)) < 1500
