"""--regex, --choice, --json-schema and --json-object of `generate`, `chat` and `fill`."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import dgemma
from cli.canvas_model import CanvasModel, load_once, run
from dgemma.cli.views import progress
from terminal import ScriptedModel

Capture = pytest.CaptureFixture[str]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TEXT = json.dumps(SCHEMA)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of every answer."""
    options: list[dict[str, Any]] = []

    def reply(_: list[dict[str, Any]], given: dict[str, Any]) -> tuple[str, str]:
        options.append({name: value for name, value in given.items() if name not in ("drafts", "thinking")})
        return "", "Yes."

    monkeypatch.setitem(dgemma.__dict__, "load", lambda *_, **__: ScriptedModel(reply))
    monkeypatch.setattr("dgemma.cli.options.check_checkpoint", lambda model: None)
    return options


@pytest.fixture
def unloadable(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded for nothing")

    monkeypatch.setitem(dgemma.__dict__, "load", load)


def typed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


@pytest.mark.parametrize(
    ("argv", "options"),
    [
        (["--regex", "[0-9]+ é"], {"regex": "[0-9]+ é"}),
        (["--choice", "yes", "--choice", "no, never"], {"choice": ["yes", "no, never"]}),
        (["--json-schema", f" {TEXT}"], {"json_schema": TEXT}),
        (["--json-schema", "true"], {"json_schema": "true"}),
        (["--json-object"], {"json_object": True}),
    ],
)
def test_a_form_reaches_every_answer(
    asked: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    argv: list[str],
    options: dict[str, Any],
) -> None:
    assert run(capsys, "generate", "m", "Hello", *argv) == (0, "Yes.\n", "")
    assert run(capsys, "generate", "m", "Hello", "--raw", "--json", *argv)[0] == 0
    typed(monkeypatch, b"One\n/seed 3\nTwo\n")
    assert run(capsys, "chat", "m", *argv)[0] == 0
    assert asked == [options, options, options, {**options, "seed": 3}]


def test_a_schema_comes_from_a_file_or_from_stdin(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    file = tmp_path / "my schema.json"
    file.write_text("\ufeff" + json.dumps(SCHEMA, indent=2), "utf-8")
    assert run(capsys, "generate", "m", "Hello", "--json-schema", str(file))[0] == 0
    typed(monkeypatch, TEXT.encode())
    assert run(capsys, "generate", "m", "Hello", "--json-schema", "-")[0] == 0
    assert asked == [{"json_schema": TEXT}] * 2


def test_a_gap_takes_them_too(monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path) -> None:
    model = CanvasModel()
    monkeypatch.setitem(dgemma.__dict__, "load", model.load)
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 1e9)
    file = tmp_path / "a.txt"
    file.write_text("a <FILL> b <FILL>")
    assert run(capsys, "fill", str(file), "--regex", "[a-z]+", "--seed", "3")[0] == 0
    assert [(call["regex"], call["seed"]) for call in model.calls] == [("[a-z]+", 3), ("[a-z]+", 4)]
    typed(monkeypatch, b"a <FILL>")
    status, _, err = run(capsys, "fill", "-", "--json-schema", "-")
    assert (status, err.count("\n")) == (2, 1)
    assert "stdin is read for something else" in err


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (["x", "--regex", "a("], 2, "--regex: the pattern"),
        (["x", "--regex", "a", "--choice", "b"], 2, "not allowed with"),
        (["x", "--json-schema", "{"], 2, "--json-schema is no JSON"),
        (["x", "--json-schema", '{"type": "strin"}'], 2, "did you mean 'string'?"),
        (["x", "--json-schema", "no/such.json"], 2, "no/such.json cannot be read: No such file"),
        (["x", "--json-schema", "."], 2, ". cannot be read"),
        (["x", "--json-schema", "a\0b"], 2, "cannot be read"),
        (["x", "--json-schema", __file__], 2, "test_format_options.py is no JSON"),
        (["--json-schema", "-"], 2, "stdin is read for something else; give a file"),
        (["x", "--choice", ""], 2, "choice has an option that is no text, or is empty"),
        (["x", "--regex"], 2, "expected one argument"),
    ],
)
def test_what_is_wrong_with_a_form_is_told_in_a_line_before_a_model_is_loaded(
    unloadable: None, capsys: Capture, argv: list[str], status: int, words: str
) -> None:
    found, out, err = run(capsys, "generate", "m", *argv)
    assert (found, out) == (status, "")
    assert words in err
    assert "Traceback" not in err
    assert err.startswith("dgemma generate: ")


def test_a_real_model_keeps_to_them(monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path) -> None:
    monkeypatch.setitem(dgemma.__dict__, "load", load_once)
    asked = ("generate", "bundled:text", "A number:", "--seed", "1", "--max-denoising-steps", "4")
    text = run(capsys, *asked, "--max-tokens", "16", "--regex", r"\d{3}(, \d{3})*")[1]
    assert re.fullmatch(r"\d{3}(, \d{3})*\n", text)
    text = run(capsys, *asked, "--max-tokens", "40", "--json-schema", TEXT)[1]
    assert type(json.loads(text)["n"]) is int
    assert run(capsys, *asked, "--choice", "one", "--choice", "two")[1] in ("one\n", "two\n")
    assert isinstance(json.loads(run(capsys, *asked, "--max-tokens", "16", "--json-object")[1]), dict)
    status, _, err = run(capsys, *asked, "--max-tokens", "2", "--regex", "[a-z]{30}")
    assert (status, err.count("\n")) == (2, 1)
    assert "the shortest text that satisfies the constraint has" in err
    file = tmp_path / "a.txt"
    file.write_text("On <FILL> 2024 we met.\n")
    text = run(capsys, "fill", str(file), "--regex", "[0-9]{1,2} (May|June)", "--seed", "1")[1]
    assert re.fullmatch("On [0-9]{1,2} (May|June) 2024 we met.\n", text)
