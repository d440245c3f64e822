"""Tasks of the package `reasoning-gym`: procedural puzzles with verifiers. Imported when used."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from dgemma.errors import InputError, suggestion
from dgemma.events import Answer

# Fixed, so that every run has the same questions; training data with another seed excludes them.
SEED = 260_704
SIZE = 500


class ReasoningTask:
    """One dataset of reasoning-gym, as in `ReasoningTask("chain_sum", max_terms=3)`.

    The question is the prompt, unchanged. The text between the last <answer> and </answer> is scored, or all
    of the text if there is none. score: the dataset's score, from 0 to 1. solved: 1 if the score is 1.
    """

    def __init__(self, dataset: str, *, size: int = SIZE, seed: int = SEED, **settings: Any) -> None:
        gym, factory, self._utils = (
            _import(name) for name in ("reasoning_gym", "reasoning_gym.factory", "reasoning_gym.utils")
        )
        known = sorted(factory.DATASETS)
        if dataset not in known:
            raise InputError(
                f"reasoning-gym has no dataset {dataset!r}{suggestion(dataset, known)} It has: "
                f"{', '.join(known)}.",
                field="dataset",
            )
        try:
            self._data = gym.create_dataset(dataset, size=size, seed=seed, **settings)
        except (AssertionError, TypeError, ValueError) as error:
            raise InputError(f"reasoning-gym refuses these settings of {dataset}: {error}") from None
        self.name = f"reasoning-gym:{dataset}"

    def examples(self) -> Iterable[dict[str, Any]]:
        return self._data  # type: ignore[no-any-return]

    def prompt(self, example: dict[str, Any]) -> str:
        return str(example["question"])

    def score(self, example: dict[str, Any], answer: Answer) -> dict[str, float]:
        tagged = self._utils.extract_answer(answer.text)
        score = float(self._data.score_answer(answer.text.strip() if tagged is None else tagged, example))
        return {"solved": float(score >= 1), "score": score}


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(
            f"reasoning-gym cannot be imported ({error}); `pip install reasoning-gym` installs it."
        ) from None
