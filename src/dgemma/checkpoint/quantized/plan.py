"""What `dgemma quantize` makes of each weight, and how config.json says so. Imports no torch.

Experts are nine tenths of the released model: they get the bits that were asked for. The other linears and
the embedding get eight, a scale to each row. Routers, norms and scalars stay as they are: they are small,
and a router that errs sends a token elsewhere.

The layout is compressed-tensors', experts taken apart, as other runtimes read it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dgemma.checkpoint.names import TensorSpec
from dgemma.checkpoint.quantized.entries import module_names
from dgemma.checkpoint.quantized.formats import CompressedNvfp4, CompressedPacked, CompressedScaled, Format
from dgemma.checkpoint.safetensors_file import ITEM_BYTES
from dgemma.errors import InputError
from dgemma.model.config import ModelConfig

INT8 = CompressedScaled("compressed-tensors int-quantized", integers=True)
NVFP4 = CompressedNvfp4()
GROUP_LENS = (32, 16, 8)  # of int4, the first that divides every row
NAMES = ("int8", "int4", "nvfp4")


@dataclass(frozen=True)
class QuantizationPlan:
    """Which format each weight gets."""

    name: str
    experts: Format
    others: Format = INT8

    def format_of(self, spec: TensorSpec) -> Format | None:
        """None: it stays as it is."""
        if spec.part == "router" or len(spec.shape) < 2:
            return None
        return self.experts if spec.part == "experts" else self.others

    def nbytes(self, spec: TensorSpec) -> int | None:
        """Bytes of its codes and scales; None: it stays as it is."""
        form = self.format_of(spec)
        if form is None:
            return None
        inner = spec.shape[-1]
        pieces = len(next(module_names(spec)))
        total = 0
        for name, part in form.parts(spec.size // inner // pieces, inner).items():
            dtype = "BF16" if name == "weight_scale" and "BF16" in part.dtypes else part.dtypes[0]
            total += math.prod(part.shapes[0]) * ITEM_BYTES[dtype]
        return total * pieces

    def to_json(self) -> dict[str, Any]:
        """`quantization_config`, as compressed-tensors reads it."""
        groups = {"group_0": _group(["re:.*experts\\.\\d+\\..*"], self.experts)}
        groups["group_1"] = _group(["Linear", "Embedding"], self.others)
        layouts = {group["format"] for group in groups.values()}
        return {
            "quant_method": "compressed-tensors",
            "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": ["lm_head", "re:.*router.*", "re:.*vision.*"],
            "kv_cache_scheme": None,
        }


def plan_of(name: str, config: ModelConfig) -> QuantizationPlan:
    if name not in NAMES:
        raise InputError(f"the format is {name!r}; known: {', '.join(NAMES)}.")
    if name == "int8":
        return QuantizationPlan(name, INT8)
    rows = (config.hidden_size, config.expert_size)
    lens = (16,) if name == "nvfp4" else GROUP_LENS
    fitting = [length for length in lens if all(row % length == 0 for row in rows)]
    if not fitting:
        raise InputError(
            f"{name} has groups of {lens[-1]} numbers, but the experts' rows are {rows[0]} and {rows[1]} "
            "long. Use int8."
        )
    int4 = CompressedPacked(bits=4, group_len=fitting[0])
    return QuantizationPlan(name, NVFP4 if name == "nvfp4" else int4)


def _group(targets: list[str], form: Format) -> dict[str, Any]:
    weights: dict[str, Any] = {"symmetric": True, "dynamic": False, "observer": "minmax"}
    match form:
        case CompressedPacked():
            layout = "pack-quantized"
            weights |= {"num_bits": 4, "type": "int", "strategy": "group", "group_size": form.group_len}
        case CompressedNvfp4():
            layout = "nvfp4-pack-quantized"
            weights |= {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
            weights |= {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": None}
        case _:
            layout = "int-quantized"
            weights |= {"num_bits": 8, "type": "int", "strategy": "channel"}
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": layout,
    }
