"""Which part of each tensor a rank of several reads and holds. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dgemma.checkpoint.names import TensorSpec, tensor_specs, vision_specs
from dgemma.model.model_part import ModelPart


@dataclass(frozen=True)
class Division:
    """The part of a tensor that a rank holds: `part` of dimension `dim`."""

    shape: tuple[int, ...]  # of the part
    dim: int
    part: slice


def division_of(spec: TensorSpec, part: ModelPart) -> Division:
    """Heads, experts and tokens are rows; what a product sums over are columns; the rest is whole."""
    module, _, leaf = spec.path.removesuffix(".weight").rpartition(".")
    dim, own = 0, slice(0, spec.shape[0])
    if module.endswith("attention") and leaf in ("query", "key", "value", "output"):
        layer = part.config.layers[int(module.split(".")[1])]
        heads = part.kv_heads(layer) if leaf in ("key", "value") else part.heads
        dim, own = int(leaf == "output"), slice(heads.start * layer.head_dim, heads.stop * layer.head_dim)
    elif module.endswith("mlp"):
        dim, own = int(leaf == "down"), part.mlp
    elif module.endswith("experts"):
        own = part.experts
    elif leaf == "embedding":
        own = part.vocab
    shape = list(spec.shape)
    shape[dim] = own.stop - own.start
    return Division(tuple(shape), dim, own)


def part_bytes(part: ModelPart, *, item_bytes: int) -> int:
    """Of all tensors of a rank, unquantized. Every rank has the whole vision tower."""
    own = sum(math.prod(division_of(spec, part).shape) for spec in tensor_specs(part.config))
    return item_bytes * (own + sum(spec.size for spec in vision_specs(part.config)))
