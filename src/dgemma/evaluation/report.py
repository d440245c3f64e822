"""The report of an evaluation: scores with confidence intervals, steps, speed and failures. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from dgemma.errors import InputError
from dgemma.evaluation.intervals import Difference, Estimate, estimate, paired_difference
from dgemma.evaluation.results import ExampleResult


@dataclass(frozen=True, kw_only=True)
class EvaluationReport:
    """The figures of a run, all computed from its results."""

    task: str
    model: str
    settings: Mapping[str, Any]
    results: tuple[ExampleResult, ...]
    stopped: str | None = None  # why the run ended before the last example

    @property
    def n(self) -> int:
        return len(self.results)

    @property
    def failed(self) -> int:
        return sum(result.failure is not None for result in self.results)

    @property
    def scores(self) -> dict[str, Estimate]:
        return scores_of(self.results, score_names(self.results))

    @property
    def score_means(self) -> dict[str, float]:
        """The mean of each score, without an interval."""
        values = _score_values(self.results, score_names(self.results))
        return {name: fmean(found) for name, found in values.items()}

    @property
    def groups(self) -> dict[str, tuple[ExampleResult, ...]]:
        """The results of each group, in the groups' alphabetical order."""
        names = sorted({group for result in self.results for group in result.groups})
        return {name: tuple(r for r in self.results if name in r.groups) for name in names}

    @property
    def steps_mean(self) -> float | None:
        """Mean denoise steps per canvas; None if no canvas was denoised."""
        steps = self._steps
        return sum(steps) / len(steps) if steps else None

    @property
    def steps_p90(self) -> int | None:
        """The 90th percentile of denoise steps per canvas."""
        steps = sorted(self._steps)
        return steps[math.ceil(0.9 * len(steps)) - 1] if steps else None

    @property
    def tokens_per_forward(self) -> float | None:
        forwards = sum(w.forwards for w in self._written)
        return sum(w.tokens for w in self._written) / forwards if forwards else None

    @property
    def seconds_per_example(self) -> float | None:
        """Mean seconds per answered example: the time of a batch divided by its rows."""
        return sum(w.seconds for w in self._written) / len(self._written) if self._written else None

    @property
    def tokens_per_second(self) -> float | None:
        seconds = sum(w.seconds for w in self._written)
        return sum(w.tokens for w in self._written) / seconds if seconds else None

    @property
    def finish_reasons(self) -> dict[str, int]:
        return dict(Counter(w.finish_reason for w in self._written).most_common())

    def to_json(self) -> dict[str, Any]:
        """A dictionary for `json.dumps`."""
        names = score_names(self.results)
        return {
            "task": self.task,
            "model": self.model,
            "n": self.n,
            "failed": self.failed,
            "stopped": self.stopped,
            "scores": _json(self.scores),
            "steps_mean": self.steps_mean,
            "steps_p90": self.steps_p90,
            "tokens_per_forward": self.tokens_per_forward,
            "seconds_per_example": self.seconds_per_example,
            "tokens_per_second": self.tokens_per_second,
            "finish_reasons": self.finish_reasons,
            "groups": {
                name: {
                    "n": len(results),
                    "failed": sum(result.failure is not None for result in results),
                    "scores": _json(scores_of(results, names)),
                }
                for name, results in self.groups.items()
            },
            "failures": [
                {"number": result.number, "reason": result.failure}
                for result in self.results
                if result.failure is not None
            ],
            "settings": dict(self.settings),
        }

    @property
    def _written(self) -> list[Any]:
        return [result.written for result in self.results if result.written is not None]

    @property
    def _steps(self) -> list[int]:
        return [count for written in self._written for count in written.steps]


def score_names(results: Sequence[ExampleResult]) -> list[str]:
    return list(dict.fromkeys(name for result in results for name in result.scores))


def scores_of(results: Sequence[ExampleResult], names: Sequence[str]) -> dict[str, Estimate]:
    """Each score over its results. A failed example counts 0; omitting it would raise the mean."""
    return {name: estimate(found) for name, found in _score_values(results, names).items()}


def _score_values(results: Sequence[ExampleResult], names: Sequence[str]) -> dict[str, list[float]]:
    values = {
        name: [v for v in (score_value(result, name) for result in results) if v is not None]
        for name in names
    }
    return {name: found for name, found in values.items() if found}


def score_value(result: ExampleResult, name: str) -> float | None:
    """The score of a result, 0 if it failed; None if it has no score of this name."""
    return 0.0 if result.failure is not None else result.scores.get(name)


def _json(scores: Mapping[str, Estimate]) -> dict[str, Any]:
    return {name: found.to_json() for name, found in scores.items()}


def compare(first: Iterable[ExampleResult], second: Iterable[ExampleResult]) -> dict[str, Difference]:
    """Second minus first on the examples of both runs: each score, and `steps`, the mean per canvas."""
    pairs = _pairs(first, second)
    differences: dict[str, Difference] = {}
    for name in score_names([result for pair in pairs for result in pair]):
        values = [(score_value(a, name), score_value(b, name)) for a, b in pairs]
        both = [(a, b) for a, b in values if a is not None and b is not None]
        if both:
            differences[name] = paired_difference([a for a, _ in both], [b for _, b in both])
    steps = [(a.written.steps, b.written.steps) for a, b in pairs if a.written and b.written]
    means = [(sum(a) / len(a), sum(b) / len(b)) for a, b in steps if a and b]
    if means:
        differences["steps"] = paired_difference([a for a, _ in means], [b for _, b in means])
    return differences


def _pairs(
    first: Iterable[ExampleResult], second: Iterable[ExampleResult]
) -> list[tuple[ExampleResult, ExampleResult]]:
    known = {result.number: result for result in first}
    pairs = [(known[result.number], result) for result in second if result.number in known]
    if not pairs:
        raise InputError("the two runs have no example in common; run the same task in both.")
    for a, b in pairs:
        if a.mark != b.mark:
            raise InputError(
                f"example {a.number} is another one in the other run; only runs of the same task can be "
                "compared."
            )
    return pairs
