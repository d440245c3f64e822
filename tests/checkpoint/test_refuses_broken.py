"""Every broken checkpoint is refused with a typed error that names the fault, and no traceback."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import dgemma
from broken_checkpoints import BREAKS, Break
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.checkpoint.source import _refuse_missing_and_extra, read_json
from dgemma.cli.main import main


@pytest.fixture(scope="session")
def good_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "tiny"
    write_random(path, PRESETS["tiny"].config, max_shard_bytes=500_000)
    return path


def test_there_are_at_least_thirty_and_the_unbroken_one_loads(good_checkpoint: Path) -> None:
    assert len(BREAKS) >= 30
    assert dgemma.load(good_checkpoint).config.vocab_size == 2048


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda f: f.__name__)
def test_a_broken_checkpoint_is_refused_by_name(
    break_it: Break, good_checkpoint: Path, tmp_path: Path
) -> None:
    target = tmp_path / "model"
    shutil.copytree(good_checkpoint, target)
    message = break_it(target)
    with pytest.raises(dgemma.DgemmaError) as caught:
        dgemma.load(target)
    assert message in str(caught.value), str(caught.value)
    assert isinstance(caught.value, dgemma.CheckpointError | dgemma.ConfigError)


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda f: f.__name__)
def test_the_command_line_shows_one_line_and_no_traceback(
    break_it: Break,
    good_checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "model"
    shutil.copytree(good_checkpoint, target)
    message = break_it(target)
    status = main(["info", "--check", str(target)])
    captured = capsys.readouterr()
    assert status == 1
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert message in captured.err
    assert captured.err.startswith("dgemma info: ")
    assert captured.err.count("\n") == 1


def test_a_config_that_is_too_large_or_unreadable_is_refused(
    good_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    shutil.copytree(good_checkpoint, target)
    with (target / "config.json").open("r+b") as file:
        file.truncate(65 << 20)
    with pytest.raises(dgemma.CheckpointError, match="larger than 64 MiB"):
        dgemma.load(target)

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(dgemma.CheckpointError, match="cannot be read: Permission denied"):
        dgemma.load(good_checkpoint)


def test_a_directory_that_cannot_be_made_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "--config-only", "/proc/none/here"]) == 1
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "problem"), [(64 << 20, "is not valid JSON"), ((64 << 20) + 1, "larger than")]
)
def test_a_config_of_64_mib_is_read_and_no_larger_one(size: int, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with file.open("wb") as new:
        new.truncate(size)
    with pytest.raises(dgemma.CheckpointError, match=problem):
        read_json(file)


@pytest.mark.parametrize("weight_map", [{}, [], "text", 7, None])
def test_an_index_without_a_map_of_weights_is_refused(
    weight_map: object, good_checkpoint: Path, tmp_path: Path
) -> None:
    target = tmp_path / "model"
    shutil.copytree(good_checkpoint, target)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(dgemma.CheckpointError, match="has no weight_map; it is corrupt"):
        dgemma.load(target)


@pytest.mark.parametrize("name", ["a\0.safetensors", "\ud800.safetensors", "a\n.safetensors"])
def test_an_index_with_a_name_that_no_file_has_is_refused(
    name: str, good_checkpoint: Path, tmp_path: Path
) -> None:
    target = tmp_path / "model"
    shutil.copytree(good_checkpoint, target)
    file = target / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["lm_head.weight"] = name
    file.write_text(json.dumps(index))
    with pytest.raises(dgemma.CheckpointError, match="only safetensors files beside the index are read"):
        dgemma.load(target)


def test_an_index_that_is_a_pipe_is_not_waited_for(good_checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    shutil.copytree(good_checkpoint, target)
    (target / "model.safetensors.index.json").unlink()
    os.mkfifo(target / "model.safetensors.index.json")
    with pytest.raises(dgemma.CheckpointError, match=r"has neither model\.safetensors nor"):
        dgemma.load(target)


@pytest.mark.parametrize(
    ("count", "listed"), [(1, "'a'."), (3, "'a', 'b', 'c'."), (4, "'a', 'b', 'c' and 1 more.")]
)
def test_of_many_missing_tensors_three_are_named(count: int, listed: str) -> None:
    with pytest.raises(dgemma.CheckpointError) as caught:
        _refuse_missing_and_extra(Path("model"), list("abcd"[:count]), [], [])
    assert f"model lacks {count} tensors: {listed} The download" in str(caught.value)
