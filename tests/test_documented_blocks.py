"""Each block of the documentation runs as it stands there, in order, and prints what follows it.

A `sh` or `python` block is run. In a tutorial a `text` block directly behind it is what it prints, with
`...` for what differs. `<!-- not run: reason -->` before a block leaves it out, and stands before every
`text` block that holds commands.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sizes import IS_FULL
from test_documented_commands import run
from test_documented_server import PLACE, Reader
from tools.run_documented import Block, blocks_of

DOCS = Path(__file__).parent.parent / "docs"
# These run in tests of their own.
ELSEWHERE = {"server.md", "structured-output.md"}
# Half a minute of training; the README's blocks, which `make documented` runs, are the same.
SLOW = {"tutorials/fine-tune.md"}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Follower:
    """Does what a page says, in one directory. Commands run in this process, a server in its own."""

    def __init__(self, directory: Path, servers: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self._reader = Reader(directory, servers)
        self._monkeypatch = monkeypatch
        self._names: dict[str, Any] = {}

    def follow(self, block: Block) -> str:
        if "dgemma serve" in block.text or PLACE in block.text:
            return self._reader.run(block.language, block.text)
        if block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(block.text, self._names)  # noqa: S102
            return printed.getvalue()
        printed_lines = []
        for line in re.sub(r"\\\n", "", block.text).splitlines():
            before, pipe, _ = line.partition(" | ")
            if line.startswith("dgemma ") or (pipe and not before.startswith("dgemma ")):
                text, status = run(line, self._monkeypatch)
                assert status == 0, f"{line}\n{text}"
                printed_lines.append(text)
            else:
                printed_lines.append(self._reader.run("sh", line))
        return "".join(printed_lines)


PAGES = {
    str(path.relative_to(DOCS)): list(blocks_of(path.read_text())) for path in sorted(DOCS.rglob("*.md"))
}
RUN = [page for page, blocks in PAGES.items() if blocks and page not in ELSEWHERE]


@pytest.mark.parametrize("page", [page for page in RUN if IS_FULL or page not in SLOW])
def test_each_block_prints_what_is_written_behind_it(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    checker, wrong = doctest.OutputChecker(), list[str]()
    with ExitStack() as servers:
        follower = Follower(tmp_path, servers, monkeypatch)
        for block in PAGES[page]:
            printed = follower.follow(block)
            if (
                page.startswith("tutorials/")
                and block.prints is not None
                and not checker.check_output(block.prints, printed, FLAGS)
            ):
                wrong.append(f"{block.text}--- prints\n{printed}--- documented\n{block.prints}")
    assert not wrong, "\n".join(wrong)


def test_every_tutorial_has_blocks_that_are_run() -> None:
    assert all(len(blocks) >= 3 for page, blocks in PAGES.items() if page.startswith("tutorials/"))


# Records of what was run on some day; docs/commands.md has a test of its own.
RECORDS = {"commands.md", "first-five-minutes.md", "lab-notes.md", "newcomer.md"}
COMMAND = r"(?:\$ )?(?:dgemma|pip|python|curl|make|torchrun|podman|docker|cd|mkdir|git|from|import) "


def unmarked_commands(page: str) -> list[str]:
    """The first lines of `text` blocks of commands that nothing runs and that do not say why."""
    without_output = re.sub(
        r"^```(?:sh|python)\n.*?^```\n(?:\n+```text\n.*?^```$)?", "", page, flags=re.M | re.S
    )
    return re.findall(rf"(?<! -->\n)^```text\n({COMMAND}.*)$", without_output, re.M)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in RECORDS] + ["../README.md"])
def test_a_block_of_commands_is_run_or_says_why_not(page: str) -> None:
    assert unmarked_commands((DOCS / page).read_text()) == []


def test_an_unmarked_block_of_commands_is_seen() -> None:
    block = "```text\ndgemma list\n```\n"
    assert unmarked_commands(f"# x\n\n{block}") == ["dgemma list"]
    assert unmarked_commands(f"<!-- not run: for a test -->\n{block}") == []
    assert unmarked_commands(f"```sh\nls\n```\n\n{block}") == []


def test_a_wrong_output_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (
        "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n\n<!-- not run: for a test -->\n```sh\nfalse\n```\n"
    )
    (block,) = blocks_of(page)
    with ExitStack() as servers:
        printed = Follower(tmp_path, servers, monkeypatch).follow(block)
    assert printed == "2\n"
    assert not doctest.OutputChecker().check_output(block.prints or "", printed, FLAGS)
