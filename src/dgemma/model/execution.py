"""How the transformer computes: exact execution, grouped experts, recomputation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result", Tensor, tuple[Tensor, ...])


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How the transformer computes; the result is the same up to rounding.

    exact: a row's bits do not depend on the rest of the batch, nor on the chunks of its prefill. Every
      product then runs at a fixed number of rows: `encode_block` tokens aligned to their absolute
      position, a whole canvas, or `expert_tile` rows of one expert.
    grouped_experts: one grouped product for all experts, without reading anything back from the device.
      Exact execution never uses it. Off only where torch lacks it: see `default_execution`.
    expert_block: pad each expert's rows to whole blocks of this many, so that every product has one shape.
      Compiled code then needs no dynamic sizes, and oneDNN, which builds a kernel per shape, builds one. For
      training small models; exact execution never uses it.
    explicit_attention: products and a softmax in place of torch's fused attention, whose bf16 backward
      is slow on a CPU. Allocates every score; for training on short texts.
    recompute_layers: activation checkpointing. Keep only each layer's input for the backward pass.
    fused_vocabulary: the vocabulary scan as a compiled kernel. Compiling it takes seconds.
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
    """torch's grouped product supports bf16 on CUDA and any dtype on a CPU, and is untested on mps."""
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
    results = [function(*block_inputs) for block_inputs in zip(*blocks, strict=True)]

    def join(parts: tuple[Tensor, ...]) -> Tensor:
        return torch.cat(parts).flatten(0, 1).view(rows, tokens, *parts[0].shape[2:])

    first = results[0]
    if isinstance(first, tuple):
        return tuple(join(parts) for parts in zip(*results, strict=True))
    return join(tuple(results))
