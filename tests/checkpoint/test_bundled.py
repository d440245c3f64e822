"""The models that come with the package are found by name, and are what their cards say."""

from __future__ import annotations

from pathlib import Path

import pytest

import dgemma
from dgemma.checkpoint.bundled import bundled_names, bundled_path
from dgemma.errors import CheckpointError


def test_bundled_models_load_by_name_and_have_cards() -> None:
    assert "sudoku" in bundled_names()
    for name in bundled_names():
        lm = dgemma.load(f"bundled:{name}")
        assert lm.has_tokenizer
        assert "## What it is not" in (bundled_path(name) / "README.md").read_text()


def test_the_sudoku_model_is_small() -> None:
    lm = dgemma.load("bundled:sudoku")
    assert sum(parameter.numel() for parameter in lm.transformer.parameters()) <= 8_000_000


def test_all_bundled_files_together_leave_the_wheel_small() -> None:
    package = Path(dgemma.__file__).parent
    total = sum(
        file.stat().st_size for file in package.rglob("*") if file.is_file() and file.suffix != ".pyc"
    )
    assert total < 60e6


def test_an_unknown_bundled_model_is_refused_with_a_guess() -> None:
    with pytest.raises(CheckpointError, match="did you mean 'sudoku'"):
        dgemma.load("bundled:sudoko")
