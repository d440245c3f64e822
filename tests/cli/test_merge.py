"""`dgemma merge` as a user types it, and `--adapter` where text is written."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from transformers import DiffusionGemmaForBlockDiffusion

import dgemma
from adapters import SETTINGS, every_logit, train
from comparison import compare_sequence
from dgemma.checkpoint.device import stored_dtype
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.checkpoint.safetensors_file import read_entries
from dgemma.checkpoint.source import open_checkpoint
from dgemma.cli import merge
from dgemma.cli.main import main
from oracle import CASES, calm_oracle

CASE = CASES[0]


def run(*argv: str | Path) -> int:
    parser = argparse.ArgumentParser()
    merge.add_arguments(parser)
    return merge.run(parser.parse_args([str(word) for word in argv]))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    calm_oracle(CASE).save_pretrained(tmp_path / "base", max_shard_size="100KB")
    (tmp_path / "base" / "tokenizer.json").write_text('{"carried": "along"}')
    return tmp_path / "base"


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    train(dgemma.load(base).with_adapter(SETTINGS), seed=1).save_adapter(tmp_path / "adapter")
    return tmp_path / "adapter"


@torch.no_grad()
def test_the_merged_checkpoint_is_what_merging_in_memory_gives(
    base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(base, adapter, tmp_path / "out") == 0
    lm = dgemma.load(base, adapter=adapter)
    assert capsys.readouterr().out == f"{tmp_path}/out: 31 weights of {base} with {adapter} added in\n"
    found = dgemma.load(tmp_path / "out")
    expected = lm.merged().transformer.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.transformer.state_dict().items())
    lm.merged().save(tmp_path / "saved")
    assert torch.equal(every_logit(dgemma.load(tmp_path / "saved"), CASE), every_logit(found, CASE))
    torch.testing.assert_close(every_logit(found, CASE), every_logit(lm, CASE), atol=1e-5, rtol=1e-5)
    theirs = DiffusionGemmaForBlockDiffusion.from_pretrained(tmp_path / "out", dtype="auto").eval()
    assert max(compare_sequence(theirs, lm, CASE, length=20).values()) < 1e-4


def test_what_is_not_adapted_and_the_small_files_come_along(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    run(base, adapter, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"carried": "along"}'
    before = {e.name: e for file in base.glob("*.safetensors") for e in read_entries(file)}
    after = {e.name: e for e in read_entries(tmp_path / "out" / "model.safetensors")}
    assert before.keys() == after.keys()
    assert sum("vision" in name for name in after) > 5
    assert all((e.dtype, e.shape) == (after[n].dtype, after[n].shape) for n, e in before.items())


@torch.no_grad()
def test_a_bf16_checkpoint_stays_bf16_and_takes_the_factors_as_stored(tmp_path: Path) -> None:
    write_random(tmp_path / "base", PRESETS["tiny"].config, seed=1)
    lm = train(dgemma.load(tmp_path / "base", dtype="bfloat16").with_adapter(SETTINGS), seed=1)
    lm.save_adapter(tmp_path / "adapter")
    run(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    found, expected = dgemma.load(tmp_path / "out", dtype="bfloat16"), lm.merged()
    assert stored_dtype(open_checkpoint(tmp_path / "out")) == torch.bfloat16
    for name, tensor in expected.transformer.state_dict().items():
        assert torch.equal(found.transformer.state_dict()[name], tensor), name


def test_a_taken_directory_or_another_base_is_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(dgemma.CheckpointError, match="already holds a checkpoint"):
        run(base, adapter, base)
    write_random(tmp_path / "other", dgemma.load(base).config)
    with pytest.raises(dgemma.CheckpointError, match="was made for the base"):
        run(tmp_path / "other", adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_describes_itself() -> None:
    parser = argparse.ArgumentParser()
    merge.add_arguments(parser)
    assert all(action.help for action in parser._actions)
    assert "dgemma merge MODEL" in merge.EXAMPLES


def test_generate_writes_with_the_adapter_and_bench_measures_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_random(tmp_path / "base", PRESETS["tiny"].config, seed=1)
    lm = dgemma.load(tmp_path / "base")
    train(lm.with_adapter(SETTINGS), seed=1, size=1.0).save_adapter(tmp_path / "adapter")

    def text(*more: str) -> str:
        words = ["generate", str(tmp_path / "base"), "Hello", "--seed", "1", "--max-tokens", "16"]
        assert main([*words, "--max-denoising-steps", "2", *more]) == 0
        return capsys.readouterr().out

    adapted = text("--adapter", str(tmp_path / "adapter"))
    assert adapted == text("--adapter", str(tmp_path / "adapter"))
    assert adapted != text()
    few = ["--prompt-tokens", "8", "--canvases", "1", "--steps", "2", "--causal-tokens", "2", "--rounds", "1"]
    words = ["bench", str(tmp_path / "base"), *few, "--no-reference", "--time-limit", "0.1"]
    assert main([*words, "--adapter", str(tmp_path / "adapter")]) == 0
    assert "denoising step" in capsys.readouterr().out
    assert main([*words, "--adapter", str(tmp_path / "nothing")]) == 1
    assert "has no adapter_config.json" in capsys.readouterr().err
