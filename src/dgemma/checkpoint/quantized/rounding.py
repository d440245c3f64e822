"""Quantize plain weights: round to the nearest value under the scale in its stored precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dgemma.model.quantized_tensor import FLOAT4_NUMBERS, INT4_OFFSET, QuantizedTensor, QuantKind, pack

Round = Callable[[Tensor], QuantizedTensor]
"""Rows [out, in] of a weight -> the quantized rows."""

_SMALLEST = 2.0**-100  # a scale for rows of zeros; it divides, and bf16 holds it
# Clipping ratios. The largest number of a group sets its scale. Clipping it gives the others a finer scale,
# which pays where it lowers the squared error. Tried in this order; the first of equals wins.
_CLIP_RATIOS = (1.0, 0.94, 0.88, 0.82)
_FLOAT4_TOP, _FLOAT8_TOP = 6.0, 448.0


def to_int8(rows: Tensor) -> QuantizedTensor:
    """int8 with a scale per row."""
    numbers = rows.float()
    scale = (numbers.abs().amax(-1, keepdim=True) / 127).clamp(min=_SMALLEST).bfloat16()
    qdata = (numbers / scale.float()).round_().clamp_(-127, 127).to(torch.int8)
    return QuantizedTensor(QuantKind.INT8, qdata, scale)


def to_int4(rows: Tensor, group_len: int) -> QuantizedTensor:
    """int4 with a scale per group: of a few candidates the one with the smallest squared error."""
    groups = rows.float().unflatten(-1, (-1, group_len))
    largest = groups.abs().amax(-1, keepdim=True)
    qdata, scale, error = _quantize_clipped(groups, largest, _CLIP_RATIOS[0])
    for ratio in _CLIP_RATIOS[1:]:
        other_qdata, other_scale, other_error = _quantize_clipped(groups, largest, ratio)
        better = other_error < error
        qdata = torch.where(better, other_qdata, qdata)
        scale = torch.where(better, other_scale, scale)
        error = torch.where(better, other_error, error)
    stored = qdata.add_(INT4_OFFSET).flatten(-2).to(torch.uint8)
    return QuantizedTensor(QuantKind.INT4, pack(stored), scale.squeeze(-1).bfloat16())


def _quantize_clipped(groups: Tensor, largest: Tensor, ratio: float) -> tuple[Tensor, Tensor, Tensor]:
    """Quantized values, scales and squared errors if the range ends at `ratio` times the largest number."""
    scale = (largest * (ratio / 7.5)).clamp(min=_SMALLEST).bfloat16().float()
    qdata = (groups / scale).round_().clamp_(-8, 7)
    return qdata, scale, (qdata * scale).sub_(groups).square_().sum(-1, keepdim=True)


def to_nvfp4(matrix: Tensor) -> QuantizedTensor:
    """NVFP4: e4m3 scales and a global scale of the matrix, which makes the largest of them 448."""
    groups = matrix.float().unflatten(-1, (-1, 16))
    largest = groups.abs().amax(-1)
    global_scale = _FLOAT8_TOP * _FLOAT4_TOP / largest.amax().clamp(min=_SMALLEST)
    # Rounding to e4m3 could make a small scale 0, and a group of zeros would have the scale 0.
    scale = (largest / _FLOAT4_TOP * global_scale).clamp(2.0**-9, _FLOAT8_TOP).to(torch.float8_e4m3fn)
    exact = groups / (scale.float() / global_scale)[..., None]
    qdata = _nearest_float4(exact.flatten(-2))
    expanded = global_scale.reshape(1, 1).expand(len(matrix), 1)
    return QuantizedTensor(
        QuantKind.FLOAT4, pack(qdata), scale, global_scale=expanded, global_scale_divides=True
    )


def _nearest_float4(numbers: Tensor) -> Tensor:
    """The 4-bit codes of the nearest e2m1 numbers; ties go to the even mantissa."""
    steps = torch.tensor(FLOAT4_NUMBERS)
    middles = (steps[1:] + steps[:-1]) / 2
    size = numbers.abs()
    below = torch.bucketize(size, middles, right=False)  # a tie counts as below
    odd_below = (below % 2 == 1) & (below < 7)
    tied = odd_below & (size == middles[below.clamp(max=6)])
    code = (below + tied).to(torch.uint8)
    return code | ((numbers < 0).to(torch.uint8) << 3)
