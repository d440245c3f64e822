"""The manual pages say what the parsers say, and are roff that man reads without a warning."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgemma.cli.main import COMMANDS, build_parser
from tools.build_docs import parsers_below
from tools.make_man import MAN, escaped, main, page, pages, paragraphs

PARSERS = {parser.prog.replace(" ", "-"): parser for parser in parsers_below(build_parser())}


def shown(roff: str) -> str:
    """What a terminal shows of text, for the escapes that the pages use."""
    text = re.sub(r"\\f[BIR]|\\&", "", roff)
    text = re.sub(r"\\\[u([0-9A-F]+)\]", lambda found: chr(int(found[1], 16)), text)
    return text.replace("\\-", "-").replace("\\e", "\\")


def test_the_committed_pages_are_those_of_the_parsers() -> None:
    committed = {path.name: path.read_text() for path in MAN.iterdir()}
    assert committed == pages(), "run `make man`"


def test_every_command_has_a_page_with_all_of_its_options_and_their_help() -> None:
    assert pages().keys() == {"dgemma.1", *(f"dgemma-{command}.1" for command in COMMANDS)}
    for name, parser in PARSERS.items():
        text = " ".join(shown(pages()[f"{name}.1"]).split())
        for action in parser._actions:
            for option in action.option_strings:
                assert option in text
            if action.help not in (None, argparse.SUPPRESS):
                assert " ".join(parser._get_formatter()._expand_help(action).split()) in text


@pytest.mark.parametrize("columns", ["20", "200"])
def test_pages_do_not_depend_on_the_terminal(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = pages()
    monkeypatch.setenv("COLUMNS", columns)
    assert pages() == before


@given(st.text(st.characters(exclude_categories=("C", "Z")) | st.sampled_from(" .'\\\\-"), max_size=40))
def test_no_text_is_a_request_to_roff(text: str) -> None:
    assert shown(escaped(text)) == text
    assert not escaped(text).startswith((".", "'"))
    assert escaped(text).isascii()


def test_indented_lines_keep_their_breaks_and_prose_does_not() -> None:
    assert paragraphs("A b\nc.\n\n  x  y\n  z\nEnd.") == ("A b c.\n.PP\n.EX\n  x  y\n  z\n.EE\n.PP\nEnd.\n")


def test_values_are_shown_with_their_number_of_times() -> None:
    parser = argparse.ArgumentParser(prog="x", description="d", epilog="Note.\n\nexample:\n  x y")
    for nargs in ("?", "*", "+"):
        parser.add_argument(f"--{ord(nargs)}", nargs=nargs, metavar="N", help="h")
    parser.add_argument("--choice", choices=("a", "b"))
    parser.add_argument("--hidden", help=argparse.SUPPRESS)
    text = shown(page(parser, "s"))
    for line in ("--63 [N]", "--42 [N ...]", "--43 N [N ...]", "--choice a|b", ".SH NOTES\nNote.", "  x y"):
        assert line in text
    assert "hidden" not in text


@pytest.mark.skipif(shutil.which("man") is None, reason="man is not installed")
@pytest.mark.parametrize("name", ["dgemma", "dgemma-serve", "dgemma-train"])
def test_man_reads_a_page_without_a_warning(name: str) -> None:
    done = subprocess.run(
        ["man", "--warnings", "-E", "UTF-8", "-l", str(MAN / f"{name}.1")],
        env={"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin", "MANWIDTH": "100"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    assert "EXIT STATUS" in done.stdout


def test_a_page_of_a_command_that_is_gone_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.make_man.MAN", tmp_path)
    (tmp_path / "dgemma-gone.1").write_text("")
    assert main() == 0
    assert {path.name for path in tmp_path.iterdir()} == pages().keys()
