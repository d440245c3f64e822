"""docs/server.md is true: its commands, curl lines and programs run word for word, in order.

A block that serves is left running until the next one that does. Only the port is another: a free one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from server.real_server import RealServer, serving
from server.served import eventually

PAGE = (Path(__file__).parents[1] / "docs" / "server.md").read_text()
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(sh|python)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PLACE = "http://127.0.0.1:8000"
ASKING = [number for number, (_, text) in enumerate(BLOCKS) if PLACE in text]
FIRST_IN_PATH = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


class Reader:
    """Somebody who reads the page and types what stands there."""

    def __init__(self, directory: Path, servers: ExitStack) -> None:
        self.directory = directory
        self._servers = servers
        self._server: RealServer | None = None

    def run(self, language: str, text: str) -> str:
        if "dgemma serve" in text:
            self._serve(text)
            return ""
        if PLACE not in text:
            return self._typed(language, text)
        assert self._server is not None
        answered = len(self._statuses())
        found = self._typed(language, text.replace(PLACE, self._server.address))
        eventually(lambda: len(self._statuses()) > answered)  # a line is logged behind its answer
        assert set(self._statuses()[answered:]) == {200}, found
        return found

    def _serve(self, text: str) -> None:
        self._servers.close()
        # The server in place of the shell, so that it ends when that is ended.
        text = re.sub(r"^dgemma serve", "exec dgemma serve", text, flags=re.MULTILINE)
        served = serving(command=["bash", "-euc", text], directory=self.directory, environment=FIRST_IN_PATH)
        self._server = self._servers.enter_context(served)

    def _statuses(self) -> list[int]:
        assert self._server is not None
        return [entry["status"] for entry in self._server.log() if entry["event"] == "request"]

    def _typed(self, language: str, text: str) -> str:
        command = ["bash", "-euo", "pipefail", "-c"] if language == "sh" else [sys.executable, "-c"]
        done = subprocess.run(
            [*command, text],
            cwd=self.directory,
            env={**os.environ, **FIRST_IN_PATH},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    with ExitStack() as servers:
        yield Reader(tmp_path_factory.mktemp("reader"), servers)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_what_stands_in_the_page_works_as_it_stands_there(reader: Reader, number: int) -> None:
    said = reader.run(*BLOCKS[number])
    assert (number not in ASKING) or said, "an answer is to be seen"


def test_the_page_shows_how_to_ask_stream_and_batch() -> None:
    joined = "".join(text for _, text in BLOCKS)
    for part in ("dgemma new", "dgemma serve", "dgemma run-batch", "curl -N", "import OpenAI", "/v1/models"):
        assert part in joined
    assert len(ASKING) >= 4
