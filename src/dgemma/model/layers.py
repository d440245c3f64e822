"""Small building blocks shared by all layers: RMS norm and the gated MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dgemma.kernels.elementwise import kernels_for
from dgemma.model.linear import Linear, PlainLinear, needs_gradient


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm: computed in fp32, multiplied by `weight` (not 1 + weight), cast back to x's dtype."""
    kernels = kernels_for(x)
    if kernels is None or needs_gradient(x) or (weight is not None and not _fits(x, weight)):
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return kernels.rms_norm(x, weight, eps)


def _fits(x: Tensor, weight: Tensor) -> bool:
    return weight.dtype == x.dtype and not needs_gradient(weight)


class RmsNorm(nn.Module):
    """An RMS norm with a weight. Where the model has no weight, layers call `rms_norm` directly."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def gated_gelu(gate: Tensor, up: Tensor) -> Tensor:
    kernels = kernels_for(gate)
    if kernels is not None and gate.stride() == up.stride() and not needs_gradient(gate, up):
        gates, ups = gate.flatten(0, -2), up.flatten(0, -2)
        if gates.stride(-1) == 1 and gates.stride() == ups.stride():
            return kernels.gated_gelu(gates, ups).view(gate.shape)
    return F.gelu(gate, approximate="tanh") * up


class GatedMlp(nn.Module):
    """Gated feed-forward `down(gelu(gate) * up)`: the shared MLP of a layer, and self-conditioning."""

    gate: Linear
    up: Linear
    down: Linear

    def __init__(self, hidden: int, width: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.gate = PlainLinear(width, hidden, dtype=dtype, device=device)
        self.up = PlainLinear(width, hidden, dtype=dtype, device=device)
        self.down = PlainLinear(hidden, width, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.down.multiply(gated_gelu(self.gate.multiply(x), self.up.multiply(x)))
