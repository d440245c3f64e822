"""The Neovim plugin in a headless Neovim: what it sends, what it changes, and what it says."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from editors.nvim_process import NVIM, drive
from editors.scripted_server import WAIT_S, Answer, answering, edited, filled

if NVIM is None:
    pytest.skip("there is no nvim; set NVIM to one", allow_module_level=True)

OPTIONS = "after, before, key, max_tokens, model, region, timeout_s, url"


def test_the_gap_at_the_cursor_is_filled_at_once_and_undone_in_one_step(tmp_path: Path) -> None:
    lines = ["first", "Emma gave the  some wäter.", "last"]
    with answering([filled("dog\nand")]) as server:
        found = drive(tmp_path, "DgemmaFill", lines=lines, cursor=[2, 14], setup={"url": server.address})
    assert found.works, found.reason
    assert found.returned_at_once
    assert found.lines == ["first", "Emma gave the dog", "and some wäter.", "last"]
    assert found.cursor == [3, 3]
    assert found.undone == lines
    assert found.said == []
    (seen,) = server.seen
    assert seen.path == "/infill"
    assert seen.body == {
        "model": "dgemma",
        "input_prefix": "first\nEmma gave the ",
        "input_suffix": " some wäter.\nlast",
        "n_predict": 40,
    }
    assert "authorization" not in seen.headers


def test_every_mark_is_filled_with_those_before_it_in_sight_and_one_undo(tmp_path: Path) -> None:
    lines = ["a <FILL> b", "c <FILL>", "<FILL>d <FILL>"]
    answers = [filled(text) for text in ("1", "2\n2", "", "4")]
    with answering(answers) as server:
        found = drive(tmp_path, "DgemmaFill", lines=lines, cursor=[1, 0], setup={"url": server.address})
    assert found.lines == ["a 1 b", "c 2", "2", "d 4"]
    assert found.undone == lines
    sent = [(one.body["input_prefix"], one.body["input_suffix"]) for one in server.seen]
    assert sent == [
        ("a ", " b\nc "),
        ("a 1 b\nc ", "\n"),
        ("a 1 b\nc 2\n2\n", "d "),
        ("a 1 b\nc 2\n2\nd ", ""),
    ]


def test_lines_of_a_range_are_edited_as_told(tmp_path: Path) -> None:
    lines = ["before", "teh one", 'teh "two" \\', "after"]
    with answering([edited('the one\nthe "two" \\')]) as server:
        found = drive(tmp_path, "2,3DgemmaEdit Mend the words", lines=lines, setup={"url": server.address})
    assert found.lines == ["before", "the one", 'the "two" \\', "after"]
    assert found.undone == lines
    (seen,) = server.seen
    assert seen.path == "/v1/edit/completions"
    ((message,),) = (seen.body["messages"],)
    assert message["content"] == (
        'Mend the words\n<|current_file_content|>\nbefore\n<|code_to_edit|>\nteh one\nteh "two" \\\n'
        "<|/code_to_edit|>\nafter<|/current_file_content|>"
    )


def test_text_that_is_right_is_left_alone(tmp_path: Path) -> None:
    with answering([edited("right")]) as server:
        found = drive(tmp_path, "DgemmaEdit", lines=["right"], setup={"url": server.address})
    assert found.said == ["dgemma: nothing to change"]
    assert found.lines == ["right"]


def test_of_a_large_text_only_so_much_is_sent_and_no_half_character(tmp_path: Path) -> None:
    lines = ["ä" * 5000, "middle", "ö" * 5000]
    setup = {"before": 8, "after": 9, "region": 6}
    with answering([filled("x"), edited("middle")]) as server:
        setup |= {"url": server.address}
        drive(tmp_path, "DgemmaFill", lines=lines, cursor=[2, 0], setup=setup)
        drive(tmp_path, "2DgemmaEdit", lines=lines, setup=setup)
        found = drive(tmp_path, "1,2DgemmaEdit", lines=lines, setup=setup)
    assert found.said == ["dgemma: the lines have 10007 bytes; at most 6 are sent: give fewer"]
    filled_, edited_ = server.seen
    assert (filled_.body["input_prefix"], filled_.body["input_suffix"]) == ("äää\n", "middle\nö")
    assert edited_.body["messages"][0]["content"] == (
        "\n<|current_file_content|>\näää\n<|code_to_edit|>\nmiddle\n<|/code_to_edit|>\nöööö"
        "<|/current_file_content|>"
    )


def test_the_key_is_sent_but_is_no_argument_of_a_process(tmp_path: Path) -> None:
    """curl is told everything on stdin; its arguments can be read by every user of the machine."""
    directory = tmp_path / "bin"
    directory.mkdir()
    spy = directory / "curl"
    spy.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\nexec {shutil.which("curl")} "$@"\n')
    spy.chmod(0o755)
    with answering([filled("x")]) as server:
        setup = {"url": f"{server.address}/", "key": 'a "secret\\ key'}
        path = f"{directory}{os.pathsep}{os.environ['PATH']}"
        found = drive(tmp_path, "DgemmaFill", lines=["text"], path=path, setup=setup)
    assert found.lines == ["xtext"]
    assert server.seen[0].headers["authorization"] == 'Bearer a "secret\\ key'
    assert (tmp_path / "arguments").read_text() == "-q --config -\n"


def test_text_goes_nowhere_but_to_the_configured_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A redirect is not followed, and neither a proxy nor a configuration of curl is used."""
    with answering([filled("stolen")] * 3) as other:
        monkeypatch.setenv("http_proxy", other.address)
        (tmp_path / ".curlrc").write_text(f'proxy = "{other.address}"\nlocation\n')
        moved = Answer(307, headers={"location": other.address})
        with answering([moved]) as server:
            found = drive(tmp_path, "DgemmaFill", lines=["text"], setup={"url": server.address})
        assert not other.seen
    assert found.said == [f"dgemma: {server.address} answered with status 307, and not as dgemma does"]
    assert found.lines == ["text"]


