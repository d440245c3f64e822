"""The committed playbooks are what the code computes, and nothing in them is out of reach."""

from __future__ import annotations

import re
import shlex

import pytest

from dgemma.bench.devices import DEVICES
from dgemma.bench.playbooks import PLAYBOOKS, Playbook
from dgemma.cli.main import build_parser
from tools.write_playbooks import PAGES, PART, PARTS, longest, sequences, written

ALL = pytest.mark.parametrize("playbook", PLAYBOOKS.values(), ids=lambda one: one.name)


@ALL
def test_the_committed_page_is_what_the_tool_writes(playbook: Playbook) -> None:
    text = (PAGES / f"{playbook.name}.md").read_text()
    assert {match["name"] for match in PART.finditer(text)} == set(PARTS)
    assert written(text, playbook) == text, "run: python -m tools.write_playbooks"


def test_a_stale_number_is_written_anew() -> None:
    playbook = PLAYBOOKS["dgx-spark"]
    text = (PAGES / "dgx-spark.md").read_text()
    stale = text.replace("50.5 GB", "49.5 GB")
    assert stale != text == written(stale, playbook)


@ALL
def test_each_page_says_what_was_never_run_and_what_to_send(playbook: Playbook) -> None:
    text = (PAGES / f"{playbook.name}.md").read_text()
    assert "**Nothing on this page was run by us**" in text or playbook.name == "cpu"
    assert "never" in text.partition("## Install")[0]
    assert all(name in text for name in ("selfcheck.json", "bench.json"))


@ALL
def test_every_command_of_a_page_parses(playbook: Playbook) -> None:
    text = (PAGES / f"{playbook.name}.md").read_text()
    lines = re.findall(r"^(dgemma .*)$", text, re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        build_parser().parse_args(shlex.split(line.partition(" > ")[0])[1:])


def test_the_index_names_every_page() -> None:
    text = (PAGES / "index.md").read_text()
    assert set(re.findall(r"\(([\w-]+)\.md\)", text)) == set(PLAYBOOKS)
    assert {path.stem for path in PAGES.glob("*.md")} == {*PLAYBOOKS, "index"}


def test_more_memory_holds_more_and_longer_sequences() -> None:
    small, large = DEVICES["rtx4090"], DEVICES["rtx5090"]
    assert 0 < sequences(small, "int4") <= sequences(large, "int4")
    assert 0 < longest(small, "int4") < longest(large, "int4")
    assert sequences(small, "bf16") == longest(small, "bf16") == 0
