"""--pins and --canvas of `generate` and `run`: the objects of Python and HTTP."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dgemma
from cli.canvas_model import run
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random

Capture = pytest.CaptureFixture[str]
PINS: Any = [{"at": 12, "text": "blue"}, {"at": 18, "any_of": ["a", 70]}]
CANVAS: Any = {"text": "The sea is salt.", "read_only": [[11, 15]]}


@pytest.fixture
def unloadable(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded for nothing")

    monkeypatch.setitem(dgemma.__dict__, "load", load)


def test_the_text_is_that_of_python(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "tiny"
    write_random(path, PRESETS["tiny"].config, dtype="F32", seed=1)
    (tmp_path / "canvas.json").write_text(json.dumps(CANVAS))
    options = ["--seed", "5", "--max-tokens", "20", "--max-denoising-steps", "2", "--exact", "--json"]
    given = ["--pins", json.dumps(PINS), "--canvas", str(tmp_path / "canvas.json")]
    answers = []
    for command in ("generate", "run"):
        status, out, _ = run(capsys, command, str(path), "Why", "--raw", *options, *given)
        assert status == 0
        answers.append(json.loads(out))
    wanted = dgemma.load(path, exact=True).generate(
        "Why", seed=5, max_tokens=20, max_denoising_steps=2, pins=PINS, canvas=CANVAS
    )
    assert wanted.pinned
    for answer in answers:
        assert answer["tokens"] == list(wanted.tokens)
        assert answer["pinned"] == list(wanted.pinned)


@pytest.mark.usefixtures("unloadable")
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--pins", "[{]"], "--pins is not JSON: "),
        (["--pins", "missing.json"], "--pins: missing.json cannot be read: No such file or directory."),
        (["--pins", "a\0b"], "cannot be read: "),
        (["--pins", '[{"at": 0}]'], "pins.0 has none of text, token_ids, any_of; give one of them."),
        (["--canvas", '{"text": "a", "read_only": [3]}'], "canvas.read_only.0 is 3; give [begin, end]"),
        (["--canvas", '"\\ud800'], "--canvas is not JSON: "),
        (["--canvas", "[" * 100_000], "--canvas is not JSON: "),
        (["--canvas", '"' + "a" * (4 << 20) + '"'], "--canvas has more than 4194304 characters; shorten it."),
    ],
    ids=lambda value: value[-1][:30] if isinstance(value, list) else "",
)
def test_a_wrong_one_is_refused_before_a_model_is_loaded(
    argv: list[str], message: str, capsys: Capture
) -> None:
    status, out, err = run(capsys, "generate", "bundled:text", "Hello", *argv)
    assert (status, out) == (2, "")
    assert message in err


@pytest.mark.usefixtures("unloadable")
def test_a_conversation_has_none(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    status, _, err = run(capsys, "run", "bundled:text", "--canvas", '"Hello"')
    assert status == 2
    assert "--pins and --canvas are of one answer; give the prompt too." in err
