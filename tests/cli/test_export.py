"""`dgemma export` as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest

import dgemma
from adapters import SETTINGS, train
from dgemma.checkpoint.source import open_checkpoint
from dgemma.cli import export
from dgemma.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    status = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "int4"
    assert main(["new", str(path), "--quantize", "int4"]) == 0
    return path


def test_a_quantized_model_with_an_adapter_becomes_a_plain_one(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(dgemma.load(packed).with_adapter(SETTINGS), seed=1).save_adapter(tmp_path / "adapter")
    status, page, _ = run(capsys, "export", packed, tmp_path / "out", "--adapter", tmp_path / "adapter")
    assert status == 0
    assert page.splitlines()[0] == f"{tmp_path}/out: {packed} for Transformers and vLLM, 0.8 MB"
    assert not open_checkpoint(tmp_path / "out").quantized
    assert dgemma.load(tmp_path / "out").generate([1, 2, 3], max_tokens=4, seed=1).tokens


def test_for_vllm_alone_experts_stay_quantized(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, page, _ = run(capsys, "export", packed, tmp_path / "out", "--to", "vllm")
    assert status == 0
    assert page.splitlines()[0] == f"{tmp_path}/out: {packed} for vLLM, 0.6 MB"
    assert open_checkpoint(tmp_path / "out").quantized
    status, _, err = run(capsys, "export", "bundled:sudoku", tmp_path / "plain", "--to", "vllm")
    assert status == 2
    assert "are in plain weights. `--to hf` writes plain weights, which vLLM reads too" in err
    assert not (tmp_path / "plain").exists()


def test_it_says_where_vllm_will_compute_other_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, page, _ = run(capsys, "export", "bundled:sudoku", tmp_path / "out")
    assert status == 0
    assert page.splitlines()[1].startswith(
        "note: 6 of 6 layers have a layer_scalar for each of their two pass"
    )


def test_a_taken_directory_and_a_full_disk_are_refused_before_anything_is_read(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, err = run(capsys, "export", "no/where", packed)
    assert status == 1
    assert "already holds a checkpoint; choose another directory" in err
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Usage", (), {"free": 10}))
    status, _, err = run(capsys, "export", packed, tmp_path / "out")
    assert status == 1
    assert "Choose another disk, or free some space" in err
    assert not (tmp_path / "out").exists()


def test_the_choices_of_the_option_are_the_runtimes_and_the_files() -> None:
    import argparse

    from dgemma.checkpoint.export import RUNTIMES

    parser = argparse.ArgumentParser()
    export.add_arguments(parser)
    (to,) = (action for action in parser._actions if action.dest == "to")
    assert to.choices == (*RUNTIMES, *export._FORMATS)
