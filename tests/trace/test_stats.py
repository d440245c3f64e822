"""Figures of how canvases settle, on steps whose figures are known."""

from __future__ import annotations

import pytest

from dgemma.engine.request import EngineRequest
from dgemma.params import GenerationParams
from dgemma.trace.stats import canvas_stats, trace_stats
from dgemma.trace.trace import Trace, TraceRequest, TraceStep


def steps(*canvases: list[int], pinned: tuple[int, ...] = ()) -> tuple[TraceStep, ...]:
    return tuple(
        TraceStep(
            canvas=0,
            step=number,
            at_ms=0.0,
            argmax=tuple(argmax),
            entropy=(0,) * len(argmax),
            accepted=(),
            drawn=(),
            pinned=pinned,
        )
        for number, argmax in enumerate(canvases, start=1)
    )


def test_a_position_settles_after_its_last_change() -> None:
    found = canvas_stats(steps([1, 1, 1, 1], [1, 2, 1, 1], [1, 3, 2, 1], [1, 3, 3, 1]))
    assert found is not None
    assert found.settled_at == (1, 3, 4, 1)
    assert found.revisions == 4 / 4
    assert found.late_revisions == 3 / 4
    assert found.steps == 4


def test_the_last_positions_are_those_after_all_but_a_twentieth() -> None:
    first = [0] * 20
    found = canvas_stats(steps(first, first, [*first[:19], 1], [*first[:19], 2]))
    assert found is not None
    assert found.steps_for_the_last == 3, "nineteen have settled at the first step"
    assert found.share_for_the_last == 3 / 4


def test_pinned_positions_do_not_count() -> None:
    found = canvas_stats(steps([1, 9], [2, 9], pinned=(1,)))
    assert found is not None
    assert found.positions == 1
    assert found.revisions == 1
    assert canvas_stats(steps([9], pinned=(0,))) is None


@pytest.mark.parametrize(
    ("canvases", "order"),
    [
        (([0, 0, 0], [0, 1, 1], [0, 1, 2]), 1.0),
        (([0, 0, 0], [1, 1, 0], [2, 1, 0]), -1.0),
        (([0, 0, 0], [1, 1, 1]), 0.0),
    ],
)
def test_the_settling_order_is_a_rank_correlation(canvases: tuple[list[int], ...], order: float) -> None:
    request = EngineRequest(prompt=(1,), seed=1, params=GenerationParams())
    trace = Trace(requests=(TraceRequest(round=0, request=request, steps=steps(*canvases)),))
    found = trace_stats([trace])
    assert found is not None
    assert found.left_to_right == pytest.approx(order)
    assert found.settled_by[-1] == 1
    assert found.canvases == 1


def test_a_position_that_settles_at_a_tenth_of_the_steps_counts_in_it() -> None:
    """In floating point seven tenths of 90 steps are less than 63."""
    request = EngineRequest(prompt=(1,), seed=1, params=GenerationParams())
    changed_last_at_63 = steps(*([0] if number < 63 else [1] for number in range(1, 91)))
    trace = Trace(requests=(TraceRequest(round=0, request=request, steps=changed_last_at_63),))
    found = trace_stats([trace])
    assert found is not None
    assert found.settled_by == (0, 0, 0, 0, 0, 0, 1, 1, 1, 1)


def test_no_canvas_has_no_figures() -> None:
    assert trace_stats([Trace()]) is None
