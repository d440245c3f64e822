"""Stands for a loaded model in front of `fill`, `edit` and `decide`: a token is a character."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dgemma.cli.main import main
from dgemma.tasks.decide import Decision, Question
from dgemma.tasks.edit import Change, Edited
from dgemma.tasks.infill import Candidate, Filled


class CanvasModel:
    """What it was asked, and what it answers."""

    def __init__(self) -> None:
        self.loads: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        self.write: Callable[[int], str] = lambda number: f"<{number}>"  # the nth fill
        self.better = {"teh": "the"}  # words that edit changes
        self.think: Callable[[str, Question], tuple[float, ...]] = _evenly
        self.before_each: Callable[[], None] = lambda: None
        self.has_chat_template = True
        self.config = SimpleNamespace(canvas_len=16, max_positions=1024)
        self.tokenizer = SimpleNamespace(encode=list)

    def load(self, path: str, **options: Any) -> CanvasModel:
        del options["progress"]
        self.loads.append({"model": path, **options})
        return self

    def fill(self, prefix: str, suffix: str, **options: Any) -> Filled:
        self._asked(prefix=prefix, suffix=suffix, **options)
        texts = (self.write(len(self.calls)), "other")
        found = [Candidate(tokens=(1,), text=text, log_likelihood=-2.5, scored=1) for text in texts]
        return Filled(
            text=texts[0], log_likelihood=-2.5, candidates=tuple(found), forwards=5, prompt_tokens=6,
            cached_tokens=4, seed=options.get("seed", 99),
        )  # fmt: skip

    def edit(self, text: str, instruction: str, **options: Any) -> Edited:
        self._asked(text=text, instruction=instruction, **options)
        pattern = "|".join(rf"\b{word}\b" for word in self.better)
        changes = [
            Change(start=m.start(), stop=m.end(), old=m[0], new=self.better[m[0]], gain=3.0)
            for m in re.finditer(pattern, text)
        ]
        new = re.sub(pattern, lambda m: self.better[m[0]], text)
        return Edited(
            text=new, changes=tuple(changes), num_windows=2, forwards=5, prompt_tokens=6, cached_tokens=4,
            seed=options.get("seed", 99),
        )  # fmt: skip

    def decide(self, text: str, questions: Sequence[Question], **options: Any) -> tuple[Decision, ...]:
        calibration = options.get("calibration")
        self._asked(input=text, questions=list(questions), **options)
        found = [self.think(text, question) for question in questions]
        found = found if calibration is None else [calibration.apply(one) for one in found]
        return tuple(
            Decision(question=question, probabilities=one)
            for question, one in zip(questions, found, strict=True)
        )

    def _asked(self, **call: Any) -> None:
        self.before_each()
        self.calls.append(call)


def _evenly(text: str, question: Question) -> tuple[float, ...]:
    return (1 / len(question.choices),) * len(question.choices)


@cache
def _loaded(path: str) -> Any:
    from dgemma.loading import load  # brings torch, which most tests do without

    return load(path)


def load_once(path: str, **options: Any) -> Any:
    """`dgemma.load` of the real model, once for all tests."""
    assert options["dtype"] == "auto"
    return _loaded(path)


def documented(found: Any) -> bool:
    """Are all keys of a JSON object named in the documentation, also those of objects in its lists?"""
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    inner = [one for value in found.values() if isinstance(value, list) for one in value[:1]]
    inner += [value for value in found.values() if isinstance(value, dict)]
    return all(f"`{key}`" in page for key in found) and all(map(documented, inner))


def run(capsys: pytest.CaptureFixture[Any], *argv: str) -> tuple[int, Any, Any]:
    try:
        status = main(argv)
    except SystemExit as stop:
        status = int(stop.code or 0)
    out, err = capsys.readouterr()
    return status, out, err
