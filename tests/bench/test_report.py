"""The figure of a benchmark: what cannot be written is told in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dgemma.bench.report import write_figure
from dgemma.errors import InputError

FOUND: dict[str, Any] = {
    "plan": {"length_steps": (16,), "steps": 8},
    "lengths": [{"tokens": 16, "causal_s": 2.0, "diffuse_16_s": 1.0}],
    "throughput": [{"answers": 1, "diffuse_tokens_per_second": 3.0, "causal_tokens_per_second": 2.0}],
}


@pytest.mark.parametrize("name", ["a.svg", "a.png", "a.SVG"])
def test_the_name_says_how_a_figure_is_written(name: str, tmp_path: Path) -> None:
    write_figure(FOUND, tmp_path / name)
    assert (tmp_path / name).stat().st_size > 1000


def test_a_figure_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.svg").mkdir()
    with pytest.raises(InputError, match=r"a\.svg cannot be written: Is a directory"):
        write_figure(FOUND, tmp_path / "a.svg")
