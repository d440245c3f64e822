"""A checkpoint that was interrupted goes on to the same files; links out of a checkpoint are not copied."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dgemma
from adapters import SETTINGS, train
from dgemma.checkpoint import save
from dgemma.checkpoint.export import plan_export, write_export
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.quantized.quantization_config import quantization_config_for
from dgemma.checkpoint.quantized.writer import from_checkpoint, write_quantized
from dgemma.checkpoint.random_weights import write_random
from dgemma.checkpoint.save import JOURNAL
from dgemma.checkpoint.source import open_checkpoint
from dgemma.cli.main import main
from dgemma.durable_files import locked
from dgemma.errors import CheckpointError, InputError

CONFIG = PRESETS["tiny"].config


class Killed(BaseException):
    """Nothing of the code under test catches it, as nothing catches SIGKILL."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "base"
    write_random(path, CONFIG, seed=1)
    train(dgemma.load(path).with_adapter(SETTINGS), seed=1).save_adapter(path.with_name("adapter"))
    return path


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def new(base: Path, out: Path) -> None:
    write_random(out, CONFIG, seed=7, max_shard_bytes=300_000)


def merge(base: Path, out: Path) -> None:
    assert main(["merge", str(base), str(base.with_name("adapter")), str(out)]) == 0


def save_in_memory(base: Path, out: Path) -> None:
    dgemma.load(base).save(out, max_shard_bytes=300_000)


def quantize(base: Path, out: Path) -> None:
    source = open_checkpoint(base)
    write_quantized(out, from_checkpoint(source), quantization_config_for("int8", source.config))


def export(base: Path, out: Path) -> None:
    write_export(out, plan_export(open_checkpoint(base)), max_shard_bytes=300_000)


WRITERS = [new, merge, save_in_memory, quantize, export]
Writer = Callable[[Path, Path], None]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("moment", ["before weights", "between weights", "before config", "at the end"])
def test_a_killed_command_is_run_again_to_the_same_files(
    write: Writer, moment: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(base, tmp_path / "whole")
    whole = contents(tmp_path / "whole")
    assert "config.json" in whole
    assert JOURNAL not in whole
    write_file, write_json = save.write_file, save.write_json
    left = int(moment == "between weights")  # complete files of weights

    def kill(*args: Any) -> Any:
        raise Killed

    def kill_weights(*args: Any) -> str:
        nonlocal left
        left -= 1
        return write_file(*args) if left >= 0 else kill()

    def kill_config(file: Path, content: dict[str, Any]) -> None:
        kill() if file.name == "config.json" else write_json(file, content)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        if moment == "at the end":
            patch.setattr(save._Journal, "remove", kill)
        elif moment == "before config" or write is merge:  # which has one file of weights here
            patch.setattr(save, "write_json", kill_config)
        else:
            patch.setattr(save, "write_file", kill_weights)
        with pytest.raises(Killed):
            write(base, out)
    if moment != "at the end":
        with pytest.raises(CheckpointError, match=r"config\.json is missing"):
            open_checkpoint(out)
    write(base, out)
    assert contents(out) == whole


def test_files_of_an_earlier_save_from_memory_are_not_mixed_in(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in memory have no name to recognise them by: nothing is kept."""
    lm, out = dgemma.load(base), tmp_path / "out"

    def kill(self: object) -> None:
        raise Killed

    for bytes_each in (10**9, 300_000):  # one file, then several: a reader prefers the single one
        with monkeypatch.context() as patch:
            patch.setattr(save._Journal, "remove", kill)
            with pytest.raises(Killed):
                lm.save(out, max_shard_bytes=bytes_each)
    other = tmp_path / "other"
    write_random(other, CONFIG, seed=9)
    dgemma.load(other).save(out, max_shard_bytes=200_000)
    dgemma.load(other).save(tmp_path / "expected", max_shard_bytes=200_000)
    assert contents(out) == contents(tmp_path / "expected")


@pytest.mark.parametrize("write", [new, save_in_memory, quantize, export])
def test_a_second_writer_is_refused_and_the_first_goes_on(write: Writer, base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with locked(out), pytest.raises(InputError, match="out is being written by another process; wait for it"):
        write(base, out)
    assert contents(out) == {}
    write(base, out)


def test_a_second_writer_of_an_adapter_or_a_config_is_refused(base: Path, tmp_path: Path) -> None:
    lm = dgemma.load(base, adapter=base.with_name("adapter"))
    with locked(tmp_path):
        with pytest.raises(InputError, match="is being written by another process"):
            lm.save_adapter(tmp_path)
        with pytest.raises(InputError, match="is being written by another process"):
            save.write_config(tmp_path, {})


# Links


@pytest.fixture
def linked(base: Path, tmp_path: Path) -> Path:
    """A checkpoint whose README.md is a link to a file outside."""
    path = tmp_path / "linked"
    shutil.copytree(base, path)
    (tmp_path / "secret").write_text("my key")
    (path / "README.md").symlink_to("../secret")
    return path


@pytest.mark.parametrize("write", [save_in_memory, quantize, export])
def test_a_link_out_of_the_checkpoint_is_not_copied(write: Writer, linked: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"README\.md is a link to .*secret, outside .* remove the"):
        write(linked, tmp_path / "out")
    assert not (tmp_path / "out" / "README.md").exists()
    (linked / "README.md").unlink()
    (linked / "README.md").symlink_to("tokenizer.json")  # inside
    write(linked, tmp_path / "out")
    assert (tmp_path / "out" / "README.md").read_bytes() == (linked / "tokenizer.json").read_bytes()


def test_merge_copies_no_link_out_of_the_checkpoint(
    linked: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["merge", str(linked), str(base.with_name("adapter")), str(tmp_path / "out")]) == 1
    assert "README.md is a link to" in capsys.readouterr().err
    assert not (tmp_path / "out" / "README.md").exists()


def test_the_links_of_a_hub_cache_are_followed(base: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--a--b"
    snapshot = cache / "snapshots" / "0123"
    shutil.copytree(base, cache / "blobs")
    snapshot.mkdir(parents=True)
    for file in (cache / "blobs").iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    (tmp_path / "through").symlink_to(snapshot)  # and a link to the whole of it
    save_in_memory(tmp_path / "through", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    (tmp_path / "secret").write_text("my key")
    (cache / "blobs" / "README.md").symlink_to("../../secret")
    (snapshot / "README.md").symlink_to("../../blobs/README.md")
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        save_in_memory(snapshot, tmp_path / "again")


def test_a_link_in_the_target_is_not_written_through(base: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tokenizer.json").symlink_to(tmp_path / "mine")
    save_in_memory(base, tmp_path / "out")
    assert (tmp_path / "mine").read_text() == "mine"
