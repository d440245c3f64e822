"""`--trace` records, and `dgemma trace` shows, draws, compares and replays."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import dgemma
from dgemma.cli.main import main
from dgemma.errors import InputError
from dgemma.sudoku.puzzles import held_out
from dgemma.trace.trace import Trace

PUZZLE = held_out("easy")[0].clues.cells


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("traces") / "solved.trace"
    assert main(["solve", PUZZLE, "--trace", str(path)]) == 0
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(["trace", *argv])
    out, err = capsys.readouterr()
    return status, out, err


def test_recording_says_what_it_wrote_and_how_to_watch_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "a trace"
    assert main(["solve", PUZZLE, "--trace", str(path)]) == 0
    out, err = capsys.readouterr()
    assert len(out) == 82
    assert "steps recorded" in err
    assert f"dgemma trace show '{path}'" in err
    assert Trace.load(path).about["command"] == "solve"


@pytest.mark.parametrize(
    "argv",
    [
        ["generate", "bundled:text", "Hello", "--max-tokens", "8", "--seed", "1"],
        ["extract", "Call Ann tomorrow at 5pm", "--today", "2026-11-18"],
        ["decide", "It rains.", "--ask", "Is it wet?"],
    ],
)
def test_every_command_that_generates_records(
    argv: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(tmp_path / "x.trace")
    status = main([*argv, "--trace", path])
    assert status == 0, capsys.readouterr().err
    capsys.readouterr()
    status, out, _ = run(capsys, "replay", path)
    assert (status, "the same, token for token" in out) == (0, True)


def test_a_fill_and_an_edit_record_all_their_requests(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("The sea is <FILL> because of the salt.")
    path = str(tmp_path / "x.trace")
    assert main(["fill", str(tmp_path / "a.txt"), "--seed", "1", "--lengths", "1-2", "--trace", path]) == 0
    assert len(Trace.load(path).requests) > 2
    capsys.readouterr()
    assert run(capsys, "replay", path)[0] == 0
    (tmp_path / "b.txt").write_text("The see is salty.")
    assert main(["edit", str(tmp_path / "b.txt"), "", "--seed", "1", "--trace", path]) == 0
    capsys.readouterr()
    assert run(capsys, "replay", path)[0] == 0


@pytest.mark.parametrize(
    "argv",
    [
        ["generate", "bundled:text", "Hello"],
        ["run", "bundled:text", "Hello"],
        ["chat", "bundled:text"],
        ["fill", "a.txt"],
        ["edit", "a.txt", ""],
        ["extract", "Call Ann tomorrow at 5pm"],
        ["decide", "It rains.", "--ask", "Is it wet?"],
        ["solve", PUZZLE],
        ["eval", "sudoku"],
    ],
    ids=lambda argv: argv[0],
)
def test_a_trace_that_cannot_be_written_is_refused_before_a_model_is_loaded(
    argv: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("The sea is <FILL>.")
    Path("directory").mkdir()
    Path("a device").symlink_to(os.devnull)
    monkeypatch.setattr(dgemma, "load", lambda *args, **options: pytest.fail("it was loaded"))
    monkeypatch.setattr("dgemma.cli.run.prepare", lambda *args: pytest.fail("it was fetched"))
    long = "x" * 300
    for path, why in (
        ("none/x", "--trace none/x: there is no directory none."),
        ("a.txt/x", "a.txt/x cannot be written: Not a directory."),
        ("directory", "directory cannot be written: Is a directory."),
        ("a device", "a device cannot be written: it is not a regular file."),
        ("/proc/x", "/proc/x cannot be written: No such file or directory."),
        (long, f"{long} cannot be written: File name too long."),
    ):
        assert main([*argv, "--trace", path]) == 2, path
        assert capsys.readouterr().err == f"dgemma {argv[0]}: {why}\n"
    assert sorted(os.listdir()) == ["a device", "a.txt", "directory"]


def test_a_run_that_fails_or_generates_nothing_leaves_an_old_trace_and_makes_no_new_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"old")
    for path in (old, new):
        asked = ["generate", "bundled:text", "Hello", "--raw", "--system", "x", "--trace", str(path)]
        assert main(asked) == 2
        assert "--system needs the chat template" in capsys.readouterr().err
        monkeypatch.setattr("sys.stdin", io.StringIO(""))
        assert main(["chat", "bundled:text", "--trace", str(path)]) == 0
        assert capsys.readouterr().err == f"nothing was generated: {path} is not written\n"
    assert (old.read_bytes(), new.exists()) == (b"old", False)


def test_an_evaluation_and_the_examples_of_a_calibration_are_recorded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(tmp_path / "x.trace")
    assert main(["eval", "sudoku", "--limit", "2", "--batch", "2", "--trace", path]) == 0
    assert len(Trace.load(path).requests) == 2
    lines = [json.dumps({"input": f"It rains {at}.", "label": "yes"}) for at in range(4)]
    (tmp_path / "e.jsonl").write_text("\n".join(lines))
    fit = ["--fit", str(tmp_path / "c"), "--examples", str(tmp_path / "e.jsonl")]
    assert main(["decide", "--ask", "Is it wet?", *fit, "--trace", path]) == 0
    trace = Trace.load(path)
    assert (trace.about["command"], len(trace.requests) >= 4) == ("decide", True)


def test_a_trace_of_images_is_refused_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = tmp_path / "a.png"
    Image.new("RGB", (32, 32)).save(picture)
    monkeypatch.setattr(dgemma, "load", lambda *args, **options: pytest.fail("it was loaded"))
    monkeypatch.setattr("dgemma.cli.run.prepare", lambda *args: pytest.fail("it was fetched"))
    for command in ("generate", "run"):
        asked = [command, "bundled:text", "What?", "--image", str(picture), "--trace", str(tmp_path / "x")]
        assert main(asked) == 2
        assert "--image cannot be recorded" in capsys.readouterr().err


def test_a_replay_takes_every_option_of_loading(solved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(model: str, **options: Any) -> Any:
        assert options["compile"] is True
        raise InputError("enough")

    monkeypatch.setattr(dgemma, "load", load)
    assert main(["trace", "replay", solved, "--compile"]) == 2


def test_show_prints_every_step_in_a_pipe(capsys: pytest.CaptureFixture[str], solved: str) -> None:
    status, out, _ = run(capsys, "show", solved)
    assert status == 0
    assert out.startswith("canvas 1, step 1/")
    assert out.count("\n") == Trace.load(solved).num_steps + 1


@pytest.mark.parametrize(("kind", "begin"), [("svg", b"<svg "), ("png", b"\x89PNG"), ("gif", b"GIF89a")])
def test_pictures(
    capsys: pytest.CaptureFixture[str], solved: str, tmp_path: Path, kind: str, begin: bytes
) -> None:
    out = tmp_path / "out"
    assert run(capsys, kind, solved, str(out))[0] == 0
    assert out.read_bytes().startswith(begin)
    assert run(capsys, kind, solved, str(tmp_path / "none" / "out"))[0] == 2


def test_diff_says_where_two_runs_part(
    capsys: pytest.CaptureFixture[str], solved: str, tmp_path: Path
) -> None:
    other = str(tmp_path / "other.trace")
    assert main(["solve", PUZZLE, "--seed", "5", "--trace", other]) == 0
    capsys.readouterr()
    status, out, _ = run(capsys, "diff", solved, other)
    assert status == 1
    assert "seed: 0 | 5" in out
    assert "canvas 0, step 1" in out
    status, out, _ = run(capsys, "diff", solved, other, "--json")
    found = json.loads(out)
    assert (status, found["same"], found["parting"]["step"]) == (1, False, 1)
    assert run(capsys, "diff", solved, solved)[0] == 0


def test_stats_draw_how_canvases_settle(capsys: pytest.CaptureFixture[str], solved: str) -> None:
    status, out, _ = run(capsys, "stats", solved, solved)
    assert status == 0
    assert "canvases                                 2" in out
    assert "100 %  ########################################" in out
    assert json.loads(run(capsys, "stats", solved, "--json")[1])["canvases"] == 2 - 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["show", "nowhere.trace"], "No such file"),
        (["play", "x"], "invalid choice"),
        (["diff", "SOLVED"], "two traces"),
        (["svg", "SOLVED"], "the file to write"),
        (["show", "SOLVED", "--request", "9"], "requests 0 to 0"),
        (["svg", "SOLVED", "x.svg", "--frames", "0"], "--frames is 0"),
        (["replay", "SOLVED", "bundled:text"], "canvas_len"),
        (["stats"], "FILE"),
    ],
)
def test_mistakes_are_named(
    capsys: pytest.CaptureFixture[str], solved: str, argv: list[str], message: str
) -> None:
    argv = [solved if word == "SOLVED" else word for word in argv]
    try:
        status = main(["trace", *argv])
    except SystemExit as end:
        status = int(end.code or 0)
    assert status == 2
    assert message in capsys.readouterr().err


def test_a_page_holds_the_trace_and_refuses_a_place_it_cannot_write(
    solved: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "solved.html"
    assert run(capsys, "html", solved, str(page)) == (0, "", "")
    assert '"format":"dgemma-trace"' in page.read_text()
    status, _, err = run(capsys, "html", solved, str(tmp_path / "none" / "x.html"))
    assert status == 2
    assert "cannot be written" in err
