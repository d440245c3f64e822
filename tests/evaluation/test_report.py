"""Figures computed by hand, from results made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dgemma import InputError
from dgemma.evaluation.intervals import wilson
from dgemma.evaluation.report import EvaluationReport, compare
from dgemma.evaluation.results import AnswerStats, ExampleResult


def made(
    number: int, *, right: float | None = 1.0, steps: tuple[int, ...] = (4,), **changes: Any
) -> ExampleResult:
    written = AnswerStats(
        text="x", finish_reason=changes.pop("finish_reason", "stop"), decode="diffuse", tokens=10,
        forwards=sum(steps), steps=steps, prompt_tokens=3, seconds=0.5,
    )  # fmt: skip
    scores = {} if right is None else {"right": right}
    return ExampleResult(
        number=number, mark=f"m{number}", seed=number, scores=scores, written=written, **changes
    )


def report_of(*results: ExampleResult) -> EvaluationReport:
    return EvaluationReport(task="t", model="m", settings={"seed": 1}, results=results)


def test_figures_are_computed_from_the_results() -> None:
    results = [
        made(n, steps=(n + 1, 2), right=float(n % 2), groups=("g",) if n < 2 else ()) for n in range(9)
    ]
    results.append(made(9, right=None, failure="no", finish_reason="length"))
    report = report_of(*results)
    # Steps: 1..9, nine times 2, and 4: nineteen canvases.
    assert report.steps_mean == pytest.approx((45 + 18 + 4) / 19)
    assert report.steps_p90 == 8  # the 18th of 19
    assert report.tokens_per_forward == pytest.approx(100 / 67)
    assert report.seconds_per_example == pytest.approx(0.5)
    assert report.tokens_per_second == pytest.approx(20)
    assert report.finish_reasons == {"stop": 9, "length": 1}
    assert report.scores["right"].interval == wilson(4, 10)
    assert list(report.groups) == ["g"]
    found = json.loads(json.dumps(report.to_json()))
    assert (found["n"], found["failed"], found["stopped"]) == (10, 1, None)
    assert found["groups"]["g"]["scores"]["right"]["mean"] == 0.5
    assert found["failures"] == [{"number": 9, "reason": "no"}]


def test_a_score_that_only_some_have_is_of_those() -> None:
    rare = replace(made(1), scores={"right": 1.0, "rare": 0.25})
    report = report_of(made(0), rare, made(2, right=None, failure="no"))
    assert (report.scores["rare"].n, report.scores["rare"].mean) == (2, 0.125)


def test_two_runs_are_compared_example_by_example() -> None:
    first = [made(n, right=0.0, steps=(8, 8)) for n in range(6)]
    second = [made(n, right=float(n < 4), steps=(4, 6)) for n in range(1, 8)]
    found = compare(first, second)
    assert (found["right"].n, found["right"].higher, found["right"].lower) == (5, 3, 0)
    assert found["right"].p_value == 0.25
    assert (found["steps"].mean, found["steps"].lower) == (-3, 5)
    failed = [made(n, right=None, failure="no") for n in range(6)]
    assert compare(first, failed)["right"].mean == 0
    causal = [replace(made(n), written=None) for n in range(6)]
    assert "steps" not in compare(first, causal)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ([made(7)], "the two runs have no example in common"),
        ([replace(made(0), mark="other")], "example 0 is another one in the other run"),
    ],
)
def test_runs_of_different_tasks_are_not_compared(second: list[ExampleResult], message: str) -> None:
    with pytest.raises(InputError, match=message):
        compare([made(0)], second)
