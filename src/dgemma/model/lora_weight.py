"""A weight that wraps another one and adds a low-rank product to it (LoRA).

It answers `W x + (alpha / rank) up (down x)`, and asks its base only what any layer may ask: the base
can be plain, quantized or sharded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dgemma.model.dispatch import select_experts
from dgemma.model.weight import ALL, Matrix, MatrixBank

_GROUPED_BYTES = 16  # torch's grouped product wants every row of its operands aligned so


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """What is added to one weight. Of a bank both factors have the experts in front."""

    down: Tensor  # [rank, in], LoRA's A
    up: Tensor  # [out, rank], LoRA's B
    alpha: float

    def to(self, device: torch.device, dtype: torch.dtype) -> LowRank:
        return LowRank(down=self.down.to(device, dtype), up=self.up.to(device, dtype), alpha=self.alpha)


class LoraMatrix(Matrix):
    """A matrix plus a low-rank one. The factors are used in the dtype of what they multiply."""

    def __init__(self, base: Matrix, added: LowRank, *, trainable: bool = True) -> None:
        super().__init__()
        self.base = base
        self.in_features, self.out_features = base.in_features, base.out_features
        self.rank, self.alpha = added.down.shape[-2], added.alpha
        self.scale = self.alpha / self.rank
        self.down = nn.Parameter(added.down, requires_grad=trainable)
        self.up = nn.Parameter(added.up, requires_grad=trainable)

    def multiply(self, x: Tensor, rows: slice = ALL) -> Tensor:
        low = F.linear(x, self.down.to(x.dtype)) * self.scale
        return self.base.multiply(x, rows) + F.linear(low, self.up[rows].to(x.dtype))

    def gather_rows(self, ids: Tensor) -> Tensor:
        rows = self.base.gather_rows(ids)
        up = F.embedding(ids, self.up).to(rows.dtype) * self.scale
        return rows + up @ self.down.to(rows.dtype)

    def mix_rows(self, shares: Tensor, rows: slice = ALL) -> Tensor:
        low = shares @ self.up[rows].to(shares.dtype) * self.scale
        return self.base.mix_rows(shares, rows) + low @ self.down.to(shares.dtype)

    @property
    def nbytes(self) -> int:
        return self.base.nbytes + self.down.nbytes + self.up.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype


class LoraBank(MatrixBank):
    """A bank plus a low-rank addition of its own for every expert."""

    def __init__(self, base: MatrixBank, added: LowRank, *, trainable: bool = True) -> None:
        super().__init__()
        self.base = base
        self.num_experts = base.num_experts
        self.in_features, self.out_features = base.in_features, base.out_features
        self.rank, self.alpha = added.down.shape[-2], added.alpha
        self.scale = self.alpha / self.rank
        self.down = nn.Parameter(added.down, requires_grad=trainable)
        self.up = nn.Parameter(added.up, requires_grad=trainable)

    def multiply(self, expert: int, x: Tensor) -> Tensor:
        low = F.linear(x, self.down[expert].to(x.dtype)) * self.scale
        return self.base.multiply(expert, x) + F.linear(low, self.up[expert].to(x.dtype))

    def multiply_grouped(self, x: Tensor, ends: Tensor) -> Tensor:
        down, up = self.down.to(x.dtype), self.up.to(x.dtype)
        # Zeros fill the rank up to the alignment: half a row at rank 4 in bf16, nothing at rank 8.
        missing = -self.rank % (_GROUPED_BYTES // x.element_size())
        if missing:
            down, up = F.pad(down, (0, 0, 0, missing)), F.pad(up, (0, missing))
        low = F.grouped_mm(x, down.transpose(-2, -1), offs=ends) * self.scale
        return self.base.multiply_grouped(x, ends) + F.grouped_mm(low, up.transpose(-2, -1), offs=ends)

    def multiply_blocks(self, x: Tensor, expert_of_block: Tensor) -> Tensor:
        down = select_experts(self.down.to(x.dtype), expert_of_block)
        up = select_experts(self.up.to(x.dtype), expert_of_block)
        low = torch.bmm(x, down.transpose(1, 2)) * self.scale
        return self.base.multiply_blocks(x, expert_of_block) + torch.bmm(low, up.transpose(1, 2))

    @property
    def nbytes(self) -> int:
        return self.base.nbytes + self.down.nbytes + self.up.nbytes


@torch.no_grad()
def merged_weight(weight: Tensor, added: LowRank) -> Tensor:
    """`W + (alpha / rank) up down`, added in fp32 and rounded once to W's dtype."""
    if weight.ndim == 3:  # expert by expert: a whole bank in fp32 is gigabytes
        result = torch.empty_like(weight)
        for expert, one in enumerate(weight):
            result[expert] = merged_weight(
                one, LowRank(down=added.down[expert], up=added.up[expert], alpha=added.alpha)
            )
        return result
    product = added.up.float() @ added.down.float()
    return (weight.float() + added.alpha / added.down.shape[0] * product).to(weight.dtype)
