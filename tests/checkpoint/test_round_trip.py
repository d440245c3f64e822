"""The released layout survives: oracle saves, we load, we save, oracle loads, identical tensors."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DiffusionGemmaForBlockDiffusion

import dgemma
from dgemma.checkpoint import safetensors_file
from dgemma.checkpoint.names import tensor_specs
from oracle import CASES, Case, make_oracle, make_ours, new_oracle, tokens

CASE = CASES[2]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "oracle"
    make_oracle(CASE).save_pretrained(path)
    (path / "tokenizer.json").write_text('{"carried": "along"}')
    return path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_identical_tensors_after_the_whole_trip(case: Case, dtype: str, tmp_path: Path) -> None:
    oracle = new_oracle(case)
    oracle.to(getattr(torch, dtype)).save_pretrained(tmp_path / "a", max_shard_size="60KB")
    assert (tmp_path / "a" / "model.safetensors.index.json").exists()
    lm = dgemma.load(tmp_path / "a")  # in float32, if this processor has no bfloat16
    lm.save(tmp_path / "b", max_shard_bytes=50_000)
    again = DiffusionGemmaForBlockDiffusion.from_pretrained(tmp_path / "b", dtype="auto")
    expected, found = oracle.state_dict(), again.state_dict()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_vision_tensors_and_companion_files_survive_unchanged(saved: Path, tmp_path: Path) -> None:
    dgemma.load(saved, dtype="bfloat16").save(tmp_path / "out")
    before, after = (
        load_file(saved / "model.safetensors"),
        load_file(tmp_path / "out" / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    vision = [name for name in before if "vision" in name]
    assert len(vision) > 5
    for name in vision:
        assert torch.equal(before[name], after[name])
        assert before[name].dtype == after[name].dtype == torch.float32
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"carried": "along"}'
    assert (tmp_path / "out" / "generation_config.json").exists()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["vision_config"]["hidden_size"] == 16


def copies(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tied copies another writer might have stored."""
    config = make_ours(make_oracle(CASE)).config
    return {other: state[spec.name].clone() for spec in tensor_specs(config) for other in spec.tied_names}


def test_tied_copies_present_load_the_same(saved: Path) -> None:
    plain = dgemma.load(saved).transformer.state_dict()
    state = load_file(saved / "model.safetensors")
    extra = copies(state)
    assert "lm_head.weight" in extra
    assert "model.encoder.language_model.layers.0.experts.gate_up_proj" in extra
    assert not any(name.endswith("layer_scalar") for name in extra)
    save_file({**state, **extra}, saved / "model.safetensors", {"format": "pt"})
    for name, tensor in dgemma.load(saved).transformer.state_dict().items():
        assert torch.equal(tensor, plain[name])


def test_a_tensor_stored_only_under_its_tied_name_loads(saved: Path) -> None:
    plain = dgemma.load(saved).transformer.state_dict()
    state = load_file(saved / "model.safetensors")
    state["lm_head.weight"] = state.pop("model.decoder.embed_tokens.weight")
    save_file(state, saved / "model.safetensors", {"format": "pt"})
    assert torch.equal(
        dgemma.load(saved).transformer.state_dict()["embedding.weight"], plain["embedding.weight"]
    )


def test_a_tied_copy_that_differs_is_refused(saved: Path) -> None:
    state = load_file(saved / "model.safetensors")
    extra = copies(state)
    extra["lm_head.weight"][-1, -1] += 1
    save_file({**state, **extra}, saved / "model.safetensors", {"format": "pt"})
    with pytest.raises(dgemma.CheckpointError, match=r"lm_head\.weight.*differs"):
        dgemma.load(saved)


def test_loading_converts_dtypes_through_chunks(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(safetensors_file.read_chunks, chunk_bytes=64)  # most tensors then need many chunks
    monkeypatch.setattr("dgemma.checkpoint.load.read_chunks", small)
    wide = dgemma.load(saved, dtype="float32").transformer.state_dict()
    narrow = dgemma.load(saved, dtype="bfloat16").transformer.state_dict()
    for name, tensor in wide.items():
        assert torch.equal(tensor.bfloat16(), narrow[name])


def test_progress_ends_at_the_total(saved: Path) -> None:
    seen: list[tuple[int, int]] = []
    dgemma.load(saved, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_saving_never_overwrites_a_checkpoint(saved: Path, tmp_path: Path) -> None:
    lm = dgemma.load(saved)
    with pytest.raises(dgemma.CheckpointError, match="already holds a checkpoint"):
        lm.save(saved)
    (tmp_path / "file").write_text("")
    with pytest.raises(dgemma.CheckpointError, match="is a file"):
        lm.save(tmp_path / "file")
    with pytest.raises(dgemma.InputError, match="max_shard_bytes is 0"):
        lm.save(tmp_path / "new", max_shard_bytes=0)
    with pytest.raises(dgemma.CheckpointError, match="cannot be written"):
        lm.save("/proc/none/here")


def test_a_loaded_model_equals_the_oracle_it_came_from(saved: Path) -> None:
    lm, direct = dgemma.load(saved), make_ours(make_oracle(CASE))
    canvas = tokens(CASE, 1, 8, seed=1)
    with torch.inference_mode():
        assert torch.equal(lm.denoise(canvas, lm.new_cache()), direct.denoise(canvas, direct.new_cache()))


def test_a_file_that_shrinks_while_it_is_read_is_refused(saved: Path) -> None:
    from dgemma.checkpoint.load import load_transformer
    from dgemma.checkpoint.source import open_checkpoint

    source = open_checkpoint(saved)
    with (saved / "model.safetensors").open("r+b") as file:
        file.truncate(30_000)
    with pytest.raises(dgemma.CheckpointError, match="changed on disk"):
        load_transformer(source, dtype=torch.float32, device=torch.device("cpu"))


def test_loaded_weights_need_no_gradient_and_those_of_the_stored_dtype_are_read_in_place(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_chunks(*args: object) -> None:
        raise AssertionError("through a buffer")

    monkeypatch.setattr("dgemma.checkpoint.load.read_chunks", read_chunks)
    parameters = list(dgemma.load(saved, dtype="float32").transformer.parameters())
    assert len(parameters) > 10
    assert not any(parameter.requires_grad for parameter in parameters)


def test_a_checkpoint_without_copies_has_nothing_to_compare(saved: Path) -> None:
    from dgemma.checkpoint.source import open_checkpoint

    assert open_checkpoint(saved).tied == []
    state = load_file(saved / "model.safetensors")
    extra = copies(state)
    save_file({**state, **extra}, saved / "model.safetensors", {"format": "pt"})
    assert {copy.name for _, copy in open_checkpoint(saved).tied} == extra.keys()
