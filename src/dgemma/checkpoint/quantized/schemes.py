"""Quantization schemes: names, dtypes and shapes of the tensors of one quantized linear. Imports no torch.

A linear of `out` x `in` numbers is stored as tensors named `<module>.<part>`; `reader.py` interprets them.
Activations are not quantized here: the entries of a scheme about them are ignored.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from dgemma.errors import CheckpointError
from dgemma.gguf_file import GgmlType

Shape = tuple[int, ...]
_NVFP4_GROUP = 16
_FLOATS = ("F32", "BF16", "F16")
BLOCK_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")  # of GGUF
# Scales for runtimes that quantize activations or the KV cache. This one does not.
_ACTIVATION_SCALES = ("input_scale", "input_global_scale", "output_scale", "k_scale", "v_scale")


@dataclass(frozen=True)
class Part:
    """The allowed dtypes and shapes of one tensor."""

    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]  # any of them


class QuantizationScheme(ABC):
    """The storage layout of a quantized linear."""

    name: str
    optional: tuple[str, ...] = ()

    @property
    @abstractmethod
    def unit(self) -> int:
        """The number of neighbours that share a scale; it divides a row."""

    @abstractmethod
    def parts(self, out: int, inner: int) -> dict[str, Part]:
        """Every required part and every optional one."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Parts that are not needed."""
        return _ACTIVATION_SCALES

    @property
    def main(self) -> str:
        """The part that identifies a linear of this scheme."""
        return next(iter(self.parts(64, 64)))

    @property
    def uses_float8(self) -> bool:
        """Whether a part is stored in 8-bit floats, which Apple's GPU does not have."""
        return any("F8_E4M3" in part.dtypes for part in self.parts(64, 64).values())

    def refuse(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.name}: {problem}")


@dataclass(frozen=True)
class ModelOptNvfp4(QuantizationScheme):
    """e2m1 values, an e4m3 scale per 16 values, and one fp32 global scale, which multiplies."""

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
class CompressedNvfp4(QuantizationScheme):
    """NVFP4 of compressed-tensors: the global scale divides."""

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
class CompressedScaled(QuantizationScheme):
    """8-bit values, `(e4m3 or int8) * scale`: one scale per tensor, per row, or per block."""

    name: str
    integers: bool
    block: Shape | None = None  # rows x columns that share a scale; None: whole rows, or everything

    @property
    def unit(self) -> int:
        return 1  # the last block may extend past the row

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
        # All zero in a symmetric scheme, and every supported 8-bit scheme is symmetric.
        return (*super().ignored, "weight_zero_point")


@dataclass(frozen=True)
class CompressedPacked(QuantizationScheme):
    """4-bit or 8-bit integers packed into int32, a scale per group, optionally a zero point."""

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
class Awq(QuantizationScheme):
    """AutoAWQ's `gemm` layout: transposed, eight values per int32 in the order of its kernel."""

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


@dataclass(frozen=True)
class GgufBlocks(QuantizationScheme):
    """A matrix of a GGUF file: blocks of neighbours, each with its scales."""

    name: str
    type: GgmlType

    @property
    def unit(self) -> int:
        return self.type.block_len

    def parts(self, out: int, inner: int) -> dict[str, Part]:
        return {"blocks": Part(("U8",), ((out, inner // self.unit * self.type.block_bytes),))}


@dataclass(frozen=True)
class MlxAffine(QuantizationScheme):
    """MLX: 4-bit or 8-bit integers in uint32, a scale and a bias per group; both may be negative."""

    bits: int
    group_len: int
    name: str = "mlx affine"

    @property
    def unit(self) -> int:
        return self.group_len

    def parts(self, out: int, inner: int) -> dict[str, Part]:
        return {
            "weight": Part(("U32",), ((out, inner * self.bits // 32),)),
            "scales": Part(_FLOATS, ((out, inner // self.group_len),)),
            "biases": Part(_FLOATS, ((out, inner // self.group_len),)),
        }
