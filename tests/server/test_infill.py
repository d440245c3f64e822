"""/infill speaks to the plugins of editors: the requests of llama.vim and llama.vscode, field by field."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from server.canvas_bodies import (
    INFILL,
    PREFIX,
    TIMINGS,
    TOLD,
    VIM,
    VIM_READS_AHEAD,
    VSCODE,
    VSCODE_READS_AHEAD,
)
from server.canvas_served import KEY, served_tiny, tiny
from server.fake_engine import FakeEngine, Script
from server.served import app_of, error_of, post, run_unhurried
from text.bundled import TOKENIZER


def whole_of(engine: FakeEngine, body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    response = post(app_of(engine), INFILL, {**body, **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_llama_vim_gets_the_entries_it_asked_for_under_their_paths() -> None:
    engine = FakeEngine(Script(cached_tokens=2))
    told = whole_of(engine, VIM, seed=7)
    assert list(told) == TOLD
    assert told["content"]
    assert (told["truncated"], told["tokens_cached"]) == (False, 2)
    assert told["timings/prompt_n"] > 0
    assert told["timings/predicted_n"] > 0
    assert told["timings/predicted_ms"] > 0
    params = engine.requests[0].params
    assert (params.top_k, params.top_p) == (40, 0.9)


def test_llama_vscode_gets_everything() -> None:
    told = whole_of(FakeEngine(Script(cached_tokens=2)), VSCODE, seed=7)
    assert (told["stop"], told["model"], told["truncated"]) == (True, "dgemma", False)
    assert told["tokens_predicted"] == told["timings"]["predicted_n"] > 0
    assert told["tokens_evaluated"] == told["timings"]["prompt_n"] + 2
    assert tuple(told["timings"]) == TIMINGS
    settings = told["generation_settings"]
    assert (settings["n_predict"], settings["seed"], settings["top_k"]) == (128, 7, 40)
    assert told["stop_type"] in ("eos", "limit")


@pytest.mark.parametrize("body", [VIM_READS_AHEAD, VSCODE_READS_AHEAD])
def test_reading_ahead_writes_nothing_and_reads_what_will_be_needed(body: dict[str, Any]) -> None:
    engine = FakeEngine()
    told = whole_of(engine, body)
    assert told == {} or (told["content"], told["tokens_predicted"]) == ("", 0)
    (request,) = engine.requests
    assert request.score_from == len(request.prompt) - 1
    later = FakeEngine()
    whole_of(later, VIM, n_predict=2)
    shared = request.prompt[:-3]  # where texts meet, words of the vocabulary may stand across
    assert later.requests[0].prompt[: len(shared)] == shared


def test_reading_nothing_ahead_asks_the_engine_nothing() -> None:
    engine = FakeEngine()
    assert whole_of(engine, VIM_READS_AHEAD, input_extra=[]) == {}
    assert engine.requests == []


def test_the_extra_texts_then_the_prefix_then_what_was_typed_stand_before_the_gap() -> None:
    engine = FakeEngine()
    whole_of(engine, VIM, n_predict=2)
    text = tiny_text(engine)
    assert text.index("other.py\nx = 1\ny = 2\n\n") < text.index(PREFIX) < text.index("    retur")


def tiny_text(engine: FakeEngine) -> str:
    return TOKENIZER.decode(engine.requests[0].prompt)


def test_the_chunks_of_a_stream_join_to_the_content_and_end_without_a_word() -> None:
    body = {**VSCODE, "seed": 7, "n_predict": 8}
    content = whole_of(FakeEngine(), body)["content"]
    response = post(app_of(), INFILL, {**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = [json.loads(part.removeprefix("data: ")) for part in response.text.strip().split("\n\n")]
    assert "".join(chunk["content"] for chunk in chunks) == content
    assert [chunk["stop"] for chunk in chunks] == [False, True]
    assert chunks[-1]["tokens_predicted"] > 0


def test_a_stop_string_is_told_of() -> None:
    body = {**VSCODE, "seed": 7, "n_predict": 8}
    content = whole_of(FakeEngine(), body)["content"]
    told = whole_of(FakeEngine(), body, stop=[content[1:3]])
    assert told["content"] == content[: content.index(content[1:3])]
    assert (told["stop_type"], told["stopping_word"]) == ("word", content[1:3])


def test_what_does_not_fit_is_cut_off_at_the_far_end_and_said_to_be() -> None:
    engine = FakeEngine()
    told = whole_of(engine, VSCODE, input_prefix="first " * 8000 + PREFIX, n_predict=4)
    assert told["truncated"] is True
    assert max(len(request.prompt) for request in engine.requests) <= 4096
    assert tiny_text(engine).count("def add(a, b)") == 1


@pytest.mark.parametrize("top_k", [-1, 0])
def test_llama_cpps_words_for_any_are_understood(top_k: int) -> None:
    engine = FakeEngine()
    told = whole_of(engine, VSCODE, top_k=top_k, seed=-1, n_predict=-1)
    assert engine.requests[0].params.top_k is None
    assert told["generation_settings"]["seed"] >= 0
    assert told["generation_settings"]["n_predict"] == 40


def test_an_adapter_is_asked_for_by_its_name() -> None:
    engine = FakeEngine(adapters=("sums",))
    assert whole_of(engine, VSCODE, model="sums", n_predict=2)["model"] == "sums"
    assert {request.adapter for request in engine.requests} == {"sums"}
    assert post(app_of(), INFILL, {**VSCODE, "model": "qwen"}).status_code == 404


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input_prefx": "x"}, "input_prefx", "did you mean 'input_prefix'?"),
        ({"input_extra": [{"filename": "x"}]}, "input_extra.0.text", "is missing"),
        ({"input_extra": "x"}, "input_extra", "should be a valid list"),
        ({"prompt": [1, 2]}, "prompt", "should be a valid string"),
        ({"n_predict": -2}, "n_predict", "n_predict is -2"),
        ({"n_predict": 5000}, "n_predict", "n_predict is 5000; it must be a whole number from 1 to 4096."),
        ({"lora": [{"id": 0, "scale": 0.5}]}, "lora", "as model"),
        ({"samplers": [3]}, "samplers.0", "should be a valid string"),
        ({"response_fields": "content"}, "response_fields", "should be a valid list"),
        ({"t_max_predict_ms": "soon"}, "t_max_predict_ms", "should be a valid number"),
        ({"grammar": "root ::= x"}, "grammar", "not supported"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str, message: str) -> None:
    response = post(app_of(), INFILL, {**VSCODE, **fields})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]


def test_a_deadline_gives_no_text() -> None:
    app = app_of(FakeEngine(Script(holds_at=0)))
    told = post(app, INFILL, {**VSCODE, "deadline_s": 0.02}, by=run_unhurried).json()
    assert (told["content"], told["stop_type"]) == ("", "limit")


def test_a_real_engine_fills_it_as_the_python_api_does() -> None:
    body = {"input_prefix": "The sea", "prompt": " is", "input_suffix": ".", "n_predict": 1, "seed": 7}
    with served_tiny() as address:
        headers = {"authorization": f"Bearer {KEY}"}
        ahead = httpx2.post(address + INFILL, json=VIM_READS_AHEAD, headers=headers, timeout=60)
        assert (ahead.status_code, ahead.json()) == (200, {})
        told = httpx2.post(address + INFILL, json=body, headers=headers, timeout=60).json()
        assert httpx2.post(address + INFILL, json=body, timeout=60).status_code == 401
    assert told["content"] == tiny().fill("The sea is", ".", max_tokens=1, seed=7).text
