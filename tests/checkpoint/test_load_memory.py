"""Loading needs the model's size and little else, measured from outside the process's own opinion."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dgemma.checkpoint.parameter_count import count_parameters

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.load_memory import GEOMETRY, make_checkpoint, measure


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_four_gigabyte_checkpoint_peaks_at_its_size_plus_little(tmp_path: Path) -> None:
    assert count_parameters(GEOMETRY).bytes["bf16"] > 4_000_000_000
    make_checkpoint(tmp_path / "model", sparse=True)
    found = measure(tmp_path / "model", "bfloat16")
    assert found["within_limit"], found
    # The file is read, not mapped: file-backed pages are libraries only.
    assert found["peak_file_backed"] < 200_000_000, found
    assert found["peak_anonymous"] > 4_000_000_000, found
