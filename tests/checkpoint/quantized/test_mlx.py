"""A checkpoint that mlx-vlm quantized is read to the bit of `mx.dequantize`, and answers as its decoded form.

tests/data/mlx is written by tools/make_mlx_fixtures.py; `make others` compares with MLX itself.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import dgemma
from checkpoint.plain_form import CPU, answer, read_all, write_plain
from dgemma.checkpoint.export import plan_export, write_export
from dgemma.checkpoint.fingerprint import file_fingerprint
from dgemma.checkpoint.quantized.reader import read_quantized
from dgemma.checkpoint.source import open_checkpoint
from dgemma.errors import CheckpointError, ConfigError
from dgemma.model.quantized_linear import QuantizedLinear
from dgemma.model.quantized_tensor import QuantizedTensor, QuantKind

DATA = Path(__file__).parents[2] / "data" / "mlx"
NAMES = {"bfloat16-4bit": torch.bfloat16, "float16-4bit": torch.float16, "float32-8bit": torch.float32}


def digest(numbers: Tensor) -> str:
    return hashlib.sha256(numbers.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("name", NAMES)
def test_every_weight_is_what_mlx_decodes_in_fp32_and_in_its_own_type(name: str) -> None:
    sha256 = json.loads((DATA / name / "MADE_BY.json").read_text())["sha256"]
    source = open_checkpoint(DATA / name)
    assert len(source.quantized) == len(sha256) // 2 == 23
    for weight, entry in source.quantized.items():
        module = weight.removesuffix(".weight")
        found = read_quantized(entry, CPU)
        assert found.scale.dtype == NAMES[name]
        assert digest(found.dequantize(torch.float32)) == sha256[module], module
        assert digest(found.dequantize(NAMES[name])) == sha256[f"own.{module}"], module


@pytest.mark.parametrize("name", NAMES)
def test_it_generates_the_text_of_its_decoded_form(name: str, tmp_path: Path) -> None:
    source = open_checkpoint(DATA / name)
    assert answer(DATA / name) == answer(write_plain(tmp_path / "plain", source.config, read_all(source)))


def test_its_plain_export_does_not_say_that_it_is_quantized(tmp_path: Path) -> None:
    write_export(tmp_path / "plain", plan_export(open_checkpoint(DATA / "bfloat16-4bit")))
    found = open_checkpoint(tmp_path / "plain")
    assert not found.quantized
    assert not {"quantization", "quantization_config"} & found.raw_config.keys()


def test_the_widths_are_those_of_the_settings_of_each_module() -> None:
    found = {
        spec: read_quantized(entry, CPU)
        for spec, entry in open_checkpoint(DATA / "bfloat16-4bit").quantized.items()
    }
    assert found["model.decoder.layers.0.experts.gate_up_proj"].kind is QuantKind.INT4
    assert found["model.decoder.layers.0.self_attn.q_proj.weight"].kind is QuantKind.INT8
    assert found["model.decoder.embed_tokens.weight"].kind is QuantKind.INT8


def test_another_type_is_computed_in_fp32_and_rounded_once() -> None:
    entry = open_checkpoint(DATA / "float16-4bit").quantized["model.decoder.layers.0.experts.down_proj"]
    found = read_quantized(entry, CPU)
    assert torch.equal(found.dequantize(torch.bfloat16), found.dequantize(torch.float32).bfloat16())


def test_memory_holds_the_packed_values_and_the_fingerprint_is_that_of_the_file() -> None:
    source = open_checkpoint(DATA / "bfloat16-4bit")
    lm = dgemma.load(DATA / "bfloat16-4bit")
    held = sum(part.nbytes for part in lm.transformer.layers[0].experts.down.quantized.parts.values())
    assert held == source.quantized["model.decoder.layers.0.experts.down_proj"].nbytes
    assert lm.fingerprint() == file_fingerprint(source)


def test_gradients_pass_through_a_weight_with_biases() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = QuantizedTensor(
        QuantKind.INT4,
        torch.randint(256, (8, 32), generator=generator, dtype=torch.uint8),
        torch.randn(8, 1, generator=generator),
        bias=torch.randn(8, 1, generator=generator),
    )
    x = torch.randn(3, 64, generator=generator, requires_grad=True)
    QuantizedLinear(weight, dtype=torch.float32).multiply(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.dequantize(torch.float32).sum(0).expand(3, 64))


Tensors = dict[str, Tensor]
EXPERTS = "model.decoder.layers.0.experts.down_proj"


def broken(tmp_path: Path, change: Callable[[Tensors, dict[str, Any]], Any]) -> Path:
    """A copy whose tensors and settings a test has changed."""
    target = tmp_path / "model"
    shutil.copytree(DATA / "bfloat16-4bit", target)
    tensors = {name: tensor.clone() for name, tensor in load_file(target / "model.safetensors").items()}
    raw = json.loads((target / "config.json").read_text())
    change(tensors, raw)
    save_file(tensors, target / "model.safetensors", {"format": "mlx"})
    (target / "config.json").write_text(json.dumps(raw))
    return target


def test_plain_stacked_experts_are_read_too(tmp_path: Path) -> None:
    found = read_all(open_checkpoint(DATA / "bfloat16-4bit"))

    def decode(tensors: Tensors, raw: dict[str, Any]) -> None:
        del tensors[f"{EXPERTS}.scales"], tensors[f"{EXPERTS}.biases"]
        tensors[f"{EXPERTS}.weight"] = found[EXPERTS]

    source = open_checkpoint(broken(tmp_path, decode))
    assert EXPERTS in source.entries
    for name, numbers in read_all(source).items():
        assert torch.equal(numbers, found[name]), name


Change = Callable[[Tensors, dict[str, Any]], Any]
REFUSED: dict[str, tuple[Change, str]] = {
    "another mode": (lambda t, c: c["quantization"].update(mode="mxfp4"), "mode is 'mxfp4'; of MLX dgemma"),
    "six bits": (lambda t, c: c["quantization"].update(bits=6), "bits is 6; of MLX dgemma reads 4 and 8"),
    "bits in text": (lambda t, c: c["quantization"].update(bits="4"), "bits is '4'"),
    "an odd group": (lambda t, c: c["quantization"].update(group_size=48), "group_size is 48; MLX has"),
    "a list": (lambda t, c: c.update(quantization=[4]), "quantization is not an object"),
    "one module's bits": (
        lambda t, c: c["quantization"]["model.decoder.embed_tokens"].update(bits=3),
        "quantization of 'model.decoder.embed_tokens': bits is 3",
    ),
    "other groups than said": (
        lambda t, c: [v.update(group_size=32) for v in (c["quantization"], *c["quantization"].values())
                      if isinstance(v, dict)],
        "mlx affine: 'model.decoder.embed_tokens.scales' has shape",
    ),
    "no biases": (lambda t, c: t.pop("model.decoder.embed_tokens.biases"), "embed_tokens' lacks 'biases'"),
    "no biases of experts": (lambda t, c: t.pop(f"{EXPERTS}.biases"), "lacks 'biases'"),
    "an expert less": (
        lambda t, c: t.update({f"{EXPERTS}.weight": t[f"{EXPERTS}.weight"][:1].clone()}), "lacks 1 tensors",
    ),
    "an infinite scale": (
        lambda t, c: t[f"{EXPERTS}.scales"].__setitem__((1, 3, 0), torch.inf), "a scale is inf; scales are",
    ),
    "biases that are no number": (
        lambda t, c: t[f"{EXPERTS}.biases"].__setitem__((0, 0, 0), torch.nan), "a scale is nan",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_together_is_refused_by_name(name: str, tmp_path: Path) -> None:
    change, words = REFUSED[name]
    with pytest.raises((CheckpointError, ConfigError), match=words):
        dgemma.load(broken(tmp_path, change))
