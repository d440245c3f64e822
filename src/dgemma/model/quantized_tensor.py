"""Quantized tensors and how they are dequantized.

A weight is `(q - zero_point) * scale` or `q * scale + bias` for integers, `q * scale` for floats; a scale
belongs to a group of neighbours in a row. The schemes differ in layout, not in meaning, so one class holds
them all. `dequantize` computes in fp32 in the order the schemes define and rounds once; it is the reference
implementation of the kernels.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

# Shapes: a matrix is [out, in], expert weights are [experts, out, in]; `...` is the experts or nothing.
# Groups divide `in`.

# The values of a 4-bit float (e2m1), by code without sign: two bits of exponent, one of mantissa.
FLOAT4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
INT4_OFFSET = 8  # the zero point of int4 without a stored one


class QuantKind(enum.Enum):
    """The quantized dtype. Four-bit values are packed two per byte, the earlier one in the lower half."""

    INT4 = "int4"  # 0 ... 15
    INT8 = "int8"  # -128 ... 127
    FLOAT4 = "float4"  # e2m1
    FLOAT8 = "float8"  # e4m3

    @property
    def per_byte(self) -> int:
        return 2 if self in (QuantKind.INT4, QuantKind.FLOAT4) else 1

    @property
    def stored_as(self) -> torch.dtype:
        return {QuantKind.INT8: torch.int8, QuantKind.FLOAT8: torch.float8_e4m3fn}.get(self, torch.uint8)


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized matrix, or the quantized weights of all experts.

    Every part has `out` as its second last dimension, so slicing rows or experts slices each part alike.
    """

    kind: QuantKind
    qdata: Tensor  # [..., out, in / per_byte]
    scale: Tensor  # [..., out, groups]
    zero_point: Tensor | None = None  # [..., out, groups], uint8; None: INT4_OFFSET
    global_scale: Tensor | None = None  # [..., out, 1], fp32: multiplies all scales of a row
    global_scale_divides: bool = False  # scales are divided by it instead
    bias: Tensor | None = None  # [..., out, groups]: added; the values are unsigned, also those of 8 bits

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.qdata.shape[:-1], self.qdata.shape[-1] * self.kind.per_byte)

    @property
    def group_len(self) -> int:
        return self.shape[-1] // self.scale.shape[-1]

    @property
    def parts(self) -> dict[str, Tensor]:
        named = {
            "qdata": self.qdata,
            "scale": self.scale,
            "zero_point": self.zero_point,
            "global_scale": self.global_scale,
            "bias": self.bias,
        }
        return {name: part for name, part in named.items() if part is not None}

    def __getitem__(self, at: int | slice | Tensor) -> QuantizedTensor:
        """Rows of a matrix, or experts."""
        return self.with_parts({name: part[at] for name, part in self.parts.items()})

    def with_parts(self, parts: Mapping[str, Tensor]) -> QuantizedTensor:
        """The same scheme with other tensors: other rows, or another device."""
        return QuantizedTensor(
            self.kind,
            parts["qdata"],
            parts["scale"],
            parts.get("zero_point"),
            parts.get("global_scale"),
            self.global_scale_divides,
            parts.get("bias"),
        )

    def group_scales(self) -> Tensor:
        """The scale of each group, global scale included: [..., out, groups], fp32."""
        scale = self.scale.float()
        if self.global_scale is None:
            return scale
        return scale / self.global_scale if self.global_scale_divides else scale * self.global_scale

    def unscaled(self) -> Tensor:
        """The quantized values in fp32, zero points subtracted, scales not applied: [..., out, in]."""
        if self.kind is QuantKind.FLOAT4:
            found: Tensor = _float4_table(self.qdata.device)[unpack(self.qdata).int()]
            return found
        if self.kind is not QuantKind.INT4:
            return self.qdata.float()
        plain = unpack(self.qdata).float()
        if self.bias is not None:
            return plain
        if self.zero_point is None:
            return plain.sub_(INT4_OFFSET)
        grouped: Tensor = plain.unflatten(-1, (-1, self.group_len))
        return grouped.sub_(self.zero_point[..., None]).flatten(-2)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The dequantized tensor [..., out, in]."""
        if self.bias is not None:
            return self._with_bias(dtype)
        grouped: Tensor = self.unscaled().unflatten(-1, (-1, self.group_len))
        return grouped.mul_(self.group_scales()[..., None]).flatten(-2).to(dtype)

    def _with_bias(self, dtype: torch.dtype) -> Tensor:
        # MLX computes in the dtype of the scales, and so rounds product and sum. In another dtype: fp32,
        # rounded once.
        own = dtype if dtype == self.scale.dtype else torch.float32
        assert self.bias is not None
        grouped: Tensor = self.unscaled().to(own).unflatten(-1, (-1, self.group_len))
        grouped = grouped.mul_(self.scale.to(own)[..., None]).add_(self.bias.to(own)[..., None])
        return grouped.flatten(-2).to(dtype)


def unpack(qdata: Tensor) -> Tensor:
    """Unpack two 4-bit values per byte: [..., n] -> [..., 2 n], uint8."""
    return torch.stack((qdata & 15, qdata >> 4), dim=-1).flatten(-2)


def pack(qdata: Tensor) -> Tensor:
    """Pack 4-bit values two per byte: [..., 2 n] -> [..., n], uint8."""
    pairs: Tensor = qdata.unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


@cache
def _float4_table(device: torch.device) -> Tensor:
    return torch.tensor([*FLOAT4_NUMBERS, *(-number for number in FLOAT4_NUMBERS)], device=device)
