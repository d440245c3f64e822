"""A GGUF file is read to the bit the gguf package reads, and answers as its decoded form does."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dgemma
from checkpoint.plain_form import answer, read_all, write_plain
from dgemma.checkpoint.fingerprint import file_fingerprint
from dgemma.checkpoint.hub import resolve
from dgemma.checkpoint.load import TORCH_DTYPES
from dgemma.checkpoint.source import open_checkpoint, read_config
from dgemma.errors import CheckpointError, ConfigError
from dgemma.model.config import LayerKind
from gguf_files import TYPES, Data, data_of, metadata_of, tiny_config, type_by_part, write_gguf, write_model
from sizes import cases


@pytest.mark.parametrize("kind", [*TYPES, "F32", "F16", "BF16"])
def test_every_number_is_the_one_the_package_reads_and_generates_the_same(kind: str, tmp_path: Path) -> None:
    expected = write_model(tmp_path / "model.gguf", kind)
    source = open_checkpoint(tmp_path / "model.gguf")
    found = read_all(source)
    assert found.keys() == expected.keys()
    for name, numbers in expected.items():
        assert torch.equal(found[name].view(torch.int32), numbers.view(torch.int32)), name
    schemes = {entry.scheme.name for entry in source.quantized.values()}
    assert schemes == (set() if kind in TORCH_DTYPES else {f"GGUF {kind}"})
    plain = write_plain(tmp_path / "plain", tiny_config(), expected)
    assert answer(tmp_path / "model.gguf") == answer(plain)


def edited(path: Path, change: Callable[[Data, dict[str, Any]], None], kind: str = "Q8_0") -> Path:
    """A file whose tensors and metadata a test has changed."""
    data, _ = data_of(tiny_config(), type_by_part(kind))
    metadata = metadata_of(tiny_config())
    change(data, metadata)
    return write_gguf(path, data, metadata)


def test_metadata_is_the_geometry_and_the_samplers_defaults(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", "BF16")
    source = open_checkpoint(tmp_path / "model.gguf")
    assert source.config == tiny_config()
    assert source.raw_config["dtype"] == "bfloat16"
    lm = dgemma.load(tmp_path / "model.gguf")
    assert lm.generation_defaults.max_denoising_steps == 12
    assert lm.generation_defaults.entropy_bound == 0.2  # in fp32 it is 0.200000003
    assert lm.generation_defaults.end_tokens == (1, 106)


def test_a_model_whose_heads_rotate_whole_has_no_divisors(tmp_path: Path) -> None:
    path = edited(tmp_path / "m.gguf", lambda data, metadata: data.pop("rope_freqs.weight") and None)
    assert open_checkpoint(path).config.rope[LayerKind.FULL].rotated_share == 1


def test_end_tokens_of_another_vocabulary_are_kept(tmp_path: Path) -> None:
    ends = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 9}
    path = edited(tmp_path / "m.gguf", lambda data, metadata: metadata.update(ends))
    assert dgemma.load(path).generation_defaults.end_tokens == (5, 9)


def split_experts(data: Data, kind: str) -> None:
    """Gate and up projections as two tensors, as other models of the family have them."""
    for layer in range(2):
        whole, _ = data.pop(f"blk.{layer}.ffn_gate_up_exps.weight")
        gate, up = np.split(whole, 2, axis=1)
        data[f"blk.{layer}.ffn_gate_exps.weight"] = (np.ascontiguousarray(gate), kind)
        data[f"blk.{layer}.ffn_up_exps.weight"] = (np.ascontiguousarray(up), kind)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_gate_and_up_projections_may_be_stored_apart(kind: str, tmp_path: Path) -> None:
    expected = write_model(tmp_path / "whole.gguf", kind)
    path = edited(tmp_path / "m.gguf", lambda data, metadata: split_experts(data, kind), kind)
    for name, numbers in read_all(open_checkpoint(path)).items():
        assert torch.equal(numbers, expected[name]), name


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_a_head_that_copies_the_embedding_is_read_and_another_one_refused(kind: str, tmp_path: Path) -> None:
    def copy(data: Data, metadata: dict[str, Any]) -> None:
        data["output.weight"] = data["token_embd.weight"]

    def change(data: Data, metadata: dict[str, Any]) -> None:
        numbers = np.array(data["token_embd.weight"][0])
        numbers[1, 0] += 1
        data["output.weight"] = (numbers, kind)

    def other_type(data: Data, metadata: dict[str, Any]) -> None:
        data["output.weight"] = (np.zeros((320, 256), dtype=np.float32), "F32")

    dgemma.load(edited(tmp_path / "copy.gguf", copy, kind))
    with pytest.raises(CheckpointError, match=r"'output.weight' differs from 'token_embd.weight'"):
        dgemma.load(edited(tmp_path / "other.gguf", change, kind))
    with pytest.raises(CheckpointError, match=r"has 'output.weight' in another form than the embedding"):
        dgemma.load(edited(tmp_path / "type.gguf", other_type, kind))


Change = Callable[[Data, dict[str, Any]], Any]
A = "diffusion-gemma."
REFUSED: dict[str, tuple[Change, str]] = {
    "another model": (lambda d, m: m.update({"split.count": 3}), "is one of 3 parts; dgemma reads whole"),
    "no layers": (lambda d, m: m.update({A + "block_count": 0}), "block_count is 0; 1 to 1024"),
    "no key": (lambda d, m: m.pop(A + "expert_count"), "the metadata lacks 'diffusion-gemma.expert_count'"),
    "a size in text": (lambda d, m: m.update({A + "expert_count": "4"}), "is '4'; it must be a whole number"),
    "no canvas": (lambda d, m: m.pop("diffusion.canvas_length"), "lacks 'diffusion.canvas_length'"),
    "infinite theta": (lambda d, m: m.update({A + "rope.freq_base": math.inf}), "must be a finite number"),
    "two MLP sizes": (
        lambda d, m: m.update({A + "feed_forward_length": [256, 512]}), r"is \[256, 512\]; all layers must",
    ),
    "too few layers' heads": (
        lambda d, m: m.update({A + "attention.head_count_kv": [2]}), "must be 2 whole numbers, one per layer",
    ),
    "no pattern": (
        lambda d, m: m.pop(A + "attention.sliding_window_pattern"), "must be 2 booleans, one a layer",
    ),
    "a pattern of numbers": (
        lambda d, m: m.update({A + "attention.sliding_window_pattern": [1, 0]}), "must be 2 booleans",
    ),
    "shared caches": (
        lambda d, m: m.update({A + "attention.shared_kv_layers": 1}),
        "attention.shared_kv_layers is 1; dgemma supports only 0",
    ),
    "a part of a sliding head rotates": (
        lambda d, m: m.update({A + "rope.dimension_count_swa": 32}), "dimension_count_swa is 32; dgemma sup",
    ),
    "no embedding": (lambda d, m: d.pop("token_embd.weight"), "lacks 'token_embd.weight'"),
    "a missing tensor": (
        lambda d, m: d.pop("blk.1.ffn_down_exps.weight"), "lacks 1 tensors: 'blk.1.ffn_down_exps.weight'",
    ),
    "half of the experts": (
        lambda d, m: split_experts(d, "Q8_0") or d.pop("blk.0.ffn_up_exps.weight"),
        "lacks 1 tensors: 'blk.0.ffn_gate_up_exps.weight'",
    ),
    "an extra tensor": (
        lambda d, m: d.update({"blk.0.attn_q.bias": (np.zeros(4, dtype=np.float32), "F32")}),
        "holds 1 tensors this model does not have: 'blk.0.attn_q.bias'",
    ),
    "another shape": (
        lambda d, m: d.update({"output_norm.weight": (np.zeros(7, dtype=np.float32), "F32")}),
        r"'output_norm.weight' of shape \[7\]; its metadata requires \[256\]",
    ),
    "a quantized vector": (
        lambda d, m: d.update({"output_norm.weight": (np.zeros(272, dtype=np.uint8), "Q8_0")}),
        "'output_norm.weight' as Q8_0; a vector is stored as F32, F16, BF16",
    ),
    "a type that is not read": (
        lambda d, m: d.update({"blk.0.attn_q.weight": (np.zeros((256, 84), dtype=np.uint8), "Q2_K")}),
        "'blk.0.attn_q.weight' as Q2_K; dgemma reads F32, F16, BF16, Q8_0",
    ),
    "halves of two types": (
        lambda d, m: split_experts(d, "Q8_0") or d.update(
            {"blk.0.ffn_up_exps.weight": (np.zeros((4, 256, 144), dtype=np.uint8), "Q4_0")}
        ),
        "as Q8_0 and 'blk.0.ffn_up_exps.weight' as Q4_0",
    ),
    "an infinite scale": (
        lambda d, m: d["blk.1.ffn_down.weight"][0].__setitem__((0, slice(0, 2)), (0, 0x7C)),
        "GGUF Q8_0: a scale is inf",
    ),
    "scaled frequencies": (
        lambda d, m: d["rope_freqs.weight"][0].__setitem__(20, 8.0), "rope_freqs.weight scales frequencies",
    ),
    "frequencies of another head": (
        lambda d, m: d.update({"rope_freqs.weight": (np.ones(8, dtype=np.float32), "F32")}),
        "rope_freqs.weight must be 64 numbers in F32",
    ),
    "a broken generation config": (
        lambda d, m: m.update({"dgemma.generation_config": "[1"}), "which is not a JSON object; it is corr",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_of_another_model_or_a_broken_one_is_refused_by_name(name: str, tmp_path: Path) -> None:
    change, words = REFUSED[name]
    path = edited(tmp_path / "m.gguf", change)
    with pytest.raises((CheckpointError, ConfigError), match=words) as refusal:
        _ = dgemma.load(path).generation_defaults
    assert "m.gguf" in str(refusal.value) or "ffn_down" in str(refusal.value)


def test_an_infinite_scale_within_a_block_of_256_is_refused(tmp_path: Path) -> None:
    def spoil(data: Data, metadata: dict[str, Any]) -> None:
        data["blk.1.ffn_down.weight"][0][0, 2:4] = (0, 0xFC)

    with pytest.raises(CheckpointError, match=r"blk.1.ffn_down.weight: GGUF Q4_K: a scale is -inf"):
        dgemma.load(edited(tmp_path / "m.gguf", spoil, "Q4_K"))


def test_plain_experts_in_two_tensors_are_refused(tmp_path: Path) -> None:
    path = edited(tmp_path / "m.gguf", lambda data, metadata: split_experts(data, "F16"), "F16")
    with pytest.raises(CheckpointError, match="in F16; dgemma reads plain experts with gate and up"):
        dgemma.load(path)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, metadata_of(tiny_config()))
    path.write_bytes(path.read_bytes().replace(b"diffusion-gemma", b"diffusion-llama", 1))
    with pytest.raises(CheckpointError, match="architecture 'diffusion-llama'; of GGUF dgemma reads 'diff"):
        open_checkpoint(path)


def test_the_only_gguf_file_of_a_directory_is_found(tmp_path: Path) -> None:
    write_model(tmp_path / "model-Q8_0.gguf", "Q8_0")
    (tmp_path / "mmproj-model.gguf").write_bytes(b"GGUF")
    assert open_checkpoint(tmp_path).path == resolve(tmp_path) == tmp_path / "model-Q8_0.gguf"
    assert read_config(tmp_path)[1] == tiny_config()
    write_model(tmp_path / "model-Q4_0.gguf", "Q4_0")
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files \(model-Q4_0.gguf, model-Q8_0.gguf\)"):
        open_checkpoint(tmp_path)


def test_the_fingerprint_of_a_file_is_that_of_its_model(tmp_path: Path) -> None:
    for kind in ("Q8_0", "Q6_K", "BF16"):
        path = tmp_path / f"{kind}.gguf"
        write_model(path, kind)
        assert dgemma.load(path).fingerprint() == file_fingerprint(open_checkpoint(path))


@settings(max_examples=cases(1000, 60), deadline=None)
@given(places=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_metadata_opens_or_is_refused(
    places: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("fuzz")
    data = bytearray(whole_file())
    for at, value in places:
        data[at] = value
    (directory / "m.gguf").write_bytes(data)
    with contextlib.suppress(CheckpointError, ConfigError):
        open_checkpoint(directory / "m.gguf")


@cache
def whole_file() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory) / "m.gguf", "Q4_0")
        return (Path(directory) / "m.gguf").read_bytes()
