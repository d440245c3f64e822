"""Weights in few bits. A product decodes its weight, or runs on the codes where a kernel does that faster.

Nothing of a decoded weight outlives the product it was for, not even for a backward pass, which decodes it
again: a frozen base in four bits trains in the memory of four bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dgemma.model.codes import CodeKind, Codes
from dgemma.model.kernels import triton_experts
from dgemma.model.kernels.few_bits import FewBits, few_bits
from dgemma.model.weight import ALL, Matrix, MatrixBank

_PARTS = ("codes", "scale", "zero", "outer")
_ROWS_AT_ONCE = 1024
_ROWS_OF_A_LAYER = 16 * 1024  # no matrix of a layer has more


class CodedWeight(nn.Module):
    """Where a coded matrix or bank keeps its parts: as buffers, which nobody trains.

    rounds_activations: products may round what they multiply to eight bits, which the kernel for CPUs does.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    outer: Tensor | None

    def hold(self, held: Codes, rounds_activations: bool) -> None:
        self.rounds_activations = rounds_activations
        self.kind: CodeKind = held.kind
        self.outer_divides = held.outer_divides
        for name in _PARTS:
            self.register_buffer(name, getattr(held, name))

    @property
    def held(self) -> Codes:
        return Codes(self.kind, self.codes, self.scale, self.zero, self.outer, self.outer_divides)

    def kernel(self, x: Tensor) -> FewBits | None:
        """What multiplies `x` faster than decoding, if anything does."""
        if not self.rounds_activations or x.device.type != "cpu" or _needs_gradient(x):
            return None
        found = few_bits()
        return found if found is not None and found.serves(self.held) else None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.held.parts.values())


class CodedMatrix(CodedWeight, Matrix):
    """A matrix in few bits."""

    def __init__(self, held: Codes, *, dtype: torch.dtype, rounds_activations: bool = True) -> None:
        super().__init__()
        self.hold(held, rounds_activations)
        self.out_features, self.in_features = held.shape
        self._dtype = dtype

    def multiply(self, x: Tensor, rows: slice = ALL) -> Tensor:
        kernel, held = self.kernel(x), self.held[rows]
        if kernel is None:
            return product(x, held)
        return kernel.multiply(x.reshape(-1, self.in_features), held).view(*x.shape[:-1], -1)

    def gather_rows(self, ids: Tensor) -> Tensor:
        return self.held[ids].decode(self._dtype)

    def mix_rows(self, shares: Tensor, rows: slice = ALL) -> Tensor:
        return _mixed_rows(shares, self.held[rows])

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype


class CodedBank(CodedWeight, MatrixBank):
    """A bank in few bits. Experts nobody chose are not decoded."""

    def __init__(self, held: Codes, *, rounds_activations: bool = True) -> None:
        super().__init__()
        self.hold(held, rounds_activations)
        self.num_experts, self.out_features, self.in_features = held.shape

    def multiply(self, expert: int, x: Tensor) -> Tensor:
        kernel, held = self.kernel(x), self.held[expert]
        return product(x, held) if kernel is None else kernel.multiply(x, held)

    def multiply_grouped(self, x: Tensor, ends: Tensor) -> Tensor:
        kernel = self.kernel(x)
        if kernel is not None:
            return kernel.multiply(x, self.held, ends)
        if not _needs_gradient(x) and triton_experts.serves(self.held):
            return triton_experts.multiply_grouped(x, ends, self.held)
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        groups = enumerate(x.split(counts))
        return torch.cat([product(group, self.held[expert]) for expert, group in groups if len(group)])


def product(x: Tensor, held: Codes) -> Tensor:
    """`x W^T` for `x` [..., in] -> [..., out]. Gradients reach `x`, never the codes."""
    if _needs_gradient(x):
        result: Tensor = _Product.apply(x, held)  # type: ignore[no-untyped-call]
        return result
    return _decoded_product(x, held)


def _mixed_rows(shares: Tensor, held: Codes) -> Tensor:
    """`shares W` for `shares` [..., out] -> [..., in]."""
    dtype = arithmetic(shares)
    total: Tensor | None = None
    # Some rows at a time: a decoded tile of words is large, and fresh memory of that size is slow.
    for begin in range(0, held.shape[0], _ROWS_AT_ONCE):
        some = slice(begin, begin + _ROWS_AT_ONCE)
        part = shares[..., some].to(dtype) @ held[some].decode(dtype)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.to(shares.dtype)


def _decoded_product(x: Tensor, held: Codes) -> Tensor:
    """A whole vocabulary, decoded, would be gigabytes: it is read some rows at a time."""
    dtype = arithmetic(x)
    wide = x.to(dtype)
    if held.shape[0] <= _ROWS_OF_A_LAYER:
        return F.linear(wide, held.decode(dtype)).to(x.dtype)
    result = x.new_empty(*x.shape[:-1], held.shape[0])
    for begin in range(0, held.shape[0], _ROWS_AT_ONCE):
        some = slice(begin, begin + _ROWS_AT_ONCE)
        result[..., some] = F.linear(wide, held[some].decode(dtype))
    return result


def _needs_gradient(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def arithmetic(x: Tensor) -> torch.dtype:
    """What a product with a decoded weight is computed in: x's dtype, unless the CPU only imitates it.

    Without bf16 instructions a product in bf16 takes four times as long as in fp32, and decoding costs the
    same.
    """
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and not _has_bf16_instructions():
        return torch.float32
    return x.dtype


@cache
def _has_bf16_instructions() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


class _Product(torch.autograd.Function):
    """A product that keeps the codes, where torch would keep the decoded weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Codes) -> Tensor:
        ctx.held = held
        return _decoded_product(x, held)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _mixed_rows(grads[0], ctx.held), None
