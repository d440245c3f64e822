"""`dgemma fill` as a user types it: which gap sees what, exact bytes, files that stay whole."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dgemma
from cli.canvas_model import CanvasModel, documented, load_once, run
from dgemma.cli import text_file
from dgemma.cli.text_file import read_text_file
from dgemma.cli.views import progress

Capture = pytest.CaptureFixture[str]
Bytes = pytest.CaptureFixture[bytes]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> CanvasModel:
    fake = CanvasModel()
    monkeypatch.setitem(dgemma.__dict__, "load", fake.load)  # imports no torch
    monkeypatch.setattr("dgemma.cli.options.check_checkpoint", lambda model: None)
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 1e9)  # no line more on a slow machine
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return fake


@pytest.fixture
def file(tmp_path: Path) -> Callable[[bytes | str], str]:
    def make(data: bytes | str) -> str:
        (tmp_path / "a.txt").write_bytes(data.encode() if isinstance(data, str) else data)
        return str(tmp_path / "a.txt")

    return make


def ask_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))


# What a gap sees


def test_a_gap_sees_all_text_before_it_fills_included_and_what_is_after_it_up_to_the_next(
    model: CanvasModel, file: Callable[[bytes | str], str], capsys: Capture
) -> None:
    status, out, err = run(capsys, "fill", file("one <FILL> two <FILL><FILL> three\n"))
    assert (status, out, err) == (0, "one <1> two <2><3> three\n", "")
    assert [(call["prefix"], call["suffix"]) for call in model.calls] == [
        ("one ", " two "),
        ("one <1> two ", ""),
        ("one <1> two <2>", " three\n"),
    ]


def test_a_model_is_given_no_more_of_a_long_text_than_it_could_read(
    model: CanvasModel, file: Callable[[bytes | str], str], capsys: Capture
) -> None:
    status, out, _ = run(capsys, "fill", file("a" * 50_000 + "b<FILL>c" + "d" * 50_000))
    assert status == 0
    assert out == "a" * 50_000 + "b<1>c" + "d" * 50_000
    (call,) = model.calls
    near = 16 * model.config.max_positions
    assert (call["prefix"], call["suffix"]) == (("a" * 50_000 + "b")[-near:], ("c" + "d" * 50_000)[:near])


@pytest.mark.parametrize(
    ("where", "prefix"),
    [
        (("--line", "1", "--column", "1"), ""),
        (("--line", "1", "--column", "3"), "é€"),
        (("--line", "1"), "é€<FILL>"),
        (("--line", "2", "--column", "1"), "é€<FILL>\n"),
        (("--line", "2", "--column", "4"), "é€<FILL>\nabc"),
        (("--line", "3"), "é€<FILL>\nabc\n"),
    ],
)
def test_a_place_is_a_line_and_a_column_of_characters_and_marks_are_then_text(
    where: tuple[str, ...],
    prefix: str,
    model: CanvasModel,
    file: Callable[[bytes | str], str],
    capsys: Capture,
) -> None:
    text = "é€<FILL>\nabc\n"
    for data in (text, "\ufeff" + text.replace("\n", "\r\n")):
        status, out, _ = run(capsys, "fill", file(data), *where)
        assert status == 0
        assert (model.calls[-1]["prefix"], model.calls[-1]["suffix"]) == (prefix, text[len(prefix) :])
        assert out.replace("<1>", "").replace("<2>", "") == data


def test_another_marker_marks_and_the_usual_one_is_text(
    model: CanvasModel, file: Callable[[bytes | str], str], capsys: Capture
) -> None:
    assert run(capsys, "fill", file("a [.*] <FILL>"), "--marker", "[.*]")[1] == "a <1> <FILL>"


# Bytes


@pytest.mark.parametrize(
    "data",
    [
        b"no newline at the end <FILL>",
        b"\xef\xbb\xbfa mark before the text <FILL>\n",
        b"lines\r\nof\r\nWindows <FILL>\r\n",
        b"\xef\xbb\xbfboth\r\n<FILL>",
        b"mixed\r\nends\nand \r others\r\r\n<FILL>\n",
        "\f form feed, \u2028 and \x85, \x1b[31m, 日本 🎉 <FILL> e\u0301\n\n\n".encode(),
        b"<FILL>",
    ],
)
def test_every_byte_beside_a_gap_stays_in_a_pipe_and_in_the_file(
    data: bytes,
    model: CanvasModel,
    file: Callable[[bytes | str], str],
    capsysbinary: Bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = data.replace(b"<FILL>", b"<1>")
    path = file(data)
    assert run(capsysbinary, "fill", path) == (0, expected, b"")
    assert Path(path).read_bytes() == data
    model.calls.clear()
    ask_stdin(monkeypatch, data)
    assert run(capsysbinary, "fill", "-") == (0, expected, b"")
    model.calls.clear()
    assert run(capsysbinary, "fill", path, "--write")[0] == 0
    assert Path(path).read_bytes() == expected


@given(st.lists(st.sampled_from(["\r", "\n", "\r\n", "\r\n", "\ufeff", "a", "é", "🎉"]), max_size=12))
def test_a_file_gives_its_text_back_byte_by_byte_from_any_character_on(parts: list[str]) -> None:
    text = "".join(parts)
    data = text.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_file, "_read", lambda path: data)
        file = read_text_file("x")
    assert file.whole(file.text) == text
    for at in range(len(file.text) + 1):
        assert text[file.offset(file.text, at) :] == file.as_written(file.text[at:])


def test_where_all_lines_end_as_on_windows_new_ones_do_and_the_model_need_not_know(
    model: CanvasModel, file: Callable[[bytes | str], str], capsysbinary: Bytes
) -> None:
    model.write = lambda number: "x\ny"
    assert run(capsysbinary, "fill", file(b"a\r\n<FILL>\r\nb"))[1] == b"a\r\nx\r\ny\r\nb"
    assert (model.calls[0]["prefix"], model.calls[0]["suffix"]) == ("a\n", "\nb")
    assert run(capsysbinary, "fill", file(b"a\r\n<FILL>\nb"))[1] == b"a\r\nx\ny\nb"
    assert model.calls[1]["prefix"] == "a\r\n"


# What comes out


def test_only_is_one_line_per_gap_that_printf_gives_back(
    model: CanvasModel, file: Callable[[bytes | str], str], capsys: Capture
) -> None:
    fills = ["plain", "two\nlines\r", "a \\n that is none\t"]
    model.write = lambda number: fills[number - 1]
    status, out, _ = run(capsys, "fill", file("<FILL>, <FILL>, <FILL>"), "--only")
    assert status == 0
    assert out == "plain\ntwo\\nlines\\r\na \\\\n that is none\t\n"


def test_json_has_the_documented_keys_and_offsets_that_hold_in_the_file(
    model: CanvasModel, file: Callable[[bytes | str], str], capsys: Capture
) -> None:
    model.write = lambda number: "x\n" * number
    path = file("\ufeffa\r\n<FILL>b<FILL>\r\n")
    status, out, err = run(capsys, "fill", path, "--json", "--seed", "7")
    assert (status, err, out.count("\n")) == (0, "", 1)
    found = json.loads(out)
    assert documented(found)
    assert list(found) == ["file", "written", "text", "gaps"]
    assert (found["file"], found["written"]) == (path, False)
    assert found["text"] == "\ufeffa\r\nx\r\nbx\r\nx\r\n\r\n"
    assert list(found["gaps"][0]) == [
        "start", "stop", "text", "log_likelihood", "candidates", "forwards", "prompt_tokens", "cached_tokens",
        "seconds", "seed",
    ]  # fmt: skip
    assert [found["text"][gap["start"] : gap["stop"]] for gap in found["gaps"]] == ["x\r\n", "x\r\nx\r\n"]
    assert [gap["text"] for gap in found["gaps"]] == ["x\r\n", "x\r\nx\r\n"]
    assert [gap["seed"] for gap in found["gaps"]] == [7, 8], "each gap has the next seed"
    assert found["gaps"][0]["candidates"][1] == {"text": "other", "log_likelihood": -2.5}


def test_options_reach_the_model_and_those_not_given_do_not(
    model: CanvasModel, file: Callable[[bytes | str], str], capsys: Capture
) -> None:
    path = file("<FILL>")
    assert run(capsys, "fill", path)[0] == 0
    assert model.calls[0] == {"prefix": "", "suffix": ""}
    usual = {"dtype": "auto", "device": "auto", "exact": False, "compile": False, "adapter": None}
    assert model.loads[0] == {"model": "bundled:text", **usual}
    argv = (
        "--max-tokens 9 --lengths 2-4,8,3 --keep 2 --no-heal --method prompt --preset fast --temperature 0 "
        "--max-denoising-steps 5 --seed 3 --dtype float32 --device cpu --adapter d --exact --compile"
    )
    assert run(capsys, "fill", "m", path, *argv.split())[0] == 0
    assert model.calls[1] == {
        "prefix": "", "suffix": "", "max_tokens": 9, "lengths": (2, 3, 4, 8), "keep": 2, "heal": False,
        "method": "prompt", "preset": "fast", "temperature": 0.0, "max_denoising_steps": 5, "seed": 3,
    }  # fmt: skip
    loaded = {"dtype": "float32", "device": "cpu", "exact": True, "compile": True, "adapter": "d"}
    assert model.loads[1] == {"model": "m", **loaded}


@pytest.mark.parametrize("order", ["m {} --seed 1", "m --seed 1 {}", "--seed 1 m {}", "--seed 1 m --only {}"])
def test_options_may_stand_anywhere_between_model_and_file(
    order: str, model: CanvasModel, file: Callable[[bytes | str], str], capsys: Capture
) -> None:
    path = file("<FILL>")
    assert run(capsys, "fill", *(word.format(path) for word in order.split()))[0] == 0
    assert (model.loads[0]["model"], model.calls[0]["seed"]) == ("m", 1)


def test_a_terminal_sees_new_parts_coloured_and_obeys_nothing(
    model: CanvasModel,
    file: Callable[[bytes | str], str],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = file("a\x1b[2J <FILL>\r\nb")
    model.write = lambda number: "x\ny"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert run(capsys, "fill", path)[1] == "a␛[2J \x1b[32mx\x1b[0m\n\x1b[32my\x1b[0m\nb\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[1mx\x1b[0m" in run(capsys, "fill", path)[1]
    monkeypatch.setenv("TERM", "dumb")
    assert run(capsys, "fill", path)[1] == "a␛[2J x\ny\nb\n"


def test_progress_is_a_bar_on_a_terminal_and_lines_now_and_then_in_a_pipe(
    model: CanvasModel,
    file: Callable[[bytes | str], str],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = file("<FILL> <FILL>")
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    assert run(capsys, "fill", path)[2] == "fill: 1 of 2 gaps\nfill: 2 of 2 gaps\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    out, err = run(capsys, "fill", path)[1:]
    assert "━" in err
    assert "gaps\n" not in err
    assert "━" not in out


# Writing


def test_write_keeps_mode_and_links_leaves_nothing_beside_and_says_what_it_did(
    model: CanvasModel, file: Callable[[bytes | str], str], capsys: Capture, tmp_path: Path
) -> None:
    path = Path(file("a <FILL> b <FILL>"))
    path.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to("a.txt")
    assert run(capsys, "fill", str(link), "--write") == (0, f"{link}: 2 gaps filled\n", "")
    assert link.is_symlink()
    assert path.read_text() == "a <1> b <2>"
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "link"]
    path.write_text("<FILL>")
    assert json.loads(run(capsys, "fill", str(path), "--write", "--json")[1])["written"]
    assert path.read_text() == "<3>"
    path.write_text("<FILL>")
    assert run(capsys, "fill", str(path), "--write", "--only")[1] == "<4>\n"
    assert path.read_text() == "<4>"


@pytest.mark.parametrize("moment", ["in the second gap", "while writing"])
def test_an_interrupt_leaves_the_file_and_its_directory_as_they_were(
    moment: str,
    model: CanvasModel,
    file: Callable[[bytes | str], str],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    path = file("<FILL> <FILL>")

    def interrupted(*args: object) -> None:
        if args or len(model.calls) == 1:
            raise KeyboardInterrupt

    if moment == "while writing":
        monkeypatch.setattr(os, "replace", interrupted)
    else:
        model.before_each = interrupted
    assert run(capsys, "fill", path, "--write") == (130, "", "dgemma fill: interrupted\n")
    assert Path(path).read_text() == "<FILL> <FILL>"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_disk_that_refuses_is_one_line_and_the_file_stays(
    model: CanvasModel,
    file: Callable[[bytes | str], str],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    path = file("<FILL>")
    status, out, err = run(capsys, "fill", path, "--write")
    assert (status, out) == (1, "")
    assert err == f"dgemma fill: {path} cannot be written: No space left on device.\n"
    assert Path(path).read_text() == "<FILL>"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_what_somebody_wrote_meanwhile_is_never_overwritten(
    model: CanvasModel, file: Callable[[bytes | str], str], capsys: Capture
) -> None:
    path = file("<FILL>")

    def save() -> None:
        Path(path).write_text("mine")

    model.before_each = save
    status, out, err = run(capsys, "fill", path, "--write")
    assert (status, out) == (1, "")
    assert "was changed meanwhile; nothing was written" in err
    assert Path(path).read_text() == "mine"


# What cannot be


@pytest.mark.parametrize(
    ("data", "argv", "said"),
    [
        (b"", [], "a.txt has no <FILL> in it; mark the gaps, or give --line and --column."),
        (b"text", [], "a.txt has no <FILL> in it"),
        (b"text", ["--marker", "@@"], "a.txt has no @@ in it"),
        (b"text", ["--marker", ""], "--marker is empty"),
        (b"text", ["--marker", "x", "--line", "1"], "--marker and --line both locate"),
        (b"text", ["--column", "1"], "--column needs --line"),
        (b"a\nb", ["--line", "3"], "--line is 3; {} has lines 1 to 2."),
        (b"a\nb", ["--line", "0"], "--line is 0; {} has lines 1 to 2."),
        (b"a\r\nb", ["--line", "1", "--column", "3"], "--column is 3; in line 1 of {} it can be 1 to 2."),
        (b"ab\0<FILL>", [], "{} is not text: byte 2 is NUL."),
        (b"caf\xe9 <FILL>", [], "{} is not UTF-8: byte 3 is 0xe9; convert it first"),
        (b"<FILL>" + b"x" * (16 << 20), [], "{} has more than 16 MiB; give a part of it."),
        (b"<FILL>", ["--max-tokens", "0"], "max_tokens is 0"),
        (b"<FILL>", ["--keep", "99"], "keep is 99"),
        (b"<FILL>", ["--temperature", "-1"], "temperature is -1.0"),
        (b"<FILL><FILL>", ["--seed", str((1 << 64) - 1)], "seed is 18446744073709551616"),
    ],
)
def test_a_text_that_cannot_be_filled_is_one_line_before_anything_is_loaded(
    data: bytes,
    argv: list[str],
    said: str,
    model: CanvasModel,
    file: Callable[[bytes | str], str],
    capsys: Capture,
) -> None:
    path = file(data)
    status, out, err = run(capsys, "fill", path, *argv)
    assert (status, out, model.loads) == (2, "", [])
    assert err.startswith("dgemma fill: ")
    assert said.format(path) in err
    assert err.count("\n") == 1


def test_a_file_that_is_none_or_cannot_be_written_is_one_line_before_anything_is_loaded(
    model: CanvasModel,
    file: Callable[[bytes | str], str],
    capsys: Capture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = file("<FILL>")
    Path(path).chmod(0o444)
    no_files = tmp_path / "dir"
    no_files.mkdir()
    (no_files / "b").write_text("<FILL>")
    access = os.access
    monkeypatch.setattr(os, "access", lambda p, mode: Path(p) != no_files and access(p, mode))
    ask_stdin(monkeypatch, b"<FILL>")
    for argv, said in (
        ([f"{tmp_path}/none"], f"{tmp_path}/none cannot be read: No such file or directory."),
        ([f"{tmp_path}/none", "--write"], f"{tmp_path}/none cannot be read: No such file or directory."),
        ([str(tmp_path)], f"{tmp_path} is a directory; give a file of text."),
        ([str(tmp_path), "--write"], f"{tmp_path} is not a regular file; --write needs one."),
        (["a\0b"], "'a\\x00b' is not the name of a file."),
        ([path, "--write"], f"{path} cannot be written: it is read-only."),
        ([f"{no_files}/b", "--write"], f"{no_files}/b cannot be written: {no_files} takes no new files."),
        (["-", "--write"], "--write needs a file"),
    ):
        status, out, err = run(capsys, "fill", *argv)
        assert (status, out, err.count("\n")) == (2, "", 1), argv
        assert said in err
    assert model.loads == []


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "no FILE; give FILE, or MODEL and FILE"),
        (["bundled:text"], "no FILE; give FILE, or MODEL and FILE"),
        (["a", "b", "c"], "unrecognized arguments: c"),
        (["a", "--lengths", "2-x"], "'2-x' is no list of lengths such as 2-8,12"),
        (["a", "--lengths", "1-9999999"], "are too many lengths"),
        (["a", "--only", "--json"], "not allowed with argument"),
        (["a", "--max-token-s"], "did you mean '--max-tokens'?"),
    ],
)
def test_wrong_words_have_status_two(argv: list[str], said: str, model: CanvasModel, capsys: Capture) -> None:
    status, out, err = run(capsys, "fill", *argv)
    assert (status, out, model.loads) == (2, "", [])
    assert said in err


def test_a_gap_that_cannot_be_filled_is_named(
    model: CanvasModel, file: Callable[[bytes | str], str], capsys: Capture
) -> None:
    def refuse() -> None:
        if len(model.calls) == 1:
            raise dgemma.InputError("no text fits.")

    model.before_each = refuse
    path = file("<FILL> <FILL>")
    assert run(capsys, "fill", path, "--write")[2] == "dgemma fill: gap 2 of 2: no text fits.\n"
    assert Path(path).read_text() == "<FILL> <FILL>"


# The real model


def test_the_bundled_model_fills_as_its_python_api_does(
    file: Callable[[bytes | str], str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dgemma, "load", load_once)
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 1e9)
    path = file("Every <FILL> Emma fed the dog.\r\n")
    status, out, err = run(capsys, "fill", path, "--lengths", "2", "--seed", "1", "--json")
    assert (status, err) == (0, "")
    (gap,) = json.loads(out)["gaps"]
    lm: Any = load_once("bundled:text", dtype="auto")
    found = lm.fill("Every ", " Emma fed the dog.\n", lengths=[2], seed=1)
    assert gap["text"] == found.text.replace("\n", "\r\n") != ""
    assert gap["log_likelihood"] == pytest.approx(found.log_likelihood, abs=1e-3)
    assert gap["forwards"] == found.forwards > 0
    assert gap["seed"] == 1
