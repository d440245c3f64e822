"""A small task and a tiny model to evaluate it with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import dgemma
from dgemma import Answer, LanguageModel
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.evaluation.report import EvaluationReport
from dgemma.evaluation.results import ExampleResult

OPTIONS = {"max_tokens": 40, "max_denoising_steps": 2}
SEED = 5


class Sums:
    """Ten prompts of different length; the answer's letters are the score."""

    name = "sums"

    def examples(self) -> Any:
        return [{"number": number, "band": "low" if number < 4 else "high"} for number in range(10)]

    def prompt(self, example: dict[str, Any]) -> Any:
        return "What is " + "1 + " * example["number"] + "1?"

    def score(self, example: dict[str, Any], answer: Answer) -> Mapping[str, float]:
        return {"even": len(answer.text) % 2 == 0, "length": len(answer.text)}

    def groups(self, example: dict[str, Any]) -> list[str]:
        return [example["band"]]


def exact_tiny(path: Path) -> LanguageModel:
    """A random model whose answers do not depend on their company."""
    write_random(path, PRESETS["tiny"].config, dtype="F32", seed=1)
    return dgemma.load(path, exact=True)


def timeless(report: EvaluationReport) -> list[ExampleResult]:
    """Results without their seconds, the only thing that may differ."""
    return [
        replace(result, written=result.written and replace(result.written, seconds=0.0))
        for result in report.results
    ]
