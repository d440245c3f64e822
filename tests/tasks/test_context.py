"""The requests that work on canvases is made of: what stands before them, what they may never write."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dgemma.engine.request import PinnedTokens
from dgemma.params import GenerationParams
from dgemma.tasks.context import canvas_of
from tasks.scripted import BOS, CANVAS, END, TOKENIZER, task_context

IDS = tuple(range(200, 300))


def test_an_opening_keeps_the_end_of_what_has_no_room() -> None:
    task = task_context(max_positions=60)
    assert task.opening(IDS[:20], reserve=10) == (BOS, *IDS[:20])
    assert task.opening(IDS[:49], reserve=10) == (BOS, *IDS[:49])
    assert task.opening(IDS, reserve=10) == (BOS, *IDS[-49:])
    for room in (59, 60, 1000):
        assert task.opening(IDS, reserve=room) == (BOS,)


def test_where_there_is_no_beginning_of_text_the_end_of_another_stands_before_it() -> None:
    task = task_context(tokenizer=SimpleNamespace(bos_id=None, eos_id=9, controls={}))
    assert task.opening(IDS[:3], reserve=0) == (END, *IDS[:3])


@pytest.mark.parametrize(
    ("end_tokens", "eos_id", "expected"), [((106, 1), 9, 106), ((), 9, 9), ((), None, 0)]
)
def test_a_canvas_ends_with_the_checkpoints_first_end_token(
    end_tokens: tuple[int, ...], eos_id: int | None, expected: int
) -> None:
    tokenizer = SimpleNamespace(bos_id=BOS, eos_id=eos_id, controls={})
    params = GenerationParams(end_tokens=end_tokens)
    assert task_context(tokenizer=tokenizer, params=params).end_token == expected


def test_no_control_and_no_end_can_be_written_into_a_text() -> None:
    params = GenerationParams(end_tokens=(1, 106, 3000))
    bias = task_context(params=params).write((BOS,), max_tokens=CANVAS).logit_bias
    assert [id_ for id_, _ in bias] == sorted({*TOKENIZER.controls.values(), 1, 106, 3000})
    assert all(value <= -1000 for _, value in bias)


def test_a_smaller_vocabulary_has_fewer_words_to_forbid() -> None:
    bias = task_context(vocab_size=50).write((BOS,), max_tokens=CANVAS).logit_bias
    assert [id_ for id_, _ in bias] == list(range(50))


def test_a_request_that_writes_runs_to_its_end_on_a_canvas() -> None:
    """Whatever the caller's options say of ends, stops, seeds and left-to-right decoding."""
    params = GenerationParams(
        seed=3, stop=("x",), decode="causal", max_tokens=2, max_denoising_steps=9, top_k=5
    )
    task = task_context(params=params, adapter="blue", id="req")
    given = PinnedTokens(fixed={0: 5})
    request = task.write((BOS,), max_tokens=CANVAS, pinned=given, logprobs=2)
    expected: dict[str, Any] = {"top_k": 5, "max_denoising_steps": 9, "logprobs": 2, "max_tokens": CANVAS}
    assert request.params == GenerationParams(ignore_end=True, **expected)
    assert (request.seed, request.adapter, request.id, request.pinned) == (7, "blue", "req", given)
    assert request.score_from is None
    assert task.write((BOS,), max_tokens=CANVAS, seed=8).seed == 8


def test_an_answer_has_the_callers_options_and_an_end_of_its_own() -> None:
    params = GenerationParams(seed=3, stop=("x",), temperature=0.5)
    task = task_context(params=params, adapter="blue", id="req")
    request = task.answer((BOS, 7), max_tokens=5)
    assert request.params == GenerationParams(stop=("x",), temperature=0.5, max_tokens=5)
    assert (request.prompt, request.seed, request.adapter, request.id) == ((BOS, 7), 7, "blue", "req")
    assert request.logit_bias == ()


def test_a_score_names_where_it_begins() -> None:
    request = task_context(adapter="blue", id="req").score((BOS, 7, 8, 9), 2)
    assert (request.prompt, request.score_from) == ((BOS, 7, 8, 9), 2)
    assert (request.adapter, request.id, request.params.seed) == ("blue", "req", None)


@pytest.mark.parametrize("gap", [0, 1, 5, 8])
@pytest.mark.parametrize("count", [0, 2, 8, 30])
def test_a_canvas_is_a_gap_then_what_follows_then_ends(gap: int, count: int) -> None:
    given = canvas_of(gap, IDS[:count], END, 8, {0: (4, 5)} if gap else None)
    row = [given.fixed.get(at) for at in range(8)]
    assert row == ([None] * gap + list(IDS[:count]) + [END] * 8)[:8]
    assert set(given.fixed) == set(range(gap, 8))
    assert given.among == ({0: (4, 5)} if gap else {})
    assert not given.begin
    assert not given.watch
