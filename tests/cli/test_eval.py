"""`dgemma eval` as a user types it: the report on stdout, all else on stderr, Ctrl-C keeps what there is."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from dgemma import LanguageModel
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.cli import main as command_line
from dgemma.cli.views import progress
from dgemma.evaluation.results import read_results

FEW = ("--max-tokens", "20", "--max-denoising-steps", "2", "--seed", "3", "--exact")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_random(path, PRESETS["tiny"].config, dtype="F32", seed=1)
    return str(path)


@pytest.fixture
def data(tmp_path: Path) -> str:
    lines = [
        {"prompt": f"Say {number}.", "response": str(number), "group": "odd" if number % 2 else "even"}
        for number in range(6)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(tmp_path / "data.jsonl")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 1e9)  # no line more on a slow machine


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        status = command_line.main(["eval", *argv])
    except SystemExit as stop:
        status = int(stop.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


def test_the_report_in_a_pipe_is_aligned_text(
    model: str, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, model, data, *FEW, "--batch", "4")
    assert (status, err) == (0, "")
    scores, facts = out.rstrip("\n").split("\n\n")
    header, *rows = scores.splitlines()
    assert header.split() == ["score", "mean", "95", "%", "interval", "n"]
    assert [row.split()[0] for row in rows] == ["exact", "contains", "chars"]
    assert {len(line) for line in (header, *rows)} == {len(header)}
    assert rows[0].split()[1:] == ["0.000", "0.000", "to", "0.390", "6"]
    names = [
        "examples", "steps per canvas", "tokens per forward", "seconds per example", "tokens per second",
        "finish", "seed",
    ]  # fmt: skip
    assert [line.split("   ")[0].strip() for line in facts.splitlines()] == names
    assert "2.000 mean, 2 in 9 of 10 at most" in facts
    assert facts.splitlines()[-1].split() == ["seed", "3"]


def test_json_is_one_object_with_the_documented_keys(
    model: str, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, model, data, *FEW, "--limit", "4", "--json")
    assert (status, err, out.count("\n")) == (0, "", 1)
    found = json.loads(out)
    assert list(found) == [
        "task", "model", "n", "failed", "stopped", "scores", "steps_mean", "steps_p90", "tokens_per_forward",
        "seconds_per_example", "tokens_per_second", "finish_reasons", "groups", "failures", "settings",
    ]  # fmt: skip
    assert (found["task"], found["model"], found["n"], found["stopped"]) == ("data.jsonl", model, 4, None)
    assert list(found["scores"]["exact"]) == ["n", "mean", "low", "high", "method"]
    assert list(found["groups"]) == ["even", "odd"]
    assert found["settings"]["seed"] == 3
    again = json.loads(run(capsys, model, data, *FEW, "--limit", "4", "--batch", "3", "--json")[1])
    assert again["scores"] == found["scores"]


def test_every_option_reaches_the_run(model: str, data: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = "--preset fast --temperature 0.5 --decode auto --stop a --stop b --deadline 60 --max-tokens 9"
    status, out, _ = run(
        capsys, model, data, *argv.split(), "--system", "Be brief.", "--limit", "1", "--json"
    )
    assert status == 0
    settings = json.loads(out)["settings"]
    assert settings["system"] == "Be brief."
    found = settings["options"]
    assert (found["max_denoising_steps"], found["entropy_bound"], found["temperature"]) == (24, 0.3, 0.5)
    assert (found["decode"], found["stop"], found["deadline_s"]) == ("auto", ["a", "b"], 60.0)
    raw = json.loads(run(capsys, model, data, *FEW, "--limit", "1", "--raw", "--json")[1])["settings"]
    assert raw["raw"]
    assert raw["exact"]


def test_groups_and_stats_are_shown_when_asked_for(
    model: str, data: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, out, err = run(capsys, model, data, *FEW, "--group", "--stats")
    assert status == 0
    groups = out.rstrip("\n").split("\n\n")[2].splitlines()
    assert [line.split()[:2] for line in groups[1:]] == [
        [group, score] for group in ("even", "odd") for score in ("exact", "contains", "chars")
    ]
    assert [line.split(":")[0] for line in err.splitlines()] == [f"example {n}" for n in range(6)]
    assert "20 tokens" in err
    assert "steps 2, " in err
    (tmp_path / "plain.jsonl").write_text('{"prompt": "x", "response": "y"}')
    causal = ("--decode", "causal", "--group", "--stats")
    status, out, err = run(capsys, model, str(tmp_path / "plain.jsonl"), *FEW, *causal)
    assert status == 0
    assert "steps none, written left to right" in err
    assert err.endswith("task 'plain.jsonl' has no groups\n")
    assert "steps per canvas      -" in out


def test_a_run_goes_on_from_its_file(
    model: str, data: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out_file = str(tmp_path / "run.jsonl")
    whole = json.loads(run(capsys, model, data, *FEW, "--json")[1])
    run(capsys, model, data, *FEW, "--limit", "2", "--out", out_file)
    status, out, err = run(capsys, model, data, *FEW, "--out", out_file, "--json")
    assert (status, err) == (0, f"going on from {out_file}, which has 2 results\n")
    assert json.loads(out)["scores"] == whole["scores"]
    assert sorted(read_results(out_file).results) == list(range(6))
    status, out, err = run(capsys, model, data, *FEW[2:], "--max-tokens", "21", "--out", out_file)
    assert (status, out) == (2, "")
    assert err == (
        f"dgemma eval: {out_file} holds results of other settings: options.max_tokens is 20, not 21. "
        "Choose another file, or remove it.\n"
    )


def test_two_runs_are_compared(
    model: str, data: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = str(tmp_path / "other.jsonl")
    run(capsys, model, data, *FEW, "--out", other)
    steps = ("--max-denoising-steps", "3", "--compare", other)
    status, out, err = run(capsys, model, data, *FEW, *steps)
    assert status == 0
    table = out.rstrip("\n").split("\n\n")[2].splitlines()
    assert table[0].split("  ")[0] == "this minus other"
    assert table[-1].split() == ["steps", "+1.000", "+1.000", "to", "+1.000", "6", "0", "6", "0.031"]
    assert err == "compared with other settings: options.max_denoising_steps is 3, not 2\n"
    found = json.loads(run(capsys, model, data, *FEW, *steps, "--json")[1])["comparison"]
    assert found["with"] == other
    assert found["differences"]["steps"]["mean"] == 1
    assert found["settings"] == ["options.max_denoising_steps is 3, not 2"]
    (tmp_path / "else.jsonl").write_text('{"prompt": "x", "response": "y"}')
    status, out, err = run(capsys, model, str(tmp_path / "else.jsonl"), *FEW, "--compare", other)
    assert status == 2
    assert "example 0 is another one in the other run" in err


TASK = """
class Mine:
    name = "mine"
    def examples(self):
        yield from range(9)
        raise OSError("the disk is gone")
    def prompt(self, example): return "x" if example else [2] * 9000
    def score(self, example, answer): return {"ok": 1 / (example - 1)}

