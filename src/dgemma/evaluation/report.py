"""What a run showed: scores with their intervals, steps, speed, and what failed. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dgemma.evaluation.intervals import Estimate, estimate
from dgemma.evaluation.result import Result


@dataclass(frozen=True, kw_only=True)
class Report:
    """The figures of a run, all computed from its results."""

    task: str
    model: str
    settings: Mapping[str, Any]
    results: tuple[Result, ...]
    stopped: str | None = None  # why it ended before the last example

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
    def groups(self) -> dict[str, tuple[Result, ...]]:
        """The results of each group, in the groups' alphabetical order."""
        names = sorted({group for result in self.results for group in result.groups})
        return {name: tuple(r for r in self.results if name in r.groups) for name in names}

    @property
    def steps_mean(self) -> float | None:
        """Denoise steps per canvas; None where nothing was diffused."""
        steps = self._steps
        return sum(steps) / len(steps) if steps else None

    @property
    def steps_p90(self) -> int | None:
        """Nine of ten canvases took at most so many steps."""
        steps = sorted(self._steps)
        return steps[math.ceil(0.9 * len(steps)) - 1] if steps else None

    @property
    def tokens_per_forward(self) -> float | None:
        forwards = sum(w.forwards for w in self._written)
        return sum(w.tokens for w in self._written) / forwards if forwards else None

    @property
    def seconds_per_example(self) -> float | None:
        """Mean seconds of a batch over its rows, of the examples that got an answer."""
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


def score_names(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(name for result in results for name in result.scores))


def scores_of(results: Sequence[Result], names: Sequence[str]) -> dict[str, Estimate]:
    """Each score over the results that have it. A failed example counts 0: leaving it out would flatter."""
    values = {
        name: [v for v in (score_value(result, name) for result in results) if v is not None]
        for name in names
    }
    return {name: estimate(found) for name, found in values.items() if found}


def score_value(result: Result, name: str) -> float | None:
    """A result's score, 0 if it failed; None where its task gave none of this name."""
    return 0.0 if result.failure is not None else result.scores.get(name)


def _json(scores: Mapping[str, Estimate]) -> dict[str, Any]:
    return {name: found.to_json() for name, found in scores.items()}
