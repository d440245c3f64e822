"""The checkpoints of other tools under tests/data/quantized: how we read them, how a test changes a copy.

Made by those tools (tools/make_quantized_fixtures.py): `expected.safetensors` holds the weights as the tool
decodes them in fp32, `MADE_BY.json` says which tool it was, and has digests of the same weights in the type
the tool itself runs in.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dgemma.checkpoint.quantized.reader import read_quantized
from dgemma.checkpoint.source import CheckpointSource, open_checkpoint

CPU = torch.device("cpu")
DATA = Path(__file__).parents[2] / "data" / "quantized"
NAMES = sorted(path.name for path in DATA.iterdir() if path.is_dir())

DECODER, ENCODER = "model.decoder.", "model.encoder.language_model."
EXPERT = DECODER + "layers.0.experts.0.gate_proj"  # quantized in every one of them

Tensors = dict[str, Tensor]


def copy_of(name: str, target: Path) -> Path:
    """A checkpoint that a test may break: without the answers."""
    target.mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(DATA / name / file, target / file)
    return target


def tensors_of(directory: Path) -> Tensors:
    return load_file(directory / "model.safetensors")


def edit_tensors(directory: Path, change: Callable[[Tensors], None]) -> None:
    tensors = {name: tensor.clone() for name, tensor in tensors_of(directory).items()}
    change(tensors)
    alone = {name: tensor.clone() for name, tensor in tensors.items()}  # it saves no memory twice
    save_file(alone, directory / "model.safetensors", {"format": "pt"})


def recipe_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / name / "config.json").read_text())["quantization_config"]
    return found


def edit_recipe(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = directory / "config.json"
    raw = json.loads(file.read_text())
    change(raw["quantization_config"])
    file.write_text(json.dumps(raw))


def weights_of(recipe: dict[str, Any]) -> dict[str, Any]:
    """What a compressed-tensors recipe says about the weights of its first group."""
    group: dict[str, Any] = next(iter(recipe["config_groups"].values()))["weights"]
    return group


def quantized_modules(tensors: Tensors) -> dict[str, list[str]]:
    """Each quantized linear, with the names of its tensors."""
    qdata = ("weight_packed", "qweight")
    found: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part in qdata or (part == "weight" and tensor.itemsize == 1):
            found[module] = [other for other in tensors if other.startswith(module + ".")]
    return found


def decoded(source: CheckpointSource, dtype: torch.dtype) -> Tensors:
    """Every quantized linear of a checkpoint as we read it, by its module's name in the file."""
    found: Tensors = {}
    for entry in source.quantized.values():
        whole = read_quantized(entry, CPU).dequantize(dtype)
        assert whole.shape == entry.shape
        modules = whole.view(len(entry.modules), *entry.module_shape)
        found |= {module.module: numbers for module, numbers in zip(entry.modules, modules, strict=True)}
    return found


def without_signed_zeros(tensor: Tensor) -> Tensor:
    """ModelOpt reads the code of a negative zero as 0, compressed-tensors and we as -0. All else is bits."""
    return tensor + torch.zeros((), dtype=tensor.dtype)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    assert found.dtype == expected.dtype == torch.float32
    one, other = without_signed_zeros(found), without_signed_zeros(expected)
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def expected_of(name: str) -> Tensors:
    return load_file(DATA / name / "expected.safetensors")


def reads_as_its_tool_does(name: str, directory: Path) -> bool:
    found = decoded(open_checkpoint(directory), torch.float32)
    return all(same_bits(found[module], numbers) for module, numbers in expected_of(name).items())
