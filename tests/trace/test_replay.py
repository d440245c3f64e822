"""A trace replays token for token; what was changed since is caught, and located."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dgemma
from dgemma import InputError, LanguageModel
from dgemma.events import CanvasStep, Commit, Finish
from dgemma.sampling.sampler import make_sampler
from dgemma.trace.trace import Trace
from recorded_calls import recorded
from sizes import cases

NUM_TRACES = cases(200, 40)


@pytest.mark.parametrize("seed", range(NUM_TRACES))
def test_a_trace_replays_token_for_token(lm: LanguageModel, tmp_path: Path, seed: int) -> None:
    trace = recorded(lm, seed)
    assert trace.requests
    trace.save(tmp_path / "a.trace")
    stored = Trace.load(tmp_path / "a.trace")
    assert stored == trace
    found = stored.compare(lm.replay(stored))
    assert found.is_same, found.parting
    assert found.steps == trace.num_steps
    assert found.entropy == 0
    assert {name for name, _, _ in found.about} == {"command"}


def plain(lm: LanguageModel) -> Trace:
    with lm.record() as recorder:
        lm.generate("The sea is", max_tokens=48, seed=5)
    return recorder.trace()


def test_recording_changes_no_text_and_hides_its_events(lm: LanguageModel) -> None:
    alone = lm.generate("The sea is", max_tokens=48, seed=5)
    with lm.record() as recorder:
        events = list(lm.stream("The sea is", max_tokens=48, seed=5, drafts=False))
    assert not any(isinstance(event, CanvasStep) for event in events)
    assert next(event for event in events if isinstance(event, Finish)).answer.tokens == alone.tokens
    (request,) = recorder.trace().requests
    assert [len(steps) for steps in request.canvases] == list(alone.steps)
    assert sum(len(event.tokens) for event in events if isinstance(event, Commit)) == len(alone.tokens)
    assert request.answer is not None
    assert request.answer.text == alone.text
    assert lm.generate("The sea is", max_tokens=48, seed=5).tokens == alone.tokens, "recording has ended"


def test_what_a_step_records_is_what_the_sampler_did(lm: LanguageModel) -> None:
    (request,) = plain(lm).requests
    assert request.answer is not None
    for steps, commit in zip(request.canvases, request.commits, strict=True):
        assert steps[-1].argmax[: len(commit.tokens)] == commit.tokens
        for step in steps:
            assert len(step.argmax) == len(step.entropy) == lm.config.canvas_len
            assert len(step.accepted) == len(step.drawn) >= 1
    times = [step.at_ms for step in request.steps]
    assert times == sorted(times)


def test_a_changed_weight_is_caught_and_located(lm: LanguageModel) -> None:
    trace = plain(lm)
    other = lm.with_transformer(copy.deepcopy(lm.transformer))
    with torch.no_grad():
        next(other.transformer.parameters()).mul_(1.5)
    found = trace.compare(other.replay(trace))
    assert "model weights" in {name for name, _, _ in found.about}
    assert found.parting is not None
    assert (found.parting.canvas, found.parting.step) == (0, 1)
    assert found.parting.position is not None


def test_one_weight_that_the_fingerprint_misses_is_still_caught_by_the_replay(lm: LanguageModel) -> None:
    trace = plain(lm)
    other = lm.with_transformer(copy.deepcopy(lm.transformer))
    with torch.no_grad():
        weight = max(other.transformer.parameters(), key=lambda parameter: parameter.numel())
        weight.view(-1)[1::3] += 1.0
    assert not trace.compare(other.replay(trace)).is_same


@pytest.mark.parametrize(
    ("name", "value"), [("entropy_bound", 5.0), ("t_max", 3.0), ("acceptance", "fixed"), ("seed", 6)]
)
def test_a_changed_sampler_option_is_caught_and_located(lm: LanguageModel, name: str, value: object) -> None:
    trace = plain(lm)
    (request,) = trace.requests
    changed = request.request
    if name == "seed":
        changed = replace(changed, seed=6)
    else:
        changed = replace(changed, params=replace(changed.params, **{name: value}))
    found = trace.compare(lm.replay(replace(trace, requests=(replace(request, request=changed),))))
    assert name in {fact for fact, _, _ in found.about}
    assert found.parting is not None
    assert found.parting.canvas == 0
    assert found.parting.step == 1


def test_a_changed_tokenizer_is_caught_and_located(
    model_path: Path, lm: LanguageModel, tmp_path: Path
) -> None:
    trace = plain(lm)
    other_path = tmp_path / "other"
    shutil.copytree(model_path, other_path)
    file = other_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    (request,) = trace.requests
    spelled = {token: text for text, token in vocab.items()}
    position, token = next(
        (at, token) for at, token in enumerate(request.request.prompt) if spelled.get(token, "").isalpha()
    )
    other = next(text for text in vocab if text.isalpha() and text != spelled[token])
    vocab[spelled[token]], vocab[other] = vocab[other], vocab[spelled[token]]
    file.write_text(json.dumps(tokenizer))
    found = trace.compare(dgemma.load(other_path).replay(trace))
    assert "model tokenizer" in {name for name, _, _ in found.about}
    located = [fact for fact in found.about if fact[0].startswith(f"text of token {token} ")]
    assert [fact[1:] for fact in located] == [(spelled[token], other)]
    assert located[0][0].endswith(f"first at request 0, prompt, position {position}")


def test_a_model_of_another_geometry_is_refused_by_name(lm: LanguageModel) -> None:
    trace = plain(lm)
    about = {**trace.about, "model": {**trace.about["model"], "canvas_len": 7}}
    with pytest.raises(InputError, match="canvas_len 7"):
        lm.replay(replace(trace, about=about))


def test_what_cannot_be_replayed_is_refused_by_name(lm: LanguageModel) -> None:
    with lm.record() as recorder:
        lm.generate("a", sampler=make_sampler(lm.generation_defaults), max_tokens=4, seed=1)
    with pytest.raises(InputError, match="a sampler of the caller's own"):
        lm.replay(recorder.trace())
    with lm.record() as recorder:
        lm.generate("a", max_tokens=4, seed=1, deadline_s=600.0)
    trace = recorder.trace()
    assert trace.compare(lm.replay(trace)).is_same, "it was met"
    (request,) = trace.requests
    assert request.answer is not None
    late = replace(request, answer=replace(request.answer, finish_reason="deadline"))
    with pytest.raises(InputError, match="deadline"):
        lm.replay(replace(trace, requests=(late,)))


def test_a_model_is_recorded_once_at_a_time(lm: LanguageModel) -> None:
    with lm.record(), pytest.raises(InputError, match="recorded already"), lm.record():
        pass
    with lm.record() as recorder:
        lm.generate("a", max_tokens=4, seed=1)
    assert len(recorder.trace().requests) == 1
