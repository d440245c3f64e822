"""The planner finds the fewest replicas that meet a goal, by the cost model or by measured steps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dgemma.bench.devices import device_named
from dgemma.bench.predict import EFFICIENCY, RELEASED, causal_seconds, engine_step_seconds, step_seconds
from dgemma.errors import InputError
from dgemma.plan.hardware import Hardware, predicted_shape
from dgemma.plan.measure import measure_times
from dgemma.plan.planner import Goal, SizedFleet, Unreachable, dearer_from, size
from dgemma.plan.step_times import MeasuredTimes
from plan.test_fleet import ONE, SELDOM
from server.canvas_served import tiny

GOAL = Goal(p99_s=20, requests=300)


def test_twice_the_load_needs_about_twice_the_replicas() -> None:
    one, two = (size(ONE, replace(SELDOM, rate=rate), GOAL) for rate in (4.0, 8.0))
    assert isinstance(one, SizedFleet)
    assert isinstance(two, SizedFleet)
    assert GOAL.is_met(one.found)
    assert 1.5 * one.replicas <= two.replicas <= 2.5 * one.replicas
    assert 0.5 * 4.0 < one.replicas * one.rate_each < 2 * 4.0


def test_what_no_number_of_replicas_can_do_is_said() -> None:
    plan = size(ONE, SELDOM, Goal(p99_s=3))
    assert plan == Unreachable("diffusion", 4.0)


def test_the_crossing_is_where_the_second_device_is_needed() -> None:
    found = size(ONE, replace(SELDOM, rate=0.1), GOAL)
    assert isinstance(found, SizedFleet)
    assert dearer_from(found, replace(found, rate_each=2 * found.rate_each)) == found.rate_each
    assert dearer_from(found, replace(found, rate_each=found.rate_each / 2)) is None
    assert dearer_from(found, Unreachable("left to right", 9.0)) is None


def test_the_price_is_that_of_all_replicas_for_the_tokens_they_wrote() -> None:
    found = size(ONE, replace(SELDOM, rate=1.0), GOAL, price=2.0)
    assert isinstance(found, SizedFleet)
    assert found.price_per_million is not None
    paid = found.replicas * 2.0 * found.found.duration_s / 3600
    assert found.price_per_million * found.found.tokens / 1e6 == pytest.approx(paid)


def test_a_mixed_step_is_never_less_than_its_parts() -> None:
    h100 = device_named("h100")
    canvas = engine_step_seconds(RELEASED, h100, "fp8", canvases=4)
    assert canvas == step_seconds(RELEASED, h100, "fp8", canvases=4).seconds
    mixed = engine_step_seconds(RELEASED, h100, "fp8", canvases=4, encoded=1024)
    assert mixed > canvas
    # Of one sequence left to right, the published speed; of many, its launches are paid once.
    alone, many = (engine_step_seconds(RELEASED, h100, "fp8", causal=count) for count in (1, 64))
    assert alone == pytest.approx(causal_seconds(RELEASED, h100, "fp8").seconds, rel=1e-6)
    assert many < causal_seconds(RELEASED, h100, "fp8", sequences=64).seconds
    assert many > causal_seconds(RELEASED, h100, "fp8", sequences=64, efficiency=1.0).seconds
    assert EFFICIENCY["datacenter gpu"] < 1


def test_hardware_is_a_device_and_how_many_a_machine_has() -> None:
    assert Hardware.parse("h100x8") == Hardware(device_named("h100"), 8)
    assert Hardware.parse("rtx5090").devices == 1
    with pytest.raises(InputError, match="is not a known device"):
        Hardware.parse("h1000x8")


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="do not fit"):
        predicted_shape(Hardware.parse("rtx4090"), "bf16", max_len=1000)
    shape = predicted_shape(Hardware.parse("h100"), None, max_len=4000, causal=True)
    assert shape.canvas_len is None
    assert shape.max_num_seqs >= 64


def test_between_measured_sizes_a_step_is_in_proportion() -> None:
    times = MeasuredTimes([(1, 1.0), (4, 2.5), (8, 6.5)], encode_s=0.5, token_s=0.01, encode_alone_s=2.0)
    assert times.seconds(1, 0, 0) == 1.0
    assert times.seconds(2, 0, 0) == 1.5
    assert times.seconds(6, 0, 0) == 4.5
    assert times.seconds(9, 0, 0) == 7.5
    assert times.seconds(0, 10, 0) == pytest.approx(2.1)
    assert times.seconds(4, 10, 0) == pytest.approx(3.1)


@pytest.mark.parametrize("causal", [False, True])
def test_the_steps_of_a_model_are_measured(causal: bool) -> None:
    times = measure_times(tiny(), max_num_seqs=3, steps=3, rounds=1, causal=causal)
    assert [count for count, _ in times.by_rows] == [1, 2]
    assert all(0 < seconds < math.inf for _, seconds in times.by_rows)
    assert times.encode_s >= 0
    assert times.token_s >= 0
