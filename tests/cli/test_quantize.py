"""`dgemma quantize` and `dgemma new --quantize` as a person gives them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from dgemma.cli.main import main
from dgemma.evaluation import quantized_report
from dgemma.loading import load
from dgemma.machine import MemoryFacts


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(words)
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("plain") / "model")
    assert main(["new", path]) == 0
    return path


@pytest.fixture
def two_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones: random weights answer every prompt with a whole canvas of noise."""
    monkeypatch.setattr(quantized_report, "_PROMPTS", ("Why is the sea salty?", "List the planets."))


def test_it_writes_and_reports_what_it_did(
    plain: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], two_prompts: None
) -> None:
    out = tmp_path / "q"
    status, page, _ = run(capsys, "quantize", plain, str(out), "--format", "int8")
    assert status == 0
    assert "int8, 0.4 MB where" in page
    assert "steps per canvas" in page
    assert "the argmax token is the same at" in page
    status, text, _ = run(capsys, "generate", str(out), "Why?", "--max-tokens", "8", "--seed", "1")
    assert status == 0
    assert text


def test_a_program_gets_one_object(
    plain: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], two_prompts: None
) -> None:
    status, text, _ = run(capsys, "quantize", plain, str(tmp_path / "q"), "--json")
    found = json.loads(text)
    assert status == 0
    assert found["format"] == "int4"
    assert found["bytes"] < found["plain_bytes"] / 1.9
    assert found["report"]["bytes"][1] == load(tmp_path / "q").nbytes
    assert 0 < found["report"]["kl_nats"] < 1
    assert found["not_compared"] is None


def test_without_room_for_both_it_says_so_and_why(
    plain: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = MemoryFacts(memory_bytes=10**9, available_bytes=10**9)
    monkeypatch.setattr("dgemma.cli.quantize.memory_facts", lambda: small)
    status, page, _ = run(capsys, "quantize", plain, str(tmp_path / "q"))
    assert status == 0
    assert "not compared: both models need 2.0 GB of memory, 1.0 GB are free" in page
    assert (tmp_path / "q" / "config.json").exists()


def test_a_second_time_is_refused(plain: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "q")
    assert run(capsys, "quantize", plain, out, "--no-report")[0] == 0
    status, _, err = run(capsys, "quantize", plain, out, "--no-report")
    assert status == 1
    assert "already holds a checkpoint" in err
    status, _, err = run(capsys, "quantize", out, str(tmp_path / "r"), "--no-report")
    assert status == 1
    assert "quantizing needs the plain checkpoint" in err


def test_new_makes_quantized_weights_directly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "q")
    status, page, _ = run(capsys, "new", out, "--quantize", "nvfp4")
    assert status == 0
    assert "random weights in nvfp4" in page
    assert load(out).generate([1, 2, 3], max_tokens=4, seed=1).tokens
    status, _, err = run(capsys, "new", out, "--quantize", "nvfp4")
    assert status == 1
    assert "already holds a checkpoint" in err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--task", "nosuch"), "task 'nosuch' is not known"),
        (("--limit", "0"), "limit is 0"),
    ],
)
def test_what_the_report_would_refuse_is_refused_before_the_work(
    plain: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], problem: str
) -> None:
    status, _, err = run(capsys, "quantize", plain, str(tmp_path / "q"), *words)
    assert status == 2
    assert problem in err
    assert not (tmp_path / "q").exists()


def test_a_full_disk_is_noticed_before_the_work(
    plain: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=1000))
    status, _, err = run(capsys, "quantize", plain, str(tmp_path / "q"))
    assert status == 1
    assert re.search(r"needs \d[\d.]+ [kM]B, .* has 1\.0 kB free\. Choose a format of fewer bits", err)
    assert not (tmp_path / "q").exists()
