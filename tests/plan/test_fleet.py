"""The simulation counts time, answers and cached tokens as an engine does."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgemma.engine.kv_cache_manager import Capacity
from dgemma.errors import InputError
from dgemma.plan.fleet import Fleet, LoadResult, simulate
from dgemma.plan.simulated_replica import ReplicaShape
from dgemma.plan.step_times import MeasuredTimes
from dgemma.plan.traffic import Traffic
from dgemma.scale.autoscaling import AutoscalingRule

# A step takes a second whatever it denoises, and another one if it encodes anything.
FLAT = MeasuredTimes([(1, 1.0), (2, 1.0)], encode_s=1.0, token_s=0.0, encode_alone_s=1.0)
BLOCK, CANVAS = 4, 8
SHAPE = ReplicaShape(
    times=FLAT,
    capacity=Capacity(full_blocks=4000, window_blocks=2000, max_gathered=8000),
    block_size=BLOCK,
    window=8,
    canvas_len=CANVAS,
    max_num_seqs=4,
)
ONE = Fleet(shape=SHAPE, replicas=1, steps=(3,))
SELDOM = Traffic(rate=1 / 1000, prompt=10, answer=CANVAS, spread=0.0)


def served(fleet: Fleet, traffic: Traffic, duration_s: float, seed: int = 0) -> LoadResult:
    return simulate(fleet, traffic, duration_s=duration_s, seed=seed)


def test_one_canvas_alone_takes_its_steps_the_first_with_the_prompt() -> None:
    found = served(ONE, SELDOM, 20_000)
    assert found.finished > 5
    assert found.unfinished == 0
    assert set(found.answer_s) == {4.0}  # 1 + encoding, then two more
    assert set(found.first_text_s) == {4.0}
    assert found.utilisation == pytest.approx(4 * found.finished / 20_000, rel=0.2)


def test_a_second_canvas_begins_with_the_commit_of_the_first() -> None:
    found = served(ONE, replace(SELDOM, answer=2 * CANVAS), 20_000)
    assert set(found.first_text_s) == {4.0}
    assert set(found.answer_s) == {8.0}


def test_left_to_right_takes_a_step_per_token() -> None:
    fleet = replace(ONE, shape=replace(SHAPE, canvas_len=None))
    found = served(fleet, replace(SELDOM, answer=5), 20_000)
    assert set(found.first_text_s) == {2.0}
    assert set(found.answer_s) == {6.0}


def test_an_arrival_joins_at_the_end_of_a_step_not_of_a_canvas() -> None:
    """Canvases of 100 steps, taken together while nobody comes."""
    found = served(replace(ONE, steps=(100,)), replace(SELDOM, rate=1 / 60), 3000)
    assert found.finished > 20
    # Each waits for the step under way, and steps in which others begin are a second longer.
    assert all(101 <= seconds < 101 + 10 for seconds in found.answer_s)


def test_more_than_the_slots_wait() -> None:
    found = served(replace(ONE, steps=(100,)), replace(SELDOM, rate=1 / 10), 1000)
    assert max(found.answer_s) > 202


def test_the_router_finds_a_conversation_again_and_chance_does_not() -> None:
    traffic = Traffic(rate=0.02, prompt=40, answer=CANVAS, spread=0.0, turns=5, think_s=30)
    fleet = replace(ONE, replicas=8)
    prefix, random = (served(replace(fleet, routing=each), traffic, 5000) for each in ("prefix", "random"))  # type: ignore[arg-type]
    assert prefix.hit_share > 1.5 * random.hit_share > 0


def test_a_shared_beginning_is_computed_once() -> None:
    traffic = replace(SELDOM, rate=1 / 50, prompt=41, shared=40, system_prompts=1)
    found = served(ONE, traffic, 5000)
    assert found.cached_tokens == 40 * (found.finished - 1)


def test_requests_outlive_their_replica() -> None:
    fleet = replace(ONE, replicas=3, mean_life_s=100, start_s=20)
    found = served(fleet, replace(SELDOM, rate=0.3), 2000)
    assert found.failures > 20
    assert found.retried > 0
    assert found.unfinished == 0


def test_without_any_replica_requests_wait_for_one() -> None:
    found = served(replace(ONE, mean_life_s=50, start_s=40), replace(SELDOM, rate=0.05), 2000)
    assert found.failures > 10
    assert found.unfinished == 0
    assert max(found.answer_s) > 40


def test_a_request_that_waited_for_a_first_replica_is_not_retried() -> None:
    rule = AutoscalingRule(max_replicas=1, target=0.5)
    found = served(replace(ONE, replicas=0, autoscaling=rule, start_s=5), replace(SELDOM, rate=0.5), 100)
    assert found.finished > 20
    assert max(found.answer_s) > 5
    assert (found.failures, found.retried, found.unfinished) == (0, 0, 0)


def test_autoscaling_follows_the_load() -> None:
    rule = AutoscalingRule(max_replicas=10, target=0.5, down_after_s=60)
    fleet = replace(ONE, steps=(20,), autoscaling=rule, start_s=5)
    found = served(fleet, replace(SELDOM, rate=0.5), 1000)
    assert max(count for _, count in found.num_replicas) > 4
    assert found.unfinished == 0


def test_too_much_load_is_seen_as_unfinished_answers() -> None:
    found = served(replace(ONE, steps=(50,)), replace(SELDOM, rate=2), 300)
    assert found.unfinished > 0
    assert found.quantile(0.99) == math.inf


def test_it_ends_when_it_is_given_up() -> None:
    found = simulate(
        ONE, replace(SELDOM, rate=0.1), duration_s=5000, give_up=lambda found: found.finished == 7
    )
    assert found.finished == 7


@given(st.integers(0, 1000), st.integers(1, 4), st.sampled_from(["prefix", "load", "random"]))
def test_every_request_is_answered_once_and_the_same_seed_is_the_same(
    seed: int, replicas: int, routing: str
) -> None:
    traffic = Traffic(rate=0.2, prompt=20, answer=12, turns=2, think_s=5, shared=8, system_prompts=3)
    fleet = replace(ONE, replicas=replicas, routing=routing, mean_life_s=200, start_s=10)  # type: ignore[arg-type]
    found = served(fleet, traffic, 200, seed)
    assert len(found.answer_s) == found.finished
    assert found.unfinished == 0
    assert all(0 < first <= last for first, last in zip(found.first_text_s, found.answer_s, strict=True))
    again = served(fleet, traffic, 200, seed)
    assert again.answer_s == found.answer_s


@pytest.mark.parametrize(
    "wrong",
    [{"rate": 0}, {"prompt": 0}, {"shared": 10}, {"daily": 1}, {"turns": 0}, {"spread": math.nan}],
    ids=str,
)
def test_traffic_that_makes_no_sense_is_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        served(ONE, replace(SELDOM, **wrong), 10)  # type: ignore[arg-type]
