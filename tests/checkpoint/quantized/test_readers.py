"""What another tool wrote is read to the bit it reads itself, and a model made of it answers the same.

`quantized_files` says what the files are.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dgemma
from checkpoint.quantized.quantized_files import (
    CPU,
    DATA,
    NAMES,
    copy_of,
    decoded,
    expected_of,
    quantized_modules,
    reads_as_its_tool_does,
    same_bits,
    tensors_of,
    without_signed_zeros,
)
from dgemma.checkpoint.load import load_transformer
from dgemma.checkpoint.names import TensorSpec, tensor_specs
from dgemma.checkpoint.quantized.reader import read_quantized, to_quantized_tensor
from dgemma.checkpoint.quantized.schemes import Awq, CompressedScaled
from dgemma.checkpoint.safetensors_file import TensorToWrite
from dgemma.checkpoint.save import write_checkpoint
from dgemma.checkpoint.source import open_checkpoint
from dgemma.errors import CheckpointError
from dgemma.language_model import LanguageModel
from dgemma.machine import has_fast_bf16
from dgemma.model.execution import Execution
from dgemma.model.quantized_tensor import QuantKind

KINDS = {
    "awq-gemm": QuantKind.INT4, "ct-fp8-block": QuantKind.FLOAT8, "ct-fp8-channel": QuantKind.FLOAT8,
    "ct-int4": QuantKind.INT4, "ct-int4-asymmetric": QuantKind.INT4, "ct-int8": QuantKind.INT8,
    "ct-nvfp4": QuantKind.FLOAT4, "modelopt-nvfp4": QuantKind.FLOAT4,
}  # fmt: skip


def test_every_format_has_a_fixture_and_every_fixture_says_what_made_it() -> None:
    assert set(NAMES) == {*KINDS, "ct-mixed"}
    for name in NAMES:
        made_by = json.loads((DATA / name / "MADE_BY.json").read_text())
        assert made_by["tool"]
        assert made_by["version"]
        assert "make_quantized_fixtures" in made_by["command"]


@pytest.mark.parametrize("name", NAMES)
def test_every_weight_is_read_to_the_bit_its_tool_reads(name: str) -> None:
    source = open_checkpoint(DATA / name)
    found, expected = decoded(source, torch.float32), expected_of(name)
    assert found.keys() == expected.keys() == quantized_modules(tensors_of(DATA / name)).keys()
    assert len(found) >= 24  # all experts, at least
    for module, numbers in expected.items():
        assert same_bits(found[module], numbers), module
    kinds = {read_quantized(entry, CPU).kind for entry in source.quantized.values()}
    assert kinds == ({KINDS[name]} if name in KINDS else {QuantKind.INT4, QuantKind.INT8, QuantKind.FLOAT8})


@pytest.mark.parametrize("name", NAMES)
def test_in_the_type_its_tool_runs_in_every_weight_is_what_the_tool_makes_of_it(name: str) -> None:
    made_by = json.loads((DATA / name / "MADE_BY.json").read_text())
    found = decoded(open_checkpoint(DATA / name), getattr(torch, made_by["own_dtype"]))
    assert found.keys() == made_by["own_sha256"].keys()
    for module, numbers in found.items():
        assert numbers.itemsize == 2
        data = without_signed_zeros(numbers).contiguous().view(torch.uint8).numpy().tobytes()
        assert hashlib.sha256(data).hexdigest() == made_by["own_sha256"][module], module


def taken_apart(spec: TensorSpec) -> list[str]:
    """The linears of a weight in the order of its rows, as the released layout stacks them."""
    if len(spec.shape) == 2:
        return [spec.name.removesuffix(".weight")]
    experts_linear, _, leaf = spec.name.rpartition(".")
    halves = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else ["down_proj"]
    return [f"{experts_linear}.{expert}.{half}" for expert in range(spec.shape[0]) for half in halves]


def write_plain(name: str, target: Path) -> Path:
    """The checkpoint that holds in fp32 what the quantized one stands for, according to its tool."""
    source = open_checkpoint(DATA / name)
    stored, expected = tensors_of(DATA / name), expected_of(name)
    tensors = []
    for spec in tensor_specs(source.config):
        if spec.name in source.quantized:
            numbers = torch.cat([expected[module] for module in taken_apart(spec)]).view(spec.shape)
        else:
            numbers = stored[source.entries[spec.name].name].float()
        data = [numbers.contiguous().view(-1).view(torch.uint8).numpy()]
        tensors.append(TensorToWrite(spec.name, "F32", spec.shape, partial(iter, data)))
    raw = {**source.raw_config, "dtype": "float32"}
    del raw["quantization_config"]
    write_checkpoint(target, raw, tensors, max_shard_bytes=1 << 40)
    return target


@torch.inference_mode()
def answers(directory: Path) -> list[Tensor]:
    """Logits of a prompt, of a first step, and of a self-conditioned one."""
    source = open_checkpoint(directory)
    transformer = load_transformer(source, dtype=torch.float32, device=CPU, execution=Execution(exact=True))
    lm = LanguageModel(transformer)
    generator = torch.Generator().manual_seed(5)
    prompt = torch.randint(lm.config.vocab_size, (2, 11), generator=generator)
    canvas = torch.randint(lm.config.vocab_size, (2, lm.config.canvas_len), generator=generator)
    cache = lm.new_cache(batch=2)
    read = lm.logits(lm.encode(prompt, cache))
    first = lm.logits(lm.denoise(canvas, cache))
    return [read, first, lm.logits(lm.denoise(canvas, cache, soft=lm.soft_embedding(first)))]


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for CPUs rounds activations; here the weights alone are compared."""
    monkeypatch.setattr("dgemma.model.quantized_linear.quantized_matmul", lambda: None)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("no_kernel")
