"""`dgemma solve` as a user types it: any spelling of a puzzle, one line in a pipe, honest when it fails."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path

import pytest

from dgemma.cli import solve
from dgemma.cli.main import main
from dgemma.events import Draft
from dgemma.sudoku.grid import Grid
from dgemma.sudoku.puzzles import held_out
from dgemma.sudoku.tokens import solves, to_text

PUZZLE = held_out("easy")[0]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(["solve", *argv])
    out, err = capsys.readouterr()
    return status, out, err


def test_a_puzzle_given_as_an_argument_is_answered_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, PUZZLE.clues.cells)
    assert (status, err) == (0, "")
    assert out == PUZZLE.solution.cells + "\n"


def test_a_file_and_stdin_hold_puzzles_in_any_spelling(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "puzzle.txt").write_text(PUZZLE.clues.board())
    assert run(capsys, str(tmp_path / "puzzle.txt"))[1] == PUZZLE.solution.cells + "\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(PUZZLE.clues.cells.replace(".", "0") + "\n"))
    assert run(capsys, "-")[1] == PUZZLE.solution.cells + "\n"


def test_json_tells_what_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, PUZZLE.clues.cells, "--json", "--seed", "3")
    told = json.loads(out)
    assert status == 0
    assert told["answer"] == PUZZLE.solution.cells
    assert told["solved"] is True
    assert told["steps"] > 0
    assert told["seed"] == 3 + told["tries"] - 1


def test_what_breaks_the_rules_is_asked_again_and_said_to_be_unsolved(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One step is too few for an empty board."""
    empty = "." * 81
    status, out, err = run(capsys, empty, "--max-denoising-steps", "1", "--tries", "2", "--json")
    told = json.loads(out)
    assert told["solved"] == solves(told["answer"], Grid(empty))
    assert status == (0 if told["solved"] else 1)
    assert told["solved"] or (told["tries"] == 2 and "none of 2 tries" in err)
    assert told["solved"] or re.search(r"\d+ of 81 empty cells were sure", err)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["53..7"], "neither 81 cells nor a file"),
        ([PUZZLE.clues.cells + "1"], "82 cells"),
        (["5" + "." * 7 + "5" + "." * 72], "row 1 column 1, row 1 column 9"),
        ([PUZZLE.clues.cells, "--tries", "0"], "--tries is 0"),
        ([PUZZLE.clues.cells, "--pace", "-1"], "--pace is -1"),
        ([PUZZLE.clues.cells, "--model", "no/model", "--seed", str(1 << 64)], "seed is 1844"),
        ([PUZZLE.clues.cells, "--model", "no/model", "--max-denoising-steps", "0"], "steps is 0"),
        ([PUZZLE.clues.cells, "--model", "no-such-model"], "neither a directory here nor a hub name"),
    ],
)
def test_misuse_is_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    status, out, err = run(capsys, *argv)
    assert (status, out) == (1 if "model" in said or "hub" in said else 2, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_without_a_puzzle_a_terminal_gets_one_that_no_model_has_seen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    found = []
    for _ in range(2):
        status, out, _ = run(capsys, "--json", "--band", "easy")
        told = json.loads(out)
        assert status == (0 if told["solved"] else 1)
        found.append(told["puzzle"])
    assert {*found} <= {puzzle.clues.cells for puzzle in held_out("easy")}
    assert len({*found}) == 2


def test_without_a_puzzle_a_pipe_is_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(PUZZLE.clues.cells))
    assert run(capsys)[1] == PUZZLE.solution.cells + "\n"


def test_a_pipe_that_is_no_text_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"53\xff"), encoding="utf-8"))
    status, _, err = run(capsys)
    assert (status, err.count("\n")) == (2, 1)
    assert "character 3 of the puzzle is '\\udcff'" in err


def test_the_board_marks_clues_doubts_and_contradictions() -> None:
    cells = PUZZLE.solution.cells
    empty = PUZZLE.clues.cells.index(".")
    wrong = cells[:empty] + cells[(empty + 1) % 9] + cells[empty + 1 :] if empty < 8 else cells
    drawn = solve.board(PUZZLE.clues, wrong, ["green"] * 81, "step 1")
    assert drawn.plain.splitlines()[:1] == [Grid(wrong).board().splitlines()[0]]
    assert drawn.plain.splitlines()[3] == Grid(wrong).board().splitlines()[3]
    assert drawn.plain.endswith("step 1")
    styles = {str(span.style) for span in drawn.spans}
    assert {"bold", "green", "bold red"} <= styles


def test_a_terminal_sees_every_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    shown: list[Draft] = []
    original = solve.LiveBoard.show
    monkeypatch.setattr(
        solve.LiveBoard, "show", lambda self, draft: (shown.append(draft), original(self, draft))[1]
    )
    assert main(["solve", PUZZLE.clues.cells, "--pace", "0"]) == 0
    out = capsys.readouterr().out
    assert shown
    assert out.index(f"{PUZZLE.clues.num_clues} clues") < out.index("step 1")
    assert shown[-1].text == to_text(PUZZLE.solution)
    assert "solved in" in out
    assert solve.MODEL == "bundled:sudoku"


def test_each_step_is_shown_for_as_long_as_the_pace_says(monkeypatch: pytest.MonkeyPatch) -> None:
    now, drawn = [100.0], list[tuple[float, str]]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(
        solve, "board", lambda puzzle, cells, styles, below: drawn.append((now[0], below)) or below
    )
    draft = Draft(row=0, canvas=0, step=1, tokens=(), entropy=(), text=to_text(PUZZLE.solution))
    last = solve.Try(PUZZLE.solution.cells, 0, 2, True, (False,) * 81)
    with solve.LiveBoard(PUZZLE.clues, 0.5) as view:
        view.show(draft)
        now[0] += 2.0  # a step that takes longer than the pace
        view.show(draft)
        view.finish(last, "solved")
    assert [at for at, _ in drawn] == [100.0, 100.5, 102.5, 103.0]
    assert view.waited_s == 1.0


def test_a_failure_shows_what_was_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[list[str], str]] = []
    monkeypatch.setattr(
        solve, "board", lambda puzzle, cells, styles, below: drawn.append((styles, below)) or below
    )
    sure = (True, *(False,) * 80)
    with solve.LiveBoard(PUZZLE.clues, 0.0) as view:
        view.finish(solve.Try(PUZZLE.solution.cells, 0, 2, False, sure), "not solved")
    styles, below = drawn[-1]
    assert (styles[0], set(styles[1:])) == ("", {"dim"})
    assert "dim was not sure" in below
