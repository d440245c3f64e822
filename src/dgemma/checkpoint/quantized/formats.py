"""How one quantized linear lies in a file: its parts' names, types and shapes. Imports no torch.

A linear of `out` x `in` numbers is some tensors called `<module>.<part>`; `meaning` says what they stand for.
Activations are not quantized here: what a format says about them is read over.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from dgemma.errors import CheckpointError

Shape = tuple[int, ...]
_NVFP4_GROUP = 16
_FLOATS = ("F32", "BF16", "F16")
# A scale each, for what a runtime may quantize while it runs. Ours does not.
_ABOUT_ACTIVATIONS = ("input_scale", "input_global_scale", "output_scale", "k_scale", "v_scale")


@dataclass(frozen=True)
class Part:
    """What a file must hold under one name."""

    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]  # any of them


class Format(ABC):
    """One way to write down a quantized linear."""

    name: str
    optional: tuple[str, ...] = ()

    @property
    @abstractmethod
    def unit(self) -> int:
        """Neighbours that share a scale: a row is whole units."""

    @abstractmethod
    def parts(self, out: int, inner: int) -> dict[str, Part]:
        """Every part that must be there, and every optional one that may."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Parts that change nothing for us."""
        return _ABOUT_ACTIVATIONS

    @property
    def main(self) -> str:
        """The part by which a linear of this format is known."""
        return next(iter(self.parts(64, 64)))

    def refuse(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.name}: {problem}")


@dataclass(frozen=True)
class ModelOptNvfp4(Format):
    """e2m1 codes, an e4m3 scale to each 16, and one fp32 scale to them all. They are multiplied."""

    name: str = "modelopt NVFP4"

    @property
    def unit(self) -> int:
        return _NVFP4_GROUP

    def parts(self, out: int, inner: int) -> dict[str, Part]:
        return {
            "weight": Part(("U8",), ((out, inner // 2),)),
            "weight_scale": Part(("F8_E4M3",), ((out, inner // _NVFP4_GROUP),)),
            "weight_scale_2": Part(("F32",), ((), (1,))),
        }


@dataclass(frozen=True)
class CompressedNvfp4(Format):
    """The same numbers as compressed-tensors writes them: the outer scale divides."""

    name: str = "compressed-tensors nvfp4-pack-quantized"

    @property
    def unit(self) -> int:
        return _NVFP4_GROUP

    def parts(self, out: int, inner: int) -> dict[str, Part]:
        return {
            "weight_packed": Part(("U8",), ((out, inner // 2),)),
            "weight_scale": Part(("F8_E4M3",), ((out, inner // _NVFP4_GROUP),)),
            "weight_global_scale": Part(("F32",), ((), (1,))),
        }


@dataclass(frozen=True)
class CompressedScaled(Format):
    """Codes of eight bits, `(e4m3 or int8) * scale`: a scale for all, to each row, or to each block."""

    name: str
    integers: bool
    block: Shape | None = None  # rows x columns that share a scale; None: whole rows, or everything

    @property
    def unit(self) -> int:
        return 1  # the last block of a row may end outside

    def parts(self, out: int, inner: int) -> dict[str, Part]:
        if self.block is None:
            scales: tuple[Shape, ...] = ((out, 1), (out,), (1,), (), (1, 1))
        else:
            scales = ((math.ceil(out / self.block[0]), math.ceil(inner / self.block[1])),)
        return {
            "weight": Part(("I8",) if self.integers else ("F8_E4M3",), ((out, inner),)),
            "weight_scale": Part(_FLOATS, scales),
        }

    @property
    def ignored(self) -> tuple[str, ...]:
        # All zero where the recipe is symmetric, and every recipe we read with eight bits is.
        return (*super().ignored, "weight_zero_point")


@dataclass(frozen=True)
class CompressedPacked(Format):
    """Integers of four or eight bits packed into int32, a scale to each group, perhaps a zero point."""

    bits: int
    group_len: int | None  # None: a whole row
    symmetric: bool = True
    name: str = "compressed-tensors pack-quantized"
    optional: tuple[str, ...] = ("weight_shape",)

    @property
    def unit(self) -> int:
        return self.group_len or (2 if self.bits == 4 else 1)  # whole bytes

    def parts(self, out: int, inner: int) -> dict[str, Part]:
        groups = inner // (self.group_len or inner)
        per_word = 32 // self.bits
        parts = {
            "weight_packed": Part(("I32",), ((out, math.ceil(inner / per_word)),)),
            "weight_scale": Part(_FLOATS, ((out, groups),)),
            "weight_shape": Part(("I64", "I32"), ((2,),)),
        }
        if not self.symmetric:
            parts["weight_zero_point"] = Part(("I32",), ((math.ceil(out / per_word), groups),))
        return parts


@dataclass(frozen=True)
class Awq(Format):
    """AutoAWQ's `gemm` layout: transposed, eight codes to an int32 in the order its kernel wanted them."""

    group_len: int
    name: str = "awq gemm"

    @property
    def unit(self) -> int:
        return self.group_len

    def parts(self, out: int, inner: int) -> dict[str, Part]:
        groups = inner // self.group_len
        return {
            "qweight": Part(("I32",), ((inner, math.ceil(out / 8)),)),
            "qzeros": Part(("I32",), ((groups, math.ceil(out / 8)),)),
            "scales": Part(_FLOATS, ((groups, out),)),
        }
