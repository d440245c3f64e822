"""Deadlines, by a clock that moves only while the engine computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dgemma.engine.kv_cache_manager import KVCacheManager
from dgemma.engine.request import EngineRequest
from dgemma.engine.scheduler import SchedulerConfig
from dgemma.events import Answer, Finish, FinishReason
from dgemma.params import Decode, GenerationParams
from engine_life import CONFIG, ENCODE_BLOCK, make_engine

STEP_S = 1.0
PARAMS = GenerationParams(max_tokens=80, max_denoising_steps=48, ignore_end=True, temperature=1.0)
REQUEST = EngineRequest(prompt=(2, 300, 301), seed=1, params=PARAMS)


def answer(deadline_s: float, params: GenerationParams = PARAMS) -> Answer:
    """Of a request whose every step takes a second."""
    now = 100.0

    def compute(point: str, request_ids: Sequence[int]) -> None:
        nonlocal now
        now += STEP_S * (point == "forward")

    memory = KVCacheManager(block_size=4, window=CONFIG.window, full_blocks=60, window_blocks=30)
    limits = SchedulerConfig(max_num_seqs=4, chunk_size=16, encode_block=ENCODE_BLOCK)
    engine = make_engine(memory, limits, clock=lambda: now, fault=compute)
    engine.add(engine.validate(replace(REQUEST, params=replace(params, deadline_s=deadline_s))))
    events = []
    while not engine.is_idle:
        events += [event for _, event in engine.step()]
    assert isinstance(events[-1], Finish)
    return events[-1].answer


@pytest.mark.parametrize(("deadline_s", "total_s"), [(4.5, 4.0), (5.0, 4.0), (5.25, 5.0), (9.9, 9.0)])
def test_a_step_that_would_end_behind_the_deadline_is_not_begun(deadline_s: float, total_s: float) -> None:
    found = answer(deadline_s)
    assert found.finish_reason is FinishReason.DEADLINE
    assert found.timings.total_s == total_s
    assert sum(found.steps) == total_s / STEP_S


@pytest.mark.parametrize("deadline_s", [2.5, 7.5, 12.5, 19.5])
@pytest.mark.parametrize("decode", ["lossless", "auto"])
def test_at_the_deadline_lossless_text_is_a_beginning_of_the_causal_text(
    deadline_s: float, decode: Decode
) -> None:
    """A draft that nobody has checked is not shown."""
    causal = answer(1000.0, replace(PARAMS, decode="causal")).tokens
    found = answer(deadline_s, replace(PARAMS, decode=decode, draft_steps=2))
    assert found.finish_reason is FinishReason.DEADLINE
    assert found.provisional_tokens == 0
    assert found.tokens == causal[: len(found.tokens)]
    assert found.tokens or deadline_s < 3


def test_before_there_is_a_guess_the_deadline_itself_counts() -> None:
    found = answer(0.5)
    assert found.timings.total_s == STEP_S
    assert found.tokens


def test_times_are_counted_from_the_arrival() -> None:
    params = replace(PARAMS, max_denoising_steps=3, max_tokens=8)
    found = answer(100.0, params)
    assert found.finish_reason is FinishReason.LENGTH
    assert found.steps[0] <= 3
    assert found.timings.first_commit_s == found.steps[0] * STEP_S
    assert found.timings.total_s == sum(found.steps) * STEP_S
    phases = (found.timings.prefill_s, found.timings.denoise_s, found.timings.commit_s)
    assert sum(phases) == pytest.approx(found.timings.total_s)
    assert all(seconds > 0 for seconds in phases)
