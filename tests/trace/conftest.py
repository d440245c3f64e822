from __future__ import annotations

from pathlib import Path

import pytest

import dgemma
from dgemma import LanguageModel
from server.real_server import write_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("traced") / "tiny")


@pytest.fixture(scope="session")
def lm(model_path: Path) -> LanguageModel:
    return dgemma.load(model_path)