class AllFail(Mine):
    def examples(self): return range(9)
    def prompt(self, example): return 1 / 0
"""


def test_failures_are_told_and_the_run_goes_on(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    argv = (model, f"{tmp_path}/mine.py:Mine", *FEW)
    status, out, err = run(capsys, *argv, "--limit", "4", "--batch", "3")
    assert status == 0
    assert "4, 2 failed" in out
    lines = err.splitlines()
    assert lines[0].startswith("example 0 failed: the prompt has 9000 tokens; this model's context of 8192")
    assert lines[1].startswith("example 1 failed: score() of task 'mine' raised ZeroDivisionError")
    status, out, err = run(capsys, *argv, "--json")  # the examples break off
    assert status == 1
    assert json.loads(out)["n"] == 9
    assert "dgemma eval: example 9: examples() of task 'mine' raised OSError: the disk is gone" in err
    status, out, err = run(capsys, model, f"{tmp_path}/mine.py:AllFail", *FEW, "--stats")
    assert status == 1
    assert "9, 9 failed" in out
    assert err.count("failed: prompt() of task 'mine' raised ZeroDivisionError") == 5
    assert err.count("more examples failed; --json and --out have all reasons") == 1
    assert err.count(": no scores; seed ") == 9
    assert err.endswith("dgemma eval: every example failed\n")


def test_an_interrupt_leaves_with_what_there_is(
    model: str, data: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    generate = LanguageModel.generate
    calls: list[int] = []

    def interrupted(self: LanguageModel, prompts: Any, **options: Any) -> Any:
        calls.append(len(prompts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return generate(self, prompts, **options)

    monkeypatch.setattr(LanguageModel, "generate", interrupted)
    out_file = tmp_path / "run.jsonl"
    status, out, err = run(capsys, model, data, *FEW, "--batch", "2", "--out", str(out_file))
    assert (status, err) == (130, "dgemma eval: interrupted after 4 examples\n")
    assert out.splitlines()[1].split()[-1] == "4"
    assert sorted(read_results(out_file).results) == [0, 1, 2, 3]
    calls[:] = [0, 0]
    assert run(capsys, model, data, *FEW) == (130, "", "dgemma eval: interrupted after 0 examples\n")


def test_progress_is_plain_lines_in_a_pipe(
    model: str, data: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    _, _, err = run(capsys, model, data, *FEW, "--limit", "2")
    evaluating = [line for line in err.splitlines() if not line.startswith("loading: ")]
    assert evaluating == ["eval: 1 of 2 examples", "eval: 2 of 2 examples"]


def test_on_a_terminal_there_are_a_bar_and_a_drawn_table(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(TASK.replace('"ok"', '"ok\\x1b[31m"'))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    status, out, err = run(capsys, model, f"{tmp_path}/mine.py:Mine", *FEW, "--limit", "4", "--group")
    assert status == 0
    assert "─" in out
    assert "95 % interval" in out
    assert "ok␛[31m" in out  # what a task calls its scores is shown, not obeyed
    assert "example 0 failed: the prompt has 9000 tokens" in err
    assert "eval: " not in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["{model}", "nowhere.jsonl"], "nowhere.jsonl cannot be read: No such file or directory."),
        (
            ["{model}", "reasoning-gim:x"],
            "task 'reasoning-gim:x' is not known; did you mean 'reasoning-gym'?",
        ),
        (["{model}", "{data}", "--limit", "0"], "limit is 0; it must be a whole number of at least 1."),
        (["{model}", "{data}", "--batch", "-1"], "batch is -1"),
        (["{model}", "{data}", "--max-tokens", "0"], "max_tokens is 0"),
        (["{model}", "{data}", "--compare", "none"], "none cannot be read: No such file or directory."),
        (["{model}", "{data}", "--out", "/nowhere/x"], "--out /nowhere/x: there is no directory /nowhere."),
        (
            ["{model}", "{data}", "--raw", "--system", "x"],
            "system needs the chat template, and raw leaves it",
        ),
        (["/nowhere/at/all", "{data}"], "/nowhere/at/all does not exist"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    argv: list[str], message: str, model: str, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, *(word.format(model=model, data=data) for word in argv))
    assert (status, out) == (1 if "does not exist" in message else 2, "")
    assert err.startswith(f"dgemma eval: {message}")
    assert err.count("\n") == 1


def test_what_can_be_refused_is_refused_before_the_model_is_loaded(
    data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv in (
        ["no.jsonl"], [data, "--limit", "0"], [data, "--compare", "none"], [data, "--stop", ""],
        [data, "--out", "none/x"], ["loss:x", "--out", "x"], ["loss:x", "--trace", "x"],
    ):  # fmt: skip
        assert "not-loaded" not in run(capsys, "not-loaded/at-all", *argv)[2]


def test_the_task_in_the_documentation_runs(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "evaluation.md").read_text()
    (code,) = re.findall(r"```python\n(class .*?)```", page, re.DOTALL)
    (tmp_path / "capitals.py").write_text(code)
    status, out, err = run(capsys, model, f"{tmp_path}/capitals.py:Capitals", *FEW[2:], "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["task"], found["n"], found["failed"]) == ("capitals", 3, 0)
    assert list(found["scores"]) == ["right", "letters"]
    assert found["settings"]["options"]["max_tokens"] == 16


def test_sudoku_needs_no_model_and_takes_a_band(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("sudoku", "--band", "easy", "--limit", "2", "--batch", "2", "--seed", "0", "--json")
    status, out, _ = run(capsys, *argv)
    told = json.loads(out)
    assert status == 0
    assert (told["task"], told["model"], told["n"]) == ("sudoku:easy", "bundled:sudoku", 2)
    assert set(told["scores"]) == {"exact", "valid", "cells", "clues"}
    again = json.loads(run(capsys, "bundled:sudoku", *argv)[1])
    turned = json.loads(run(capsys, "sudoku", "bundled:sudoku", *argv[1:])[1])
    assert again["scores"] == turned["scores"] == told["scores"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("some-model",), "no task; give MODEL and TASK, or one of sudoku alone"),
        (("some-model", "data.jsonl", "--band", "easy"), "--band is for the task sudoku"),
    ],
)
def test_a_missing_task_or_a_band_of_another_is_refused(
    argv: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert said in err
