"""A benchmark whose data is not in the repository exits with one line that names it and how to make it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from benchmarks.held_out_text import SOURCES, documents


def test_an_empty_or_partial_corpus_is_named_with_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"has no documents; make the corpus with: apt install"):
        documents(tmp_path)
    (tmp_path / "python-docs").mkdir()
    (tmp_path / "python-docs" / "a.txt").write_text("text")
    assert documents(tmp_path) == {"python-docs": ["text"]}
    with pytest.raises(SystemExit, match="has no cmake-docs and no kernel-docs; make the corpus with"):
        documents(tmp_path, sources=SOURCES)


@pytest.mark.parametrize("name", ["decide", "text_model"])
def test_it_is_named_before_the_work(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit, match="make the corpus with"):
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
