"""The examples run: fills and pins keep what they were given, an agent's calls are of its tools."""

from __future__ import annotations

import io
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import dgemma
from cli.canvas_model import run as run_command
from sizes import IS_FULL

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


def test_the_chat_bot_answers_each_line_and_is_told_what_was_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [f"Emma has {count} books." for count in range(1, 7)]
    told: list[list[dict[str, str]]] = []
    stream_chat = dgemma.LanguageModel.stream_chat

    def seen(lm: dgemma.LanguageModel, messages: list[dict[str, str]], **options: Any) -> Any:
        told.append(messages)
        return stream_chat(lm, messages, **{**options, "decode": "causal", "max_tokens": 8, "seed": 1})

    monkeypatch.setattr(dgemma.LanguageModel, "stream_chat", seen)
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in asked)))
    names, out = run("chat_bot.py", capsys)
    answers = out.splitlines()
    assert len(answers) == len(asked) == len(told)
    said = [text for pair in zip(asked, answers, strict=True) for text in pair]
    for turn, messages in enumerate(told):
        assert [message["content"] for message in messages] == said[: 2 * turn + 1][-names["RECENT"] :]
        assert messages[0]["role"] == messages[-1]["role"] == "user"


@pytest.mark.skipif(not IS_FULL, reason="half a minute of training; `make documented` runs it too")
def test_the_adapter_answers_what_its_base_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    names, out = run("lora_then_serve.py", capsys)
    assert [line.split(" {")[0] for line in out.splitlines()] == list(names["FACTS"])
    assert all(f"'facts': '{fact}'" in out for fact in names["FACTS"].values())


def test_every_request_of_the_batch_file_is_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = EXAMPLES / "batch.jsonl"
    results = tmp_path / "results.jsonl"
    model = ("bundled:text", str(requests), str(results), "--served-model-name", "dgemma")
    status, _, err = run_command(capsys, "run-batch", *model)
    assert status == 0, err
    asked = [json.loads(line)["custom_id"] for line in requests.read_text().splitlines()]
    lines = map(json.loads, results.read_text().splitlines())
    found = {line["custom_id"]: line["response"] for line in lines}
    assert sorted(found) == sorted(asked)
    assert {response["status_code"] for response in found.values()} == {200}
    assert found["gap"]["body"]["choices"][0]["text"] == "g"
    mended = found["typos"]["body"]["choices"][0]["message"]["content"]
    assert mended == "Every morning Emma gave the dog some fresh water."
