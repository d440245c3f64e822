"""Parameter count, bytes and KV cache size of a model, from its configuration. Imports no torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from dgemma.checkpoint.names import tensor_specs, vision_specs
from dgemma.checkpoint.quantized.quantization_config import quantization_config_for
from dgemma.errors import InputError
from dgemma.model.config import LayerKind, ModelConfig

# The formats of `dgemma quantize`. Sizes include scales.
_QUANTIZED = {"int8": "int8", "4bit": "int4"}


@dataclass(frozen=True)
class ParameterCounts:
    """Totals exclude the vision tower, which only prompts with images use, and count tied weights once."""

    parameters_by_part: dict[str, int]
    total_parameters: int
    active_parameters: int
    vision_parameters: int  # of the tower and its projector, which stay unquantized; 0 without one
    bytes: dict[str, int]  # the vision tower included
    kv_bytes_per_1k_tokens: dict[str, int]  # bf16; sliding layers stop growing at their window
    kv_window_bytes: int  # the maximum of the sliding layers of one sequence


def count_parameters(config: ModelConfig) -> ParameterCounts:
    parts: Counter[str] = Counter()
    for spec in tensor_specs(config):
        parts[spec.part] += spec.size
    total = parts.total()
    vision = sum(spec.size for spec in vision_specs(config))
    # Each token uses only some experts; the weights of the others are not active.
    idle = parts["experts"] * (config.num_experts - config.experts_per_token) // config.num_experts
    per_token = dict.fromkeys(LayerKind, 0)
    for layer in config.layers:
        per_token[layer.kind] += 2 * 2 * layer.num_kv_heads * layer.head_dim  # K and V, 2 bytes each
    return ParameterCounts(
        parameters_by_part=dict(parts.most_common()),
        total_parameters=total,
        active_parameters=total - idle,
        vision_parameters=vision,
        bytes={
            "bf16": 2 * (total + vision),
            **{name: _quantized_bytes(config, scheme) + 2 * vision for name, scheme in _QUANTIZED.items()},
        },
        kv_bytes_per_1k_tokens={
            "sliding": 1000 * per_token[LayerKind.SLIDING],
            "full": 1000 * per_token[LayerKind.FULL],
        },
        kv_window_bytes=(config.window - 1) * per_token[LayerKind.SLIDING],
    )


def _quantized_bytes(config: ModelConfig, name: str) -> int:
    try:
        plan = quantization_config_for(name, config)
    except InputError:  # int4 groups do not divide the rows
        plan = quantization_config_for("int8", config)
    sizes = ((spec.size, plan.nbytes(spec)) for spec in tensor_specs(config))
    return sum(2 * size if quantized is None else quantized for size, quantized in sizes)
