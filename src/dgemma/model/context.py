"""What a forward may read of the past: keys and values per layer, and which position each slot holds.

A `Context` is plain tensors. `KVCache` makes one from its own storage; a paged pool can make one
from gathered pages; training can make one straight from `Fresh`, what `encode` returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma.model.config import LayerKind

# Shapes: rows = sequences of the batch, slots = places for context tokens, tokens = computed now.


@dataclass(frozen=True)
class Fresh:
    """Keys and values that one `encode` computed, per layer [rows, tokens, kv_heads, head_dim]."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


@dataclass(frozen=True)
class Context:
    """The past of every row. Rows of different length share the slots; empty slots are masked.

    A token at position p sits in slot p % slots, so a sliding layer's slots form a ring that keeps
    the newest tokens, and a full layer's never wrap. Empty slots must hold finite numbers.
    """

    keys: tuple[Tensor, ...]  # per layer [rows, slots, kv_heads, head_dim]
    values: tuple[Tensor, ...]
    slots: dict[LayerKind, int]
    lengths: Tensor  # [rows] tokens in the past of each row, on the device
    host_lengths: tuple[int, ...]  # the same numbers where reading them costs nothing

    def positions(self, kind: LayerKind) -> Tensor:
        """The position each slot holds [rows, slots]; negative where the slot is empty."""
        slots = self.slots[kind]
        newest = self.lengths[:, None] - 1
        if slots == 0:
            return newest[:, :0]
        return newest - (newest - torch.arange(slots, device=newest.device)) % slots


def context_of_fresh(fresh: Fresh, kinds: Sequence[LayerKind], lengths: Tensor) -> Context:
    """The first `lengths` [rows] tokens of rows encoded in one piece, without a cache: for training.

    Only the exact way asks for lengths on the host, and training does not run it.
    """
    return Context(
        keys=fresh.keys,
        values=fresh.values,
        slots=dict.fromkeys(kinds, fresh.keys[0].shape[1]),
        lengths=lengths,
        host_lengths=(),
    )
