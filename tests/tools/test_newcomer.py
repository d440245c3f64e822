"""The script that plays a newcomer: it sees what is wrong, and the cheap mistakes end as it expects."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from test_documented_commands import run
from tools.newcomer import PAGE, Done, Reader, made, make_mistakes, message, page_of, problems, rows_of
from tools.newcomer_mistakes import MISTAKES, Mistake

# No model is loaded, nothing is prepared, no shell is needed.
CHEAP = [
    mistake
    for mistake in MISTAKES
    if mistake.status and not mistake.extra and mistake.what in (
        "a misspelt command", "a misspelt option", "no model", "a prompt in place of the model",
        "an empty prompt", "a seed that is no number", "no token at all", "a bad regular expression",
        "a bad JSON schema", "a GGUF file that is not there", "a misspelt bundled model",
        "an image that is not there", "no puzzle", "a key on the command line",
        "a server that does not run", "a wrong path",
    )
]  # fmt: skip
HELLO = Mistake("for a test", "echo hello; echo 'dgemma x: no such file' >&2; exit 2", 2, "no such")


def here() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def test_there_are_many_mistakes_each_with_a_name() -> None:
    assert len({mistake.what for mistake in MISTAKES}) == len(MISTAKES) >= 50
    assert sum(mistake.status != 0 for mistake in MISTAKES) >= 40


@pytest.mark.parametrize("mistake", CHEAP, ids=lambda mistake: mistake.what)
def test_a_cheap_mistake_ends_as_the_script_expects(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert shlex.split(mistake.command)[0] == "dgemma"
    printed, status = run(mistake.command, monkeypatch)
    assert problems(mistake, Done(status, "", printed, 0.1)) == []


def test_all_cheap_mistakes_are_there() -> None:
    assert len(CHEAP) == 16


def test_a_mistake_is_made_in_a_shell_and_judged(tmp_path: Path) -> None:
    done = made(HELLO, tmp_path, here())
    assert (done.status, done.out, message(done)) == (2, "hello\n", "dgemma x: no such file")
    assert problems(HELLO, done) == []


@pytest.mark.parametrize(
    ("done", "found"),
    [
        (Done(1, "", "no such file", 0), ["status 1 in place of 2"]),
        (Done(2, "", "else", 0), ["it does not say 'no such'"]),
        (Done(2, "", "no such\nTraceback (most recent call last):", 0), ["a traceback"]),
        (Done(2, "", "no such\n" * 9, 0), ["too many lines"]),
    ],
)
def test_a_bad_message_is_seen(done: Done, found: list[str]) -> None:
    assert problems(HELLO, done) == found


def test_ctrl_c_is_typed_when_something_was_printed(tmp_path: Path) -> None:
    waits = f"{shlex.quote(sys.executable)} -c 'import time; print(\"ready\", flush=True); time.sleep(600)'"
    done = made(Mistake("waits", waits, 1, "ready", interrupt_at="ready"), tmp_path, here())
    assert done.status in (1, -2, 130)
    assert "KeyboardInterrupt" in done.err


def test_a_page_is_followed_block_by_block_in_one_session(tmp_path: Path) -> None:
    page = (
        "```sh\necho one > file; echo 'fill: 1 of 2 gaps'\n```\n\n```text\n```\n\n"
        "```python\nx = open('file').read().strip()\n```\n\n"
        "```python\nprint(x, 'two')\n```\n\n```text\none ...\n```\n\n"
        "<!-- not run: for a test -->\n```sh\nfalse\n```\n"
    )
    assert Reader(tmp_path, here()).follow(page) == (3, [])
    count, wrong = Reader(tmp_path, here()).follow(page.replace("one ...", "three"))
    assert count == 3
    assert "--- printed\none two\n--- documented\nthree" in wrong[0]
    _, wrong = Reader(tmp_path, here()).follow("```sh\nexit 3\n```\n\n```sh\ntouch late\n```\n")
    assert "exit status 3" in wrong[0]
    assert not (tmp_path / "late").exists()
    _, wrong = Reader(tmp_path, here()).follow("```python\nraise SystemExit(1)\n```\n")
    assert "Python ended" in wrong[0]


def test_the_report_names_every_mistake_and_hides_the_directory(tmp_path: Path) -> None:
    done = Done(2, "", f"dgemma: a | `b` {tmp_path}/x\nTry: dgemma --help\n", 1.4)
    rows = rows_of([(HELLO, done)], str(tmp_path))
    found = {"date": "today", "times": {"a Sudoku": 12.3}, "pages": {"README.md": 7}, "mistakes": rows}
    text = page_of(found)
    assert "| a Sudoku | 12 |" in text
    assert "| README.md | 7 |" in text
    row = next(line for line in text.splitlines() if line.startswith("| for a test"))
    assert row.endswith("| `dgemma: a \\| 'b' .../x` | 2 | 1 |")


def test_the_report_in_the_docs_has_every_mistake() -> None:
    rows = [line.split(" | ")[0].removeprefix("| ") for line in PAGE.read_text().splitlines()]
    assert [mistake.what for mistake in MISTAKES if mistake.what not in rows] == []


def test_what_is_wrong_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tools.newcomer.PREPARED", "true")
    away = Mistake("away", "true", 0, "", extra=("x",))
    monkeypatch.setattr("tools.newcomer.MISTAKES", (HELLO, Mistake("bad", "exit 4", 2, "words"), away))
    found = make_mistakes(tmp_path, here(), take_away=False)
    assert [done.status for _, done in found] == [2, 4]
    out = capsys.readouterr().out
    assert "ok  [2]" in out
    assert "status 4 in place of 2; it does not say 'words'" in out
