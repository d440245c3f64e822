"""Numbers in few bits, and what they stand for.

A number is `(code - zero) * scale`, or of a floating code `code * scale`; `scale` belongs to a group of
neighbours in a row. Formats differ in how they write this down, not in what they mean, so one class holds
them all. What it stands for is computed in fp32 in the order the formats define, then rounded once.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

# Shapes: a matrix is [out, in], a bank [experts, out, in]; `...` is the experts or nothing. Groups divide
# `in`.

# The numbers a four-bit float (e2m1) has, by code: sign, two bits of exponent, one of mantissa.
FLOAT4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MIDDLE_OF_4_BITS = 8  # the zero of four bits that name none


class CodeKind(enum.Enum):
    """How a code is read. Four-bit codes stand two in a byte, the earlier one in the lower half."""

    INT4 = "int4"  # 0 ... 15
    INT8 = "int8"  # -128 ... 127
    FLOAT4 = "float4"  # e2m1
    FLOAT8 = "float8"  # e4m3

    @property
    def per_byte(self) -> int:
        return 2 if self in (CodeKind.INT4, CodeKind.FLOAT4) else 1

    @property
    def stored_as(self) -> torch.dtype:
        return {CodeKind.INT8: torch.int8, CodeKind.FLOAT8: torch.float8_e4m3fn}.get(self, torch.uint8)


@dataclass(frozen=True)
class Codes:
    """A matrix or a bank in few bits.

    Every part has `out` as its last dimension but one. So some rows of the whole are the same rows of each
    part, and so is an expert.
    """

    kind: CodeKind
    codes: Tensor  # [..., out, in / per_byte]
    scale: Tensor  # [..., out, groups]
    zero: Tensor | None = None  # [..., out, groups], uint8; None: in the middle
    outer: Tensor | None = None  # [..., out, 1], fp32: what all scales of a row are multiplied by
    outer_divides: bool = False  # they are divided by it: the same up to rounding

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.codes.shape[-1] * self.kind.per_byte)

    @property
    def group_len(self) -> int:
        return self.shape[-1] // self.scale.shape[-1]

    @property
    def parts(self) -> dict[str, Tensor]:
        named = {"codes": self.codes, "scale": self.scale, "zero": self.zero, "outer": self.outer}
        return {name: part for name, part in named.items() if part is not None}

    def __getitem__(self, at: int | slice | Tensor) -> Codes:
        """Rows of a matrix, experts of a bank."""
        return self.with_parts({name: part[at] for name, part in self.parts.items()})

    def with_parts(self, parts: Mapping[str, Tensor]) -> Codes:
        """The same in other tensors: of other rows, or elsewhere."""
        return Codes(
            self.kind,
            parts["codes"],
            parts["scale"],
            parts.get("zero"),
            parts.get("outer"),
            self.outer_divides,
        )

    def factors(self) -> Tensor:
        """What each group is multiplied by: [..., out, groups], fp32."""
        scale = self.scale.float()
        if self.outer is None:
            return scale
        return scale / self.outer if self.outer_divides else scale * self.outer

    def numbers(self) -> Tensor:
        """The codes as fp32 numbers, zeros taken off, scales not yet applied: [..., out, in]."""
        if self.kind is CodeKind.FLOAT4:
            found: Tensor = _float4_table(self.codes.device)[unpack(self.codes).int()]
            return found
        if self.kind is not CodeKind.INT4:
            return self.codes.float()
        plain = unpack(self.codes).float()
        if self.zero is None:
            return plain.sub_(MIDDLE_OF_4_BITS)
        grouped: Tensor = plain.unflatten(-1, (-1, self.group_len))
        return grouped.sub_(self.zero[..., None]).flatten(-2)

    def decode(self, dtype: torch.dtype) -> Tensor:
        """The plain tensor: [..., out, in]."""
        grouped: Tensor = self.numbers().unflatten(-1, (-1, self.group_len))
        return grouped.mul_(self.factors()[..., None]).flatten(-2).to(dtype)


def unpack(codes: Tensor) -> Tensor:
    """Two codes a byte -> one: [..., n] -> [..., 2 n], uint8."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


def pack(codes: Tensor) -> Tensor:
    """One code of four bits a byte -> two: [..., 2 n] -> [..., n], uint8."""
    pairs: Tensor = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


@cache
def _float4_table(device: torch.device) -> Tensor:
    return torch.tensor([*FLOAT4_NUMBERS, *(-number for number in FLOAT4_NUMBERS)], device=device)
