"""`dgemma list` and `dgemma rm` as a user types them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from checkpoint.test_hub_cache import OURS, put
from dgemma.checkpoint.bundled import bundled_path
from dgemma.cli.list import _ago
from dgemma.cli.main import main
from fake_hub import use_hub

DAY = 86_400


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "home", offline=True)
    return tmp_path / "home" / "hub"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(argv)
    out, err = capsys.readouterr()
    return status, out, err


def test_an_empty_cache_says_so_and_how_to_fill_it(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "list")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == [
        "name", "bundled:forms", "bundled:sudoku", "bundled:text",
    ]  # fmt: skip
    assert err == (
        f"no model in the hub cache {cache}; for example: dgemma pull google/diffusiongemma-26B-A4B-it\n"
    )


def test_models_have_a_size_a_day_and_a_note(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = put(cache, "someone/old", {**OURS, "model.safetensors": bytes(2_000_000)})
    os.utime((snapshot / "model.safetensors").resolve(), (time.time() - 3.5 * DAY, 1000))
    put(cache, "someone/half", {"config.json": OURS["config.json"]}, ref=None)
    put(cache, "someone/tagged", OURS, ref="v2")
    status, out, err = run(capsys, "list")
    assert (status, err) == (0, "")
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in out.splitlines()}
    assert rows["someone/old"].split("   ") == ["2.0 MB", "3 days ago"]
    assert rows["someone/half"].endswith("incomplete; dgemma pull someone/half fetches the rest")
    assert rows["someone/tagged"].endswith("today        revision v2")
    assert len({line.index(" B") if " B" in line else 0 for line in out.splitlines()}) <= 2


def test_json_has_the_documented_keys(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = put(cache, "someone/ours", OURS)
    os.utime((snapshot / "model.safetensors").resolve(), (0, 0))
    put(cache, "someone/half", {"config.json": OURS["config.json"]}, ref=None)
    status, out, err = run(capsys, "list", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["cache"] == str(cache)
    forms, sudoku, text, half, ours = found["models"]
    size = sum(file.stat().st_size for file in bundled_path("sudoku").rglob("*") if file.is_file())
    assert sudoku == {
        "name": "bundled:sudoku", "path": str(bundled_path("sudoku")), "bytes": size, "last_used": None,
        "complete": True, "revision": None,
    }  # fmt: skip
    assert (forms["name"], text["name"]) == ("bundled:forms", "bundled:text")
    assert half["complete"] is False
    assert ours == {
        "name": "someone/ours", "path": str(snapshot), "bytes": sum(map(len, OURS.values())),
        "last_used": "1970-01-01T00:00:00+00:00", "complete": True, "revision": "main",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("days", "text"),
    [
        (-1, "today"), (0.9, "today"), (1, "1 day ago"), (29, "29 days ago"), (30, "1 month ago"),
        (364, "12 months ago"), (365, "1 year ago"), (800, "2 years ago"),
    ],
)  # fmt: skip
def test_days_are_told_in_words(days: float, text: str) -> None:
    assert _ago(days * DAY) == text


def test_neither_command_imports_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from dgemma.cli.main import main\n"
        "main(['list']); main(['rm', 'a/b']); sys.exit('torch' in sys.modules)"
    )
    env = {**os.environ, "HF_HOME": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0


def test_without_a_terminal_nothing_is_deleted_unless_yes_is_given(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    repo = put(cache, "someone/ours", OURS).parents[1]
    status, out, err = run(capsys, "rm", "someone/ours")
    assert (status, out) == (2, "")
    assert err.startswith("dgemma rm: someone/ours (")
    assert err.endswith("1 revision) was not deleted: without a terminal nobody can be asked. Give --yes.\n")
    assert repo.exists()
    status, out, err = run(capsys, "rm", "--yes", "someone/ours")
    assert (status, err) == (0, "")
    assert out.startswith("deleted someone/ours: ")
    assert out.endswith(" kB freed\n")
    assert not repo.exists()


class Keyboard(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("typed", "is_deleted"), [("y\n", True), ("YES\n", True), ("\n", False), ("n\n", False), ("", False)]
)
def test_on_a_terminal_it_asks(
    cache: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    typed: str,
    is_deleted: bool,
) -> None:
    monkeypatch.setattr("sys.stdin", Keyboard(typed))
    put(cache, "someone/ours", OURS)
    repo = put(cache, "someone/ours", OURS, commit="b" * 40, ref=None).parents[1]
    status, out, err = run(capsys, "rm", "someone/ours")
    assert (status, repo.exists()) == ((0, False) if is_deleted else (1, True))
    assert err.startswith("delete someone/ours (")
    assert f"2 revisions) from {cache}? [y/N] " in err
    assert ("nothing was deleted" in err) == (not is_deleted)
    assert ("freed" in out) == is_deleted
