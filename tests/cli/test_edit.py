"""`dgemma edit` as a user types it: a diff that patches, exact bytes, long texts in sections."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dgemma
from cli.canvas_model import CanvasModel, documented, load_once, run
from dgemma.cli.edit import sections
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
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("a.txt")


TEXTS = [
    b"teh end",
    b"teh end\n",
    b"\xef\xbb\xbfteh beginning\n",
    b"one\r\nteh two\r\nthree\r\n",
    b"\xef\xbb\xbfone\r\nteh end",
    b"mixed\r\nteh\n\rteh \r\n\n\n",
    "\f\u2028teh\x85\x1b[31m 日本 teh 🎉\n".encode() + b"far\n" * 20 + b"teh\n",
]


# The diff


@pytest.mark.parametrize("data", TEXTS)
@pytest.mark.parametrize("tool", [("patch", "-p1", "--binary"), ("git", "apply")])
def test_the_diff_makes_of_the_file_what_write_makes_of_it_and_no_other_byte_changes(
    data: bytes, tool: tuple[str, ...], model: CanvasModel, path: Path, capsysbinary: Bytes
) -> None:
    path.write_bytes(data)
    status, diff, err = run(capsysbinary, "edit", str(path), "")
    assert (status, err) == (0, b"")
    assert path.read_bytes() == data
    subprocess.run(tool, input=diff, check=True, capture_output=True, env={**os.environ, "GIT_DIR": "none"})
    assert path.read_bytes() == data.replace(b"teh", b"the")
    path.write_bytes(data)
    count = data.count(b"teh")
    said = f"a.txt: {count} change{'s' * (count > 1)}\n".encode()
    assert run(capsysbinary, "edit", str(path), "", "--write") == (0, said, b"")
    assert path.read_bytes() == data.replace(b"teh", b"the")


def test_the_diff_of_stdin_and_of_strange_names_has_names_that_patch_takes(
    model: CanvasModel, path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"teh\n")))
    assert run(capsys, "edit", "-", "")[1] == "--- a/stdin\n+++ b/stdin\n@@ -1 +1 @@\n-teh\n+the\n"
    for name, shown in (("b c", "a/b c\t"), ('q"', '"a/q\\""'), ("é", "a/é")):
        Path(name).write_text("teh\n")
        out = run(capsys, "edit", name, "")[1]
        assert out.startswith(f"--- {shown}\n")
        subprocess.run(("patch", "-p1"), input=out.encode(), check=True, capture_output=True)
        assert Path(name).read_text() == "the\n"
    absolute = path.absolute()
    absolute.write_text("teh\n")
    assert run(capsys, "edit", str(absolute), "")[1].startswith(f"--- a{absolute}\n+++ b{absolute}\n")


def test_a_terminal_sees_the_diff_in_colours_and_obeys_nothing(
    model: CanvasModel, path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text("\x1b[2J\r\nteh\r\n")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert run(capsys, "edit", "a.txt", "")[1].splitlines() == [
        "\x1b[1m--- a/a.txt\x1b[0m", "\x1b[1m+++ b/a.txt\x1b[0m", "\x1b[36m@@ -1,2 +1,2 @@\x1b[0m",
        " ␛[2J", "\x1b[31m-teh\x1b[0m", "\x1b[32m+the\x1b[0m",
    ]  # fmt: skip


def test_without_changes_there_is_nothing_and_only_a_terminal_is_told_so(
    model: CanvasModel, path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text("all is well")
    assert run(capsys, "edit", "a.txt", "") == (0, "", "")
    before = path.stat()
    assert run(capsys, "edit", "a.txt", "", "--write") == (0, "a.txt: no changes\n", "")
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert "nothing to change" in run(capsys, "edit", "a.txt", "")[2]


def test_check_ends_with_one_if_there_would_be_changes_and_never_writes(
    model: CanvasModel, path: Path, capsys: Capture
) -> None:
    path.write_text("teh")
    status, out, err = run(capsys, "edit", "a.txt", "", "--check")
    assert (status, err) == (1, "")
    assert "+the" in out
    status, out, _ = run(capsys, "edit", "a.txt", "", "--check", "--json")
    assert (status, len(json.loads(out)["changes"])) == (1, 1)
    assert path.read_text() == "teh"
    path.write_text("fine")
    assert run(capsys, "edit", "a.txt", "", "--check") == (0, "", "")


def test_json_has_the_documented_keys_and_offsets_that_hold_in_the_file(
    model: CanvasModel, path: Path, capsys: Capture
) -> None:
    text = "\ufeffteh\r\n" + "line\r\n" * 50 + " é teh end"
    path.write_bytes(text.encode())
    status, out, err = run(capsys, "edit", "a.txt", "", "--json")
    assert (status, err, out.count("\n")) == (0, "", 1)
    found = json.loads(out)
    assert documented(found)
    assert list(found) == [
        "file", "written", "changes", "num_windows", "forwards", "prompt_tokens", "cached_tokens", "seconds",
        "seed",
    ]  # fmt: skip
    assert [text[one["start"] : one["stop"]] for one in found["changes"]] == ["teh", "teh"]
    assert [(one["line"], one["column"]) for one in found["changes"]] == [(1, 1), (52, 4)]
    assert found["changes"][0] == {
        "start": 1, "stop": 4, "line": 1, "column": 1, "old": "teh", "new": "the", "gain": 3.0,
    }  # fmt: skip
    sections_read = len(model.calls)
    assert sections_read > 1
    assert (found["num_windows"], found["forwards"]) == (2 * sections_read, 5 * sections_read)
    assert not found["written"]
    assert json.loads(run(capsys, "edit", "a.txt", "", "--json", "--write")[1])["written"]
    assert path.read_bytes() == text.replace("teh", "the").encode()


# Long texts


@given(
    st.lists(st.sampled_from(["a", " ", "\n", "word", "\n\n", "long" * 9]), max_size=60).map("".join),
    st.integers(1, 20),
    st.integers(0, 20),
)
def test_sections_are_the_whole_text_each_within_its_size_between_what_stands_around_it(
    text: str, most: int, around: int
) -> None:
    found = sections(text, len, most=most, around=around)
    assert "".join(part.text for part in found) == text
    at = 0
    for part in found:
        assert part.start == at
        at += len(part.text)
        assert 0 < len(part.text) <= most
        assert len(part.before) <= around
        assert len(part.after) <= around
        assert text[: part.start].endswith(part.before)
        assert text[at:].startswith(part.after)


def test_sections_end_where_lines_end_or_before_a_blank() -> None:
    text = "one two three\nfour\nfive\nsix seven\n"
    parts = sections(text, len, most=11, around=5)
    assert [part.text for part in parts] == ["one two", " three\n", "four\nfive\n", "six seven\n"]
    assert [(part.before, part.after) for part in parts] == [
        ("", ""),
        ("", "four\n"),
        ("", ""),
        ("five\n", ""),
    ]


def test_a_long_text_is_read_in_sections_that_fit_under_one_seed(
    model: CanvasModel, path: Path, capsys: Capture
) -> None:
    text = "".join(f"line {number} teh end\n" for number in range(100))
    path.write_text(text)
    for instruction in ("", "Fix it."):
        model.calls.clear()
        path.write_text(text)
        assert run(capsys, "edit", "a.txt", instruction, "--write")[0] == 0
        assert path.read_text() == text.replace("teh", "the")
        assert "".join(call["text"] for call in model.calls) == text
        assert [call.get("seed") for call in model.calls] == [None] + [99] * (len(model.calls) - 1)
        assert model.calls[1]["before"].endswith("end\n")
        asked = 1 if instruction else 0
        for call in model.calls:
            before, own, after = (len(call[name]) for name in ("before", "text", "after"))
            lead = before + asked * (64 + len(instruction) + before + own + after)
            canvas, most = model.config.canvas_len, model.config.max_positions
            assert lead + own + 2 * canvas + 12 <= most, "so that lm.edit has room for it"


def test_progress_counts_sections(
    model: CanvasModel, path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text("word\n" * 40)
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    assert run(capsys, "edit", "a.txt", "")[2] == "edit: 1 of 2 sections\nedit: 2 of 2 sections\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert "━" in run(capsys, "edit", "a.txt", "")[2]


# Words and options


def test_options_and_instruction_reach_the_model(model: CanvasModel, path: Path, capsys: Capture) -> None:
    path.write_text("text")
    assert run(capsys, "edit", "a.txt", "Fix it.")[0] == 0
    assert model.loads[0]["model"] == "bundled:text"
    assert model.calls[0] == {"text": "text", "instruction": "Fix it.", "before": "", "after": ""}
    argv = "m --windows 5 a.txt --seed 3 Shorten --dtype float32 --adapter d --exact"
    assert run(capsys, "edit", *argv.split())[0] == 0
    given = {"text": "text", "instruction": "Shorten", "before": "", "after": "", "windows": 5, "seed": 3}
    assert model.calls[1] == given
    loaded = {"dtype": "float32", "device": "auto", "exact": True, "compile": False, "adapter": "d"}
    assert model.loads[1] == {"model": "m", **loaded}


def test_an_empty_file_has_no_changes_and_needs_no_model(
    model: CanvasModel, path: Path, capsys: Capture
) -> None:
    for data in (b"", b"\xef\xbb\xbf"):
        path.write_bytes(data)
        assert run(capsys, "edit", "a.txt", "Fix it.", "--check") == (0, "", "")
        assert run(capsys, "edit", "a.txt", "", "--write") == (0, "a.txt: no changes\n", "")
        assert path.read_bytes() == data
    assert model.loads == []


def test_an_instruction_that_a_model_could_not_hear_is_refused(
    model: CanvasModel, path: Path, capsys: Capture
) -> None:
    path.write_text("text")
    model.has_chat_template = False
    status, out, err = run(capsys, "edit", "a.txt", "Fix it.")
    assert (status, out, model.calls) == (2, "", [])
    assert "needs the chat template, and this checkpoint has none" in err
    assert run(capsys, "edit", "a.txt", " ")[0] == 0


@pytest.mark.parametrize(
    ("data", "argv", "said"),
    [
        (b"a\0", [], "a.txt is not text: byte 1 is NUL."),
        (b"\xff", [], "a.txt is not UTF-8: byte 0 is 0xff"),
        (b"x" * ((16 << 20) + 1), [], "a.txt has more than 16 MiB"),
        (b"x", ["--windows", "0"], "windows is 0"),
        (b"x", ["--seed", str(1 << 70)], "seed is"),
    ],
)
def test_a_text_that_cannot_be_edited_is_one_line_before_anything_is_loaded(
    data: bytes, argv: list[str], said: str, model: CanvasModel, path: Path, capsys: Capture
) -> None:
    path.write_bytes(data)
    status, out, err = run(capsys, "edit", "a.txt", "", *argv)
    assert (status, out, model.loads) == (2, "", [])
    assert err.startswith("dgemma edit: ")
    assert said in err
    assert err.count("\n") == 1
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["a.txt"], "give FILE and INSTRUCTION"),
        (["bundled:text", "a.txt"], "or MODEL, FILE and INSTRUCTION"),
        (["a.txt", "", "--write", "--check"], "not allowed with argument"),
        (["m", "a.txt", "fix", "it"], "unrecognized arguments: it"),
    ],
)
def test_wrong_words_have_status_two(
    argv: list[str], said: str, model: CanvasModel, path: Path, capsys: Capture
) -> None:
    path.write_text("teh")
    status, out, err = run(capsys, "edit", *argv)
    assert (status, out, model.loads) == (2, "", [])
    assert said in err


def test_an_interrupt_in_a_later_section_leaves_the_file_as_it_was(
    model: CanvasModel, path: Path, capsys: Capture
) -> None:
    text = "teh word\n" * 40

    def interrupt() -> None:
        if model.calls:
            raise KeyboardInterrupt

    path.write_text(text)
    model.before_each = interrupt
    assert run(capsys, "edit", "a.txt", "", "--write") == (130, "", "dgemma edit: interrupted\n")
    assert path.read_text() == text
    assert os.listdir() == ["a.txt"]


# The real model


def test_the_bundled_model_mends_a_typo_and_nothing_else(
    path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dgemma, "load", load_once)
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 1e9)
    data = b"Emma had a little dog.\r\n\r\nEvery mornign Emma gave the dog some fresh water."
    path.write_bytes(data)
    assert run(capsys, "edit", "a.txt", "", "--seed", "1", "--write") == (0, "a.txt: 1 change\n", "")
    assert path.read_bytes() == data.replace(b"mornign", b"morning")