def test_the_whole_model_answers_as_the_plain_one_it_stands_for(name: str, tmp_path: Path) -> None:
    plain = answers(write_plain(name, tmp_path / "plain"))
    for found, expected in zip(answers(DATA / name), plain, strict=True):
        assert expected.std() > 0.1
        # Our kernel adds up in another order than torch.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["modelopt-nvfp4", "ct-int8"])
def test_a_quantized_checkpoint_loads_like_any_other(name: str) -> None:
    reads: list[tuple[int, int]] = []
    lm = dgemma.load(DATA / name, progress=lambda done, total: reads.append((done, total)))
    assert lm.dtype == (torch.bfloat16 if has_fast_bf16() else torch.float32)
    assert reads[-1][0] == reads[-1][1] == open_checkpoint(DATA / name).nbytes


# --- ModelOpt


def test_for_modelopt_hf_quant_config_alone_is_enough(tmp_path: Path) -> None:
    directory = copy_of("modelopt-nvfp4", tmp_path / "model")
    raw = json.loads((directory / "config.json").read_text())
    del raw["quantization_config"]
    (directory / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="do not belong together"):
        open_checkpoint(directory)
    shutil.copyfile(DATA / "modelopt-nvfp4" / "hf_quant_config.json", directory / "hf_quant_config.json")
    assert reads_as_its_tool_does("modelopt-nvfp4", directory)


def test_what_config_json_says_goes_before_hf_quant_config(tmp_path: Path) -> None:
    directory = copy_of("modelopt-nvfp4", tmp_path / "model")
    (directory / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert open_checkpoint(directory).quantized


def test_awq_rows_that_fill_no_whole_word_lose_the_padding_only() -> None:
    out, inner = 12, 64  # twelve columns in two words of eight
    scheme = Awq(group_len=32)
    words = torch.arange(inner * 2, dtype=torch.int32).view(inner, 2) * 0x01234567
    parts = {
        "qweight": words,
        "qzeros": torch.zeros(inner // 32, 2, dtype=torch.int32),
        "scales": torch.ones(inner // 32, out),
    }
    found = to_quantized_tensor(scheme, parts, out, inner).dequantize(torch.float32)
    # Column c stands in the nibble of its place in the kernel's order.
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    expected = [[(int(row[c // 8]) >> 4 * order[c % 8]) & 15 for row in words] for c in range(out)]
    assert found.tolist() == expected


def test_a_scale_may_be_zero() -> None:
    """A group of zeros has one."""
    parts = {"weight": torch.ones(2, 4, dtype=torch.int8), "weight_scale": torch.tensor([[0.0], [2.0]])}
    scheme = CompressedScaled(name="int8", integers=True)
    found = to_quantized_tensor(scheme, parts, 2, 4).dequantize(torch.float32)
    assert found.tolist() == [[0.0] * 4, [2.0] * 4]
