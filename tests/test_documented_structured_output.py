"""The program and the commands of docs/structured-output.md run as documented."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

import dgemma
from cli.canvas_model import load_once, run

PAGE = (Path(__file__).parents[1] / "docs" / "structured-output.md").read_text()
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(sh|python)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dgemma.__dict__, "load", lambda path, **_: load_once(path, dtype="auto"))


def test_the_program_prints_texts_of_their_response_formats(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = (text for language, text in BLOCKS if language == "python")
    exec(compile(program, "structured-output.md", "exec"), {})  # noqa: S102
    found, choice, day = capsys.readouterr().out.splitlines()
    value = ast.literal_eval(found)
    assert value["where"] in ("at home", "the market", None)
    assert re.fullmatch("[A-Z][a-z]+day", value["day"])
    assert choice in ("yes", "no")
    assert re.fullmatch("[0-9]{1,2} (May|June)", day)


def test_the_commands_print_texts_of_their_response_formats(capsys: pytest.CaptureFixture[str]) -> None:
    (commands,) = (text for language, text in BLOCKS if language == "sh")
    version, option = (run(capsys, *shlex.split(line)[1:])[1] for line in commands.splitlines())
    assert re.fullmatch(r"[0-9]+\.[0-9]+ of (January|June) 20[0-9]{2}\n", version)
    assert option in ('"--force"\n', '"--quiet"\n')
