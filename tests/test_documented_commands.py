"""docs/commands.md: each command line, right or wrong, prints what is written there, with its status."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dgemma.cli.main import main

PAGE = Path(__file__).parent.parent / "docs" / "commands.md"
STATUS = re.compile(r"\[status (\d+)\]\n$")


@dataclass(frozen=True)
class Typed:
    line: str
    prints: str  # with ... for what differs from machine to machine
    status: int


def read_page(text: str) -> Iterator[Typed]:
    for block in re.findall(r"```text\n(.*?)```", text, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, prints = part.partition("\n")
            status = STATUS.search(prints)
            yield Typed(line, STATUS.sub("", prints), int(status[1]) if status else 0)


def run(line: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """In this process: as far as a shell is needed, it runs what is before the pipe."""
    before, pipe, command = line.rpartition(" | ")
    given = subprocess.run(["sh", "-c", before], capture_output=True, check=True).stdout if pipe else b""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
    name, *argv = shlex.split(command)
    if name != "dgemma":
        subprocess.run(["sh", "-c", line], check=True)
        return "", 0
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            status = main(argv)
        except SystemExit as stop:
            status = int(stop.code or 0)
    return printed.buffer.getvalue().decode(), status  # type: ignore[attr-defined]


def test_each_command_prints_what_is_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order: some use what others made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("COLUMNS", "100")
    checker, wrong = doctest.OutputChecker(), list[str]()
    typed = list(read_page(PAGE.read_text()))
    for one in typed:
        printed, status = run(one.line, monkeypatch)
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        if status != one.status or not checker.check_output(one.prints, printed, flags):
            wrong.append(f"$ {one.line}\n{printed}[status {status}]\n--- documented:\n{one.prints}")
    assert not wrong, "\n".join(wrong)


def test_half_of_the_commands_are_mistakes() -> None:
    statuses = [one.status for one in read_page(PAGE.read_text())]
    assert len(statuses) >= 60
    assert sum(status == 0 for status in statuses) >= 30
    assert sum(status in (1, 2) for status in statuses) >= 30


def test_no_line_matches_everything() -> None:
    assert not [one.line for one in read_page(PAGE.read_text()) if one.prints.strip() == "..."]
