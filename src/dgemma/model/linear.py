"""Linear layers. A `Linear` is one linear map; an `ExpertLinear` is one linear map per expert (MoE).

The plain classes here hold a tensor in the model's dtype. Quantized and LoRA linears implement the same
methods, so no layer depends on how a weight is stored. On one of several ranks a linear holds some rows or
some columns of the whole weight (`ModelPart`); layers sum what the ranks contribute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dgemma.model.kernels.quantized_matmul import MAX_INNER, QuantizedMatmul, quantized_matmul

ALL = slice(None)
# Rows of a product up to which our kernel is faster than torch (docs/lab-notes.md has figures).
MAX_FEW_ROWS = 64
MAX_EMULATED_ROWS = 512
HAS_BF16_INSTRUCTIONS = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


class Linear(nn.Module, ABC):
    """A linear map from `in_features` to `out_features`, stored as rows [out, in]."""

    in_features: int
    out_features: int

    @abstractmethod
    def multiply(self, x: Tensor, rows: slice = ALL) -> Tensor:
        """`x W^T`: [..., in] -> [..., out], or only the outputs that `rows` selects."""

    @abstractmethod
    def gather_rows(self, ids: Tensor) -> Tensor:
        """Rows by index, as an embedding lookup: [...] -> [..., in]."""

    @abstractmethod
    def mix_rows(self, shares: Tensor, rows: slice = ALL) -> Tensor:
        """`shares W`, a weighted sum of all rows, or of `rows`: [..., out] -> [..., in]."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes in memory."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of its rows and products."""


class PlainLinear(Linear):
    """A weight matrix stored as one tensor in the model's dtype."""

    def __init__(
        self, out_features: int, in_features: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = _parameter(out_features, in_features, dtype=dtype, device=device)

    def multiply(self, x: Tensor, rows: slice = ALL) -> Tensor:
        weight = self.weight[rows]
        if not _is_better_in_float32(x, weight):
            return F.linear(x, weight)
        kernel = _kernel(x, x.numel() // x.shape[-1])
        if kernel is None:
            return F.linear(x.float(), weight.float()).to(x.dtype)
        return kernel.multiply_plain(x.reshape(-1, self.in_features), weight).view(*x.shape[:-1], -1)

    def gather_rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)

    def mix_rows(self, shares: Tensor, rows: slice = ALL) -> Tensor:
        if _is_better_in_float32(shares, self.weight):
            return (shares.float() @ self.weight[rows].float()).to(shares.dtype)
        return shares @ self.weight[rows]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype


class ExpertLinear(nn.Module, ABC):
    """One linear map per expert, all of one shape, stored as [experts, out, in]."""

    num_experts: int
    in_features: int
    out_features: int

    @abstractmethod
    def multiply(self, expert: int, x: Tensor) -> Tensor:
        """One expert's product: [n, in] -> [n, out]."""

    @abstractmethod
    def multiply_grouped(self, x: Tensor, ends: Tensor) -> Tensor:
        """All experts at once, nothing read back from the device.

        `x` [n, in] is sorted by expert; expert e owns the rows before `ends[e]` (int32) that no
        earlier expert owns. -> [n, out]
        """

    def multiply_exact(self, x: Tensor, ends: Tensor) -> Tensor | None:
        """The same, in a way that a row's bits do not depend on the other rows; None: not here."""
        return None

    def multiply_blocks(self, x: Tensor, expert_of_block: Tensor) -> Tensor:
        """Blocks of rows, each of one expert, sorted by expert: [blocks, rows, in] -> [blocks, rows, out]."""
        every = torch.arange(self.num_experts, device=x.device)
        ends = torch.searchsorted(expert_of_block, every, right=True) * x.shape[1]
        product = self.multiply_grouped(x.flatten(0, 1), ends.to(torch.int32))
        return product.view(*x.shape[:2], self.out_features)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes in memory."""


class PlainExpertLinear(ExpertLinear):
    """The weights of all experts stored as one tensor in the model's dtype."""

    def __init__(
        self,
        num_experts: int,
        out_features: int,
        in_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.in_features = in_features
        self.out_features = out_features
        self.weight = _parameter(num_experts, out_features, in_features, dtype=dtype, device=device)

    def multiply(self, expert: int, x: Tensor) -> Tensor:
        kernel = None if needs_gradient(x, self.weight) else _kernel(x, x.shape[0])
        if kernel is not None:
            return kernel.multiply_plain(x, self.weight[expert])
        return F.linear(x, self.weight[expert])

    def multiply_grouped(self, x: Tensor, ends: Tensor) -> Tensor:
        kernel = _kernel(x, x.shape[0] // self.num_experts)
        if kernel is not None and not needs_gradient(x, self.weight):
            return kernel.multiply_plain(x, self.weight, ends)
        return F.grouped_mm(x, self.weight.transpose(-2, -1), offs=ends)

    def multiply_exact(self, x: Tensor, ends: Tensor) -> Tensor | None:
        kernel = None if needs_gradient(x, self.weight) else _kernel(x, rows=0)
        return None if kernel is None else kernel.multiply_plain(x, self.weight, ends)

    def multiply_blocks(self, x: Tensor, expert_of_block: Tensor) -> Tensor:
        # A copy of an expert's weights per block, which is small beside a block's own work.
        return torch.bmm(x, select_experts(self.weight, expert_of_block).transpose(1, 2))

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


def needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def is_emulated(x: Tensor) -> bool:
    """Whether products of x's dtype are emulated on its device: bf16 on a CPU without bf16 instructions.

    They take several times as long as in fp32.
    """
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and not HAS_BF16_INSTRUCTIONS


def _is_better_in_float32(x: Tensor, weight: Tensor) -> bool:
    """Whether a product of a real tensor is emulated: one that only counts memory stays as it is."""
    return is_emulated(x) and type(x) is Tensor and not needs_gradient(x, weight)


def _kernel(x: Tensor, rows: int) -> QuantizedMatmul | None:
    """Our product in fp32 where it is faster than torch's: few rows, or bf16 that is emulated."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.device.type != "cpu":
        return None
    if x.shape[-1] > MAX_INNER:  # the kernel's buffers have so many numbers
        return None
    most = MAX_EMULATED_ROWS if is_emulated(x) else MAX_FEW_ROWS if x.dtype == torch.float32 else 0
    return quantized_matmul() if rows <= most else None


def _parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    # A loaded model is for inference; the trainer switches on what it trains.
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def select_experts(weight: Tensor, expert_of_block: Tensor) -> Tensor:
    """Each block's expert weights: [experts, out, in] -> [blocks, out, in]."""
    if torch.is_grad_enabled():
        result: Tensor = _SelectExperts.apply(weight, expert_of_block)  # type: ignore[no-untyped-call]
        return result
    return weight.index_select(0, expert_of_block)


class _SelectExperts(torch.autograd.Function):
    @staticmethod
    def forward(weight: Tensor, expert_of_block: Tensor) -> Tensor:
        return weight.index_select(0, expert_of_block)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.num_experts = inputs[0].shape[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (expert_of_block,) = ctx.saved_tensors
        every = torch.arange(ctx.num_experts, device=expert_of_block.device)[:, None]
        # The sum over each expert's blocks as a matrix product: cheap beside the block's own product.
        belongs = (expert_of_block == every).to(grads[0].dtype)
        return (belongs @ grads[0].flatten(1)).unflatten(1, grads[0].shape[1:]), None
