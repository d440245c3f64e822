"""From plain numbers to few bits: the nearest code under the scale as it will be stored."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dgemma.model.codes import FLOAT4_NUMBERS, MIDDLE_OF_4_BITS, CodeKind, Codes, pack

Round = Callable[[Tensor], Codes]
"""Rows [out, in] of a weight -> the same in few bits."""

_SMALLEST = 2.0**-100  # a scale for rows of zeros; it divides, and bf16 holds it
# A group's largest number sets its scale. Cutting it off a little makes the others finer; where their gain
# is larger, the cut pays. Tried in this order, the first of equals wins.
_CUTS = (1.0, 0.94, 0.88, 0.82)
_FLOAT4_TOP, _FLOAT8_TOP = 6.0, 448.0


def to_int8(rows: Tensor) -> Codes:
    """A scale to each row."""
    numbers = rows.float()
    scale = (numbers.abs().amax(-1, keepdim=True) / 127).clamp(min=_SMALLEST).bfloat16()
    codes = (numbers / scale.float()).round_().clamp_(-127, 127).to(torch.int8)
    return Codes(CodeKind.INT8, codes, scale)


def to_int4(rows: Tensor, group_len: int) -> Codes:
    """A scale to each group, the one of a few candidates that leaves the smallest squared error."""
    groups = rows.float().unflatten(-1, (-1, group_len))
    largest = groups.abs().amax(-1, keepdim=True)
    codes, scale, error = _cut(groups, largest, _CUTS[0])
    for cut in _CUTS[1:]:
        other_codes, other_scale, other_error = _cut(groups, largest, cut)
        better = other_error < error
        codes = torch.where(better, other_codes, codes)
        scale = torch.where(better, other_scale, scale)
        error = torch.where(better, other_error, error)
    stored = codes.add_(MIDDLE_OF_4_BITS).flatten(-2).to(torch.uint8)
    return Codes(CodeKind.INT4, pack(stored), scale.squeeze(-1).bfloat16())


def _cut(groups: Tensor, largest: Tensor, cut: float) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and squared errors if the range ends at `cut` times the largest number."""
    scale = (largest * (cut / 7.5)).clamp(min=_SMALLEST).bfloat16().float()
    codes = (groups / scale).round_().clamp_(-8, 7)
    return codes, scale, (codes * scale).sub_(groups).square_().sum(-1, keepdim=True)


def to_nvfp4(matrix: Tensor) -> Codes:
    """NVFP4: e4m3 scales under one for the whole matrix, which makes the largest of them 448."""
    groups = matrix.float().unflatten(-1, (-1, 16))
    largest = groups.abs().amax(-1)
    outer = _FLOAT8_TOP * _FLOAT4_TOP / largest.amax().clamp(min=_SMALLEST)
    # Rounded to e4m3 a small scale may become 0, and a group of zeros has none.
    scale = (largest / _FLOAT4_TOP * outer).clamp(2.0**-9, _FLOAT8_TOP).to(torch.float8_e4m3fn)
    exact = groups / (scale.float() / outer)[..., None]
    codes = _nearest_float4(exact.flatten(-2))
    expanded = outer.reshape(1, 1).expand(len(matrix), 1)
    return Codes(CodeKind.FLOAT4, pack(codes), scale, outer=expanded, outer_divides=True)


def _nearest_float4(numbers: Tensor) -> Tensor:
    """Codes of the nearest e2m1 numbers; between two, the one with the even mantissa."""
    steps = torch.tensor(FLOAT4_NUMBERS)
    middles = (steps[1:] + steps[:-1]) / 2
    size = numbers.abs()
    below = torch.bucketize(size, middles, right=False)  # a tie stays below
    odd_below = (below % 2 == 1) & (below < 7)
    tied = odd_below & (size == middles[below.clamp(max=6)])
    code = (below + tied).to(torch.uint8)
    return code | ((numbers < 0).to(torch.uint8) << 3)
