"""How the stack computes, as opposed to what: the exact way, and the accelerator's way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result", Tensor, tuple[Tensor, ...])


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How the stack computes; the result is the same up to rounding.

    exact: a row's bits do not depend on what shares its batch, nor on how its prompt was cut. Every
      product then runs at a fixed number of rows: `encode_block` tokens aligned to their absolute
      position, a whole canvas, or `expert_tile` rows of one expert.
    grouped_experts: all experts' products in one call that reads nothing back from the device. The
      exact way never uses it. Off only where torch lacks it: see `default_execution`.
    expert_block: pad each expert's rows to whole blocks of so many, so that every product has one shape.
      Compiled code then needs no sizes, and oneDNN, which makes a kernel per shape, makes one. For
      training small models; the exact way never uses it.
    explicit_attention: products and a softmax in place of torch's fused attention, whose bf16 backward
      is slow on a CPU. Holds every score; for training on short texts.
    recompute_layers: keep only each layer's input for the backward pass, and compute the rest again.
    fused_vocabulary: the walk over the vocabulary as a compiled kernel. Making it takes seconds.
    """

    exact: bool = False
    encode_block: int = 64
    expert_tile: int = 32
    grouped_experts: bool = True
    expert_block: int | None = None
    explicit_attention: bool = False
    recompute_layers: bool = False
    fused_vocabulary: bool = False


def default_execution(device: torch.device, dtype: torch.dtype, *, exact: bool = False) -> Execution:
    """torch's grouped product takes bf16 on CUDA, anything on a CPU, and is untried on mps."""
    grouped = device.type in ("cpu", "meta") or (device.type == "cuda" and dtype == torch.bfloat16)
    return Execution(exact=exact, grouped_experts=grouped)


def by_block(block: int | None, function: Callable[..., Result], *tensors: Tensor) -> Result:
    """`function` over [rows, tokens, ...]: all at once, or on each block of tokens alone.

    A block of fixed shape makes everything inside reproducible: products, whose kernels depend on
    the row count, and element-wise functions, whose vector tails depend on the element count.
    """
    if block is None:
        return function(*tensors)
    rows, tokens = tensors[0].shape[:2]
    blocks = [t.unflatten(1, (-1, block)).flatten(0, 1).split(1) for t in tensors]
    results = [function(*one) for one in zip(*blocks, strict=True)]

    def join(parts: tuple[Tensor, ...]) -> Tensor:
        return torch.cat(parts).flatten(0, 1).view(rows, tokens, *parts[0].shape[2:])

    first = results[0]
    if isinstance(first, tuple):
        return tuple(join(parts) for parts in zip(*results, strict=True))
    return join(tuple(results))
