"""Small building blocks shared by all layers: RMS norm and the gated MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from dgemma.kernels.elementwise import kernels_for
from dgemma.model.linear import Linear, PlainLinear, needs_gradient
from dgemma.model.ranks import ALONE, Ranks


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm: computed in fp32, multiplied by `weight` (not 1 + weight), cast back to x's dtype."""
    kernels = kernels_for(x)
    if kernels is None or (weight is not None and weight.dtype != x.dtype):
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    if needs_gradient(x, *([] if weight is None else [weight])):
        if x.dtype != torch.float32:
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        result: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
        return result
    return kernels.rms_norm(x, weight, eps)


class _RmsNorm(torch.autograd.Function):
    """The kernel, with gradients; in float32."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        kernels = kernels_for(x)
        assert kernels is not None
        return kernels.rms_norm(x, weight, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ctx.eps = inputs
        ctx.save_for_backward(x, *([] if weight is None else [weight]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weight = ctx.saved_tensors
        kernels = kernels_for(x)
        assert kernels is not None
        return *kernels.rms_norm_backward(x, weight[0] if weight else None, grad, ctx.eps), None


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
    has_gradient = needs_gradient(gate, up)
    if (
        kernels is not None
        and gate.stride() == up.stride()
        and not (has_gradient and gate.dtype != torch.float32)
    ):
        gates, ups = gate.flatten(0, -2), up.flatten(0, -2)
        if gates.stride(-1) == 1 and gates.stride() == ups.stride():
            if has_gradient:
                result: Tensor = _GatedGelu.apply(gates, ups)  # type: ignore[no-untyped-call]
                return result.view(gate.shape)
            return kernels.gated_gelu(gates, ups).view(gate.shape)
    return F.gelu(gate, approximate="tanh") * up


class _GatedGelu(torch.autograd.Function):
    """The kernel, with gradients; in float32."""

    @staticmethod
    def forward(gate: Tensor, up: Tensor) -> Tensor:
        kernels = kernels_for(gate)
        assert kernels is not None
        return kernels.gated_gelu(gate, up)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        kernels = kernels_for(gate)
        assert kernels is not None
        return kernels.gated_gelu_backward(gate, up, grad)


class GatedMlp(nn.Module):
    """Gated feed-forward `down(gelu(gate) * up)`: the shared MLP of a layer, and self-conditioning.

    width: of this rank's part.
    """

    gate: Linear
    up: Linear
    down: Linear

    def __init__(
        self, hidden: int, width: int, *, dtype: torch.dtype, device: torch.device, ranks: Ranks = ALONE
    ) -> None:
        super().__init__()
        self.ranks = ranks
        self.gate = PlainLinear(width, hidden, dtype=dtype, device=device)
        self.up = PlainLinear(width, hidden, dtype=dtype, device=device)
        self.down = PlainLinear(hidden, width, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        part = self.down.multiply(gated_gelu(self.gate.multiply(x), self.up.multiply(x)))
        return self.ranks.sum(part)
