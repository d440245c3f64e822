"""A benchmark whose data is not in the repository exits with one line that names it and how to make it."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks.held_out_text import passages, texts
from text.bundled import TOKENIZER

REMEDY = "make the corpus with: apt install wordnet-base; python -m recipes.english.make_corpus"


@pytest.mark.parametrize("name", ["decide", "edit", "fill", "text_model"])
def test_missing_texts_are_named_before_the_work(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit, match=REMEDY):
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")


def test_a_passage_is_a_part_of_one_text(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    said = [f"Number {n} went to the market and bought some apples for dinner." for n in range(5)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in said))
    assert texts(file) == said
    for found in passages(TOKENIZER, [1, 2, 3], before=4, after=5, seed=1, corpus=file):
        assert len(found.before) == 4
        whole = TOKENIZER.decode((*found.before, *found.inside, *found.after))
        assert any(whole in text for text in said)
