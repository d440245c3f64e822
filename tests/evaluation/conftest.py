"""One tiny model for all evaluation tests, and an uninterrupted run of it."""

from __future__ import annotations

import pytest

from dgemma import LanguageModel
from dgemma.evaluation.report import EvaluationReport
from dgemma.evaluation.runner import evaluate
from sums_task import OPTIONS, SEED, Sums, exact_tiny


@pytest.fixture(scope="session")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return exact_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def whole(lm: LanguageModel) -> EvaluationReport:
    return evaluate(lm, Sums(), options=OPTIONS, seed=SEED, batch=4)
