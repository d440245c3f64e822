"""Export a checkpoint in mlx-vlm's layout: 4-bit or 8-bit integers, a scale and a bias per 64 neighbours.

As in `dgemma quantize`, experts get the requested bits, other linears 8. Routers, norms, scalars and the
vision tower stay as they are, and so does a weight whose rows are not whole groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dgemma.checkpoint.adapter_source import AdapterSource
from dgemma.checkpoint.export import Export, plan_export, rows_in_float32
from dgemma.checkpoint.load import TORCH_DTYPES
from dgemma.checkpoint.names import TensorSpec, tensor_specs
from dgemma.checkpoint.safetensors_file import TensorToWrite
from dgemma.checkpoint.source import CheckpointSource
from dgemma.errors import InputError
from dgemma.model.quantized_tensor import pack

FORMATS = {"4bit": 4, "8bit": 8}
GROUP_LEN = 64
_SMALLEST = 1e-7  # a scale; MLX has the same


def plan_mlx(source: CheckpointSource, adapter: AdapterSource | None = None, *, name: str) -> Export:
    """The export of `source`, with `adapter` added in. name: of FORMATS."""
    bits = FORMATS[name]
    if source.config.hidden_size % GROUP_LEN or source.config.expert_size % GROUP_LEN:
        raise InputError(
            f"MLX has groups of {GROUP_LEN} numbers, but the experts' rows are {source.config.hidden_size} "
            f"and {source.config.expert_size} long. `--to hf` writes plain weights, which mlx-vlm reads too.",
            field="to",
        )
    plain = plan_export(source, adapter)
    specs = {spec.name: spec for spec in tensor_specs(source.config)}
    quantization: dict[str, Any] = {"group_size": GROUP_LEN, "bits": bits, "mode": "affine"}
    tensors: list[TensorToWrite] = []
    for tensor in plain.tensors:
        spec = specs.get(tensor.name)
        if spec is None or not _is_quantized(spec):
            tensors.append(tensor)
            continue
        module = tensor.name.removesuffix(".weight")
        own = bits if spec.part == "experts" else 8
        if own != bits:
            quantization[module] = {"group_size": GROUP_LEN, "bits": own}
        tensors += _parts(module, tensor, own)
    return replace(
        plain,
        config={**plain.config, "quantization": quantization},
        tensors=tensors,
        identity=f"mlx {name} {plain.identity}",
    )


def _is_quantized(spec: TensorSpec) -> bool:
    return len(spec.shape) > 1 and spec.part != "router" and spec.shape[-1] % GROUP_LEN == 0


def _parts(module: str, tensor: TensorToWrite, bits: int) -> list[TensorToWrite]:
    """The three tensors of a weight. The integers come first: computing them also gives the others."""
    *outer, inner = tensor.shape
    weight = _MlxWeight(tensor, bits)
    groups = (*outer, inner // GROUP_LEN)
    return [
        TensorToWrite(f"{module}.weight", "U32", (*outer, inner * bits // 32), weight.packed),
        TensorToWrite(f"{module}.scales", tensor.dtype, groups, partial(weight.kept, "scales")),
        TensorToWrite(f"{module}.biases", tensor.dtype, groups, partial(weight.kept, "biases")),
    ]


class _MlxWeight:
    """Quantizes one weight, some rows at a time, and keeps its scales and biases until they are written."""

    def __init__(self, tensor: TensorToWrite, bits: int) -> None:
        self._tensor, self._bits = tensor, bits
        self._kept: dict[str, list[Tensor]] = {}

    def packed(self) -> Iterator[Any]:
        self._kept = {"scales": [], "biases": []}
        for rows in rows_in_float32(self._tensor):
            values, scale, bias = to_mlx(rows, self._bits, TORCH_DTYPES[self._tensor.dtype])
            self._kept["scales"].append(scale)
            self._kept["biases"].append(bias)
            yield values.contiguous().view(-1).numpy()

    def kept(self, part: str) -> Iterable[Any]:
        if part not in self._kept:  # a run that goes on has not written the integers
            for _ in self.packed():
                pass
        return [torch.cat(self._kept.pop(part)).view(-1).view(torch.uint8).numpy()]


def to_mlx(rows: Tensor, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes [rows, in * bits / 8], scales and biases [rows, groups] in `dtype`.

    As in MLX, the end of a group that is farther from zero gets an exact value; unlike there, scales are
    rounded to their stored type before the numbers are.
    """
    groups = rows.unflatten(-1, (-1, GROUP_LEN))
    top = 2**bits - 1
    high, low = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
    is_low = low.abs() > high.abs()
    edge = torch.where(is_low, low, high)
    scale = ((high - low) / top).clamp(min=_SMALLEST)
    scale = torch.where(is_low, scale, -scale)
    steps = (edge / scale).round()
    scale = torch.where(steps == 0, scale, edge / steps)
    edge = torch.where(steps == 0, torch.zeros_like(edge), edge)
    scale, bias = scale.to(dtype), edge.to(dtype)
    scale = torch.where(scale == 0, torch.full_like(scale, _SMALLEST), scale)
    values = ((groups - bias.float()) / scale.float()).round_().clamp_(0, top).to(torch.uint8).flatten(-2)
    return pack(values) if bits == 4 else values, scale.squeeze(-1), bias.squeeze(-1)
