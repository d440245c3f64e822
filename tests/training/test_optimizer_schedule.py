"""The learning rate is a function of the step alone: up, then down to exactly what the recipe says."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgemma.training.optimizer import learning_rate
from dgemma.training.recipe import OptimizerRecipe

TOP = 3e-4
DECAYS = ("cosine", "linear", "constant")


def rates(num_steps: int, **options: Any) -> list[float]:
    recipe = OptimizerRecipe(**{"learning_rate": TOP, **options})
    return [learning_rate(step, num_steps, recipe) for step in range(num_steps)]


@pytest.mark.parametrize("decay", DECAYS)
def test_the_rate_rises_evenly_to_its_top_and_never_begins_at_zero(decay: str) -> None:
    found = rates(100, warmup=0.1, decay=decay)
    assert found[:10] == pytest.approx([TOP * n / 10 for n in range(1, 11)])
    assert found[10] == TOP


@pytest.mark.parametrize("decay", ["cosine", "linear"])
@pytest.mark.parametrize("final", [0.0, 0.1, 1 / 3, 1.0])
@pytest.mark.parametrize(("num_steps", "warmup"), [(2, 0.0), (3, 0.02), (10, 0.5), (999, 0.0), (1000, 0.02)])
def test_the_last_step_runs_at_exactly_the_final_rate(
    decay: str, final: float, num_steps: int, warmup: float
) -> None:
    assert rates(num_steps, warmup=warmup, decay=decay, final=final)[-1] == TOP * final


def test_half_way_down_both_decays_are_half_way_between_top_and_final() -> None:
    for decay in ("cosine", "linear"):
        assert rates(101, warmup=0, decay=decay, final=0.2)[50] == pytest.approx(TOP * 0.6)


def test_a_cosine_stays_high_first_and_low_last() -> None:
    cosine, linear = (rates(101, warmup=0, decay=decay, final=0.0) for decay in ("cosine", "linear"))
    assert cosine[25] > linear[25]
    assert cosine[75] < linear[75]
    assert cosine[25] == pytest.approx(TOP * (1 + math.cos(math.pi / 4)) / 2)


def test_a_constant_rate_stays_at_its_top_whatever_the_final() -> None:
    assert rates(50, warmup=0.1, decay="constant", final=0.0)[5:] == [TOP] * 45


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("warmup", [0.0, 0.02, 1.0])
def test_a_run_of_one_step_runs_at_the_top(decay: str, warmup: float) -> None:
    assert rates(1, warmup=warmup, decay=decay) == [TOP]


@pytest.mark.parametrize("decay", DECAYS)
def test_a_warm_up_over_the_whole_run_reaches_the_top_at_its_end(decay: str) -> None:
    assert rates(4, warmup=1.0, decay=decay) == pytest.approx([TOP / 4, TOP / 2, TOP * 3 / 4, TOP])


@given(st.integers(1, 300), st.floats(0, 1), st.sampled_from(DECAYS), st.floats(0, 1))
def test_the_rate_only_rises_then_only_falls(num_steps: int, warmup: float, decay: str, final: float) -> None:
    found = rates(num_steps, warmup=warmup, decay=decay, final=final)
    top = found.index(max(found))
    assert all(a < b for a, b in pairwise(found[: top + 1]))
    # cos wobbles in its last bits where it is flat.
    assert all(a >= b * (1 - 1e-12) for a, b in pairwise(found[top:]))
    assert min(found) >= 0
    assert max(found) == pytest.approx(TOP)
