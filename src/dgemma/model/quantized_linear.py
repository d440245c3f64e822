"""Quantized linears. A product dequantizes its weight, or runs on the quantized data if a kernel is faster.

A dequantized weight is freed after its product. The backward pass dequantizes it again, so a frozen 4-bit
base (QLoRA) stays in four bits during training.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dgemma.model.block_tensor import BLOCK_FORMATS, AnyQuantized, BlockTensor
from dgemma.model.kernels import triton_experts
from dgemma.model.kernels.quantized_matmul import QuantizedMatmul, quantized_matmul
from dgemma.model.linear import ALL, ExpertLinear, Linear, is_emulated, needs_gradient
from dgemma.model.quantized_tensor import QuantizedTensor

_PARTS = ("qdata", "scale", "zero_point", "global_scale", "bias")
_ROWS_AT_ONCE = 1024
_MAX_LAYER_ROWS = 16 * 1024  # no matrix of a layer has more
MAX_FLOAT_ROWS = 512


class QuantizedWeight(nn.Module):
    """Stores the parts of a quantized weight as buffers, which are never trained.

    rounds_activations: products may quantize activations to int8, as the CPU kernel does.
    """

    qdata: Tensor
    scale: Tensor
    zero_point: Tensor | None
    global_scale: Tensor | None
    bias: Tensor | None

    def _register(self, weight: AnyQuantized, rounds_activations: bool) -> None:
        self.rounds_activations = rounds_activations
        self.kind = weight.kind  # of a BlockTensor: the name of its format
        self.global_scale_divides = isinstance(weight, QuantizedTensor) and weight.global_scale_divides
        for name in _PARTS:
            self.register_buffer(name, weight.parts.get(name))

    @property
    def quantized(self) -> AnyQuantized:
        if isinstance(self.kind, str):
            return BlockTensor(BLOCK_FORMATS[self.kind], self.qdata)
        return QuantizedTensor(
            self.kind,
            self.qdata,
            self.scale,
            self.zero_point,
            self.global_scale,
            self.global_scale_divides,
            self.bias,
        )

    def kernel(self, x: Tensor, num_experts: int = 1) -> QuantizedMatmul | None:
        """The kernel that multiplies `x` without dequantizing, if there is one for this weight and device."""
        if x.device.type != "cpu" or needs_gradient(x):
            return None
        found = quantized_matmul()
        weight = self.quantized
        if found is None or isinstance(weight, BlockTensor) or not found.supports(weight):
            return None
        if found.rounds:
            return found if self.rounds_activations else None
        # With many rows a product of torch's is faster, also after dequantizing.
        is_small = x.numel() <= MAX_FLOAT_ROWS * x.shape[-1] * num_experts
        return found if is_small and type(x) is Tensor else None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.quantized.parts.values())


class QuantizedLinear(QuantizedWeight, Linear):
    """A linear with a quantized weight."""

    def __init__(self, weight: AnyQuantized, *, dtype: torch.dtype, rounds_activations: bool = True) -> None:
        super().__init__()
        self._register(weight, rounds_activations)
        self.out_features, self.in_features = weight.shape
        self._dtype = dtype

    def multiply(self, x: Tensor, rows: slice = ALL) -> Tensor:
        kernel, weight = self.kernel(x), self.quantized[rows]
        if kernel is None or isinstance(weight, BlockTensor):
            return product(x, weight)
        return kernel.multiply(x.reshape(-1, self.in_features), weight).view(*x.shape[:-1], -1)

    def gather_rows(self, ids: Tensor) -> Tensor:
        return self.quantized[ids].dequantize(self._dtype)

    def mix_rows(self, shares: Tensor, rows: slice = ALL) -> Tensor:
        return _mixed_rows(shares, self.quantized[rows])

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype


class QuantizedExpertLinear(QuantizedWeight, ExpertLinear):
    """Quantized expert weights (MoE). Only experts that the router chose are dequantized."""

    def __init__(self, weight: AnyQuantized, *, rounds_activations: bool = True) -> None:
        super().__init__()
        self._register(weight, rounds_activations)
        self.num_experts, self.out_features, self.in_features = weight.shape

    def multiply(self, expert: int, x: Tensor) -> Tensor:
        kernel, weight = self.kernel(x), self.quantized[expert]
        if kernel is None or isinstance(weight, BlockTensor):
            return product(x, weight)
        return kernel.multiply(x, weight)

    def multiply_exact(self, x: Tensor, ends: Tensor) -> Tensor | None:
        kernel, weight = self.kernel(x[:0]), self.quantized
        if kernel is None or isinstance(weight, BlockTensor):
            return None
        return kernel.multiply(x, weight, ends)

    def multiply_grouped(self, x: Tensor, ends: Tensor) -> Tensor:
        kernel, weight = self.kernel(x, self.num_experts), self.quantized
        if isinstance(weight, QuantizedTensor):
            if kernel is not None:
                return kernel.multiply(x, weight, ends)
            if not needs_gradient(x) and triton_experts.supports(weight):
                return triton_experts.multiply_grouped(x, ends, weight)
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        groups = enumerate(x.split(counts))
        return torch.cat([product(group, weight[expert]) for expert, group in groups if len(group)])


def product(x: Tensor, weight: AnyQuantized) -> Tensor:
    """`x W^T` for `x` [..., in] -> [..., out]. Gradients reach `x`, never the quantized weight."""
    if needs_gradient(x):
        result: Tensor = _Product.apply(x, weight)  # type: ignore[no-untyped-call]
        return result
    return _dequantized_product(x, weight)


def _mixed_rows(shares: Tensor, weight: AnyQuantized) -> Tensor:
    """`shares W` for `shares` [..., out] -> [..., in]."""
    dtype = arithmetic(shares)
    total: Tensor | None = None
    # Some rows at a time: a dequantized vocabulary tile is large, and allocating that much memory is slow.
    for begin in range(0, weight.shape[0], _ROWS_AT_ONCE):
        some = slice(begin, begin + _ROWS_AT_ONCE)
        part = shares[..., some].to(dtype) @ weight[some].dequantize(dtype)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.to(shares.dtype)


def _dequantized_product(x: Tensor, weight: AnyQuantized) -> Tensor:
    """`x W^T` with the dequantized weight. Some rows at a time: a whole vocabulary would be gigabytes."""
    dtype = arithmetic(x)
    wide = x.to(dtype)
    if weight.shape[0] <= _MAX_LAYER_ROWS:
        return F.linear(wide, weight.dequantize(dtype)).to(x.dtype)
    result = x.new_empty(*x.shape[:-1], weight.shape[0])
    for begin in range(0, weight.shape[0], _ROWS_AT_ONCE):
        some = slice(begin, begin + _ROWS_AT_ONCE)
        result[..., some] = F.linear(wide, weight[some].dequantize(dtype))
    return result


def arithmetic(x: Tensor) -> torch.dtype:
    """The dtype of a product with a dequantized weight: x's dtype, unless the CPU emulates it.

    Without bf16 instructions a product in bf16 takes four times as long as in fp32, and dequantizing costs
    the same.
    """
    return torch.float32 if is_emulated(x) else x.dtype


class _Product(torch.autograd.Function):
    """A product that saves the quantized weight for backward, where torch would save the dequantized one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: AnyQuantized) -> Tensor:
        ctx.quantized = weight
        return _dequantized_product(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _mixed_rows(grads[0], ctx.quantized), None
