"""Both editors with a real server: a gap is filled and a line edited over a socket, with a key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from editors.node_process import EXTENSION, NO_NODE, NODE, run_tests
from editors.nvim_process import NVIM, drive
from server.real_server import RealServer, serving
from server.served import eventually

GAP = "Emma had a little dog. Every morning Emma gave the do<FILL> some fresh water."
FILLED = "Emma had a little dog. Every morning Emma gave the dog some fresh water."
TYPOS = "Every mornign Emma gave the dog some fresh watter."
MENDED = "Every morning Emma gave the dog some fresh water."
KEY = "a-key-of-the-test"
ALL = [("/infill", 200), ("/infill", 401), ("/v1/edit/completions", 200)]


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    flags = ("--served-model-name", "dgemma", "--log-format", "json")
    with serving("bundled:text", *flags, environment={"DGEMMA_API_KEY": KEY}) as found:
        yield found


def last_asked(server: RealServer) -> list[tuple[str, int]]:
    """The last three. A refusal may be logged before the end of the answer that was sent before it."""
    requests = [entry for entry in server.log() if entry["event"] == "request"]
    return sorted((entry["path"], entry["status"]) for entry in requests[-3:])


@pytest.mark.skipif(NVIM is None, reason="there is no nvim; set NVIM to one")
def test_neovim_fills_and_edits(tmp_path: Path, server: RealServer) -> None:
    lines = [GAP, TYPOS]
    setup = {"url": server.address, "key": KEY, "max_tokens": 6}
    found = drive(tmp_path, "DgemmaFill", lines=lines, setup=setup)
    assert (found.lines, found.said) == ([FILLED, TYPOS], [])
    assert found.returned_at_once
    assert found.undone == lines
    found = drive(tmp_path, "2DgemmaEdit", lines=lines, setup=setup)
    assert (found.lines, found.said) == ([GAP, MENDED], [])
    assert found.undone == lines
    found = drive(tmp_path, "DgemmaFill", lines=lines, setup={**setup, "key": "wrong"})
    assert found.lines == lines
    (said,) = found.said
    assert "key" in said, said
    eventually(lambda: last_asked(server) == ALL)


@pytest.mark.skipif(NODE is None, reason=NO_NODE)
def test_the_vscode_extension_fills_and_edits(server: RealServer) -> None:
    own = {"DGEMMA_URL": server.address, "DGEMMA_KEY": KEY}
    assert run_tests(EXTENSION / "test" / "with_server.js", **own) == 2
    eventually(lambda: last_asked(server) == ALL)
