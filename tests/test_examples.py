"""The examples run: fills and pins keep what they were given, an agent's calls are of its tools."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import jsonschema
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    names = runpy.run_path(str(EXAMPLES / name))
    names["main"]()
    return names, capsys.readouterr().out


def test_a_gap_is_filled_between_its_two_ends(capsys: pytest.CaptureFixture[str]) -> None:
    names, out = run("sentence_between.py", capsys)
    assert out.startswith(names["BEFORE"])
    filled, after, _ = out.removeprefix(names["BEFORE"]).partition(names["AFTER"])
    assert after
    assert filled


def test_every_blank_is_filled_and_the_text_stays(capsys: pytest.CaptureFixture[str]) -> None:
    names, out = run("text_with_blanks.py", capsys)
    for part in names["TEXT"].split("<FILL>"):
        assert part in out
        out = out.partition(part)[2]
    assert "<FILL>" not in out


def test_a_motif_stands_where_it_was_pinned(capsys: pytest.CaptureFixture[str]) -> None:
    names, out = run("sequence_with_motif.py", capsys)
    sequence = out.splitlines()[0]
    assert len(sequence) == names["LENGTH"]
    assert {at: sequence[at] for at in names["MOTIF"]} == names["MOTIF"]
    assert set(sequence) <= set(names["AMINO_ACIDS"])


def test_the_agent_calls_its_tools_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    """The same tools in the same order as in the transcript of docs/agents.md; a number may be rounded
    differently on another processor, so arguments may differ, but always are those of the tool."""
    names, out = run("agent_loop.py", capsys)
    calls = re.findall(r"^call     (\w+) (.*)$", out, re.MULTILINE)
    page = (EXAMPLES.parent / "docs" / "agents.md").read_text()
    told = re.findall(r"^call     (\w+) ", page, re.MULTILINE)
    assert [name for name, _ in calls] == told == ["measurement", "measurement", "log", "appointment"]
    assert set(told) == set(names["TOOLS"])
    for name, arguments in calls:
        jsonschema.validate({"type": name, **json.loads(arguments)}, names["any_schema"]())