def test_a_second_command_ends_the_request_of_the_first(tmp_path: Path) -> None:
    with answering([Answer(waits=True), replace(filled("new"), is_last=True)]) as server:
        was_asked = f"function() return vim.fn.filereadable('{tmp_path}/asked') == 1 end"
        wait = f"lua vim.wait({WAIT_S * 1000}, {was_asked})"

        class Asked(list):  # type: ignore[type-arg]
            def append(self, seen: object) -> None:
                super().append(seen)
                (tmp_path / "asked").touch()

        server.seen = Asked()
        found = drive(
            tmp_path, "DgemmaFill", wait, "DgemmaFill", lines=["text"], setup={"url": server.address}
        )
    assert found.lines == ["newtext"]
    assert found.said == []


def test_an_answer_for_a_text_that_was_changed_is_dropped(tmp_path: Path) -> None:
    with answering([filled("x")]) as server:
        found = drive(
            tmp_path, "DgemmaFill", "normal! Atyped", lines=["text"], setup={"url": server.address}
        )  # fmt: skip
    assert found.lines == ["texttyped"]
    assert found.said == ["dgemma: the text was changed in the meantime; the answer is dropped"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(401, json.dumps({"error": {"message": "No key."}}).encode()), "No key."),
        (Answer(200, b"<html>"), "{} answered with status 200, and not as dgemma does"),
        (Answer(200, b'{"content": null}'), "{} answered with status 200, and not as dgemma does"),
        (Answer(200, b"[]"), "{} answered with status 200, and not as dgemma does"),
        (Answer(404, b""), "{} answered with status 404, and not as dgemma does"),
    ],
)
def test_an_error_is_a_message_and_changes_nothing(tmp_path: Path, answer: Answer, said: str) -> None:
    with answering([answer]) as server:
        found = drive(tmp_path, "DgemmaFill", lines=["a <FILL>"], setup={"url": server.address})
    assert found.said == [f"dgemma: {said.format(server.address)}"]
    assert found.lines == ["a <FILL>"]


def test_it_is_said_when_nobody_listens_and_when_there_is_no_curl(tmp_path: Path) -> None:
    with answering() as server:
        gone = server.address
    found = drive(tmp_path, "DgemmaFill", lines=["text"], setup={"url": gone})
    (said,) = found.said
    assert said.startswith(f"dgemma: no answer from {gone}: curl: (7)")
    found = drive(tmp_path, "DgemmaFill", lines=["text"], path=str(tmp_path), setup={"url": gone})
    assert found.said == ["dgemma: there is no curl on the PATH; install it"]


@pytest.mark.parametrize(
    ("lines", "before", "said"),
    [
        (["<|cursor|>"], (), "the text holds <|cursor|>, which is a tag of the request; remove it"),
        (["a", "<|cursor|>"], (), "the text holds <|cursor|>, which is a tag of the request; remove it"),
        (["a"], ("set nomodifiable",), "this buffer cannot be changed"),
    ],
)  # fmt: skip
def test_what_cannot_be_edited_is_not_sent(
    tmp_path: Path, lines: list[str], before: tuple[str, ...], said: str
) -> None:
    with answering() as server:
        found = drive(tmp_path, *before, "1DgemmaEdit", lines=lines, setup={"url": server.address})
    assert not server.seen
    assert found.said == [f"dgemma: {said}"]


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        ({"urk": "x"}, f"there is no option urk; options are {OPTIONS}"),
        ({"before": "8"}, "before is a string; it must be a number"),
        ({"before": -1}, "before is -1; it must be a whole number from 0 on"),
        ({"key": "a\nb"}, "key has a control character; remove it"),
        ({"url": "file:///etc/passwd"}, "url is file:///etc/passwd; it must begin with http:// or https://"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_refused(tmp_path: Path, setup: dict[str, str], said: str) -> None:
    found = drive(tmp_path, lines=["text"], setup=setup)
    assert not found.works
    assert found.reason == f"dgemma.setup: {said}"
