"""`dgemma plan` as a user types it: a page, JSON, a picture, and errors before anything is simulated."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dgemma.cli.main import main

LOAD = ["--rps", "0.2", "--prompt", "200", "--answer", "60", "--p99", "8", "--requests", "200"]


def test_a_page_and_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figure = tmp_path / "plan.svg"
    status = main(["plan", "--hardware", "dgx-spark", *LOAD, "--price", "0.5", "--svg", str(figure)])
    out, err = capsys.readouterr()
    assert status == 0
    assert out.startswith("NVIDIA DGX Spark (GB10), nvfp4: by the cost model, never run by us\n")
    assert "price of 1 M tokens" in out
    assert "eft to right" in out.splitlines()[-1]
    assert "one replica at" in err  # what takes long says how far it is
    assert "left to right, 1 replicas" in figure.read_text()


def test_json_of_a_model_that_is_measured_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["new", str(tmp_path / "tiny"), "--preset", "tiny"]) == 0
    capsys.readouterr()
    load = ["--rps", "0.2", "--prompt", "20", "--answer", "6", "--spread", "0", "--p99", "10"]
    assert main(["plan", str(tmp_path / "tiny"), *load, "--max-num-seqs", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["traffic"]["prompt"] == 20
    assert [plan["kind"] for plan in found["plans"]] == ["diffusion", "left to right"]
    assert all(plan["replicas"] == 1 for plan in found["plans"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "Give --hardware DEVICE, or MODEL"),
        (["bundled:text", "--hardware", "h100"], "Give --hardware DEVICE, or MODEL"),
        (["--hardware", "h1000"], "is not a known device"),
        (["--hardware", "h100x0"], "has no device"),
        (["--hardware", "h100", "--steps", "0"], "--steps is 0"),
        (["--hardware", "h100", "--prompt", "0"], "prompt is 0"),
        (["--hardware", "h100", "--svg", "/nowhere/at/all.svg"], "there is no directory"),
        (["--hardware", "h100", "--svg", "plan.nosuch"], "the name can end in .svg, or one of"),
        (["--hardware", "h100", "--spread", "nan"], "spread is nan; it must be from 0 to 10."),
        (["--hardware", "h100", "--price", "-1"], "--price is -1"),
        (["--hardware", "rtx4090", "--format", "bf16"], "do not fit"),
        (["bundled:text", "--format", "bf16"], "--format belongs to --hardware"),
        (["--hardware", "h100", "--mean-life", "0"], "mean_life_s is 0"),
        (["--hardware", "h100", "--start", "-1"], "start_s is -1"),
        (["--hardware", "h100", "--p99", "0"], "p99_s is 0"),
        (["--hardware", "h100", "--rps", "1e9"], "more than 4096 replicas"),
        (["--hardware", "h100", "--answer", "400000"], "does not fit"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *LOAD, *argv]) != 0
    assert words in capsys.readouterr().err


def test_a_figure_that_cannot_be_drawn_is_told_before_anything_is_simulated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("dgemma.plan.planner.size", lambda *args, **options: pytest.fail("it was simulated"))
    assert main(["plan", "--hardware", "h100", *LOAD, "--svg", "a.svg"]) == 2
    assert "a figure needs matplotlib" in capsys.readouterr().err


def test_a_goal_that_nothing_meets_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--hardware", "dgx-spark", *LOAD, "--p99", "0.1"]) == 0
    assert "no number of replicas meets the goal" in capsys.readouterr().out
