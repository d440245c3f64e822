"""The gated feed-forward block: `down(gelu(gate) * up)`, shared by every layer and self-conditioning."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dgemma.model.weight import Matrix, PlainMatrix


def gated_gelu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


class GatedMlp(nn.Module):
    gate: Matrix
    up: Matrix
    down: Matrix

    def __init__(self, hidden: int, width: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.gate = PlainMatrix(width, hidden, dtype=dtype, device=device)
        self.up = PlainMatrix(width, hidden, dtype=dtype, device=device)
        self.down = PlainMatrix(hidden, width, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.down.multiply(gated_gelu(self.gate.multiply(x), self.up.multiply(x)))
