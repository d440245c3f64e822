"""quantized_matmul.cpp, compiled on this machine at first use, and called through ctypes.

It needs a C++ compiler and AVX-512. Where either is missing, `quantized_matmul()` is None and products
dequantize the weight; so they do where the cache of compiled files cannot be trusted. With VNNI, products
with a quantized weight round their activations to int8; without it they are float32, and so are products with
plain weights, which torch computes slowly if rows are few or bfloat16 is emulated.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgemma.kernels.kernel_cache import NoKernelError, UnsafeCacheError, cpu_flags, load_kernel
from dgemma.model.quantized_tensor import QuantizedTensor, QuantKind

CHUNK = 256  # neighbours of x that share a scale
MAX_INNER = 64 * CHUNK  # as in the .cpp
_KINDS = {QuantKind.INT4: 0, QuantKind.INT8: 1, QuantKind.FLOAT4: 2, QuantKind.FLOAT8: 3}
_PLAIN_KINDS = {torch.float32: 4, torch.bfloat16: 5}
_AVX512 = ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl")
_SCALES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3}
_GROUP_LENS = {QuantKind.INT4: (16, 32, 64, 128), QuantKind.INT8: (), QuantKind.FLOAT4: (16, 32, 64, 128)}
_SOURCE = Path(__file__).with_name("quantized_matmul.cpp")
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuantizedMatmul:
    """The compiled library. rounds: it has VNNI, and quantizes activations to int8."""

    library: Any
    rounds: bool

    def supports(self, weight: QuantizedTensor) -> bool:
        """Whether the kernel supports this weight."""
        inner = weight.shape[-1]
        if (
            weight.bias is not None
            or weight.kind not in _KINDS
            or weight.scale.dtype not in _SCALES
            or inner > MAX_INNER
        ):
            return False
        if weight.qdata.device.type != "cpu":
            return False
        if not self.rounds:  # it decodes 16 neighbours at a time
            return weight.group_len == inner or weight.group_len % 16 == 0
        if weight.kind is QuantKind.FLOAT8:
            return False
        # A lane of a register has one scale. Its 4-bit values are 16 neighbours; its int8 values come from
        # all parts of the chunk.
        return (
            weight.group_len == inner
            or weight.group_len % CHUNK == 0
            or weight.group_len in _GROUP_LENS[weight.kind]
        )

    def multiply(self, x: Tensor, weight: QuantizedTensor, ends: Tensor | None = None) -> Tensor:
        """`x W^T` [n, out] in x's dtype. With VNNI, x [n, in] is quantized to int8 in chunks of 256.

        With `ends`, `weight` holds all experts, and expert e owns the rows before `ends[e]` that no earlier
        one owns.
        """
        if not self.rounds:
            return self._multiply_float(x, weight, ends)
        count, inner = x.shape
        chunks = -(-inner // CHUNK)
        rounded = torch.empty((count, chunks * CHUNK), dtype=torch.uint8)
        scales = torch.empty((count, chunks), dtype=torch.float32)
        result = torch.empty((count, weight.shape[-2]), dtype=torch.float32)
        row_ends = torch.tensor([count], dtype=torch.int32) if ends is None else ends
        wide = x.float().contiguous()
        parts = {name: part.contiguous() for name, part in weight.parts.items()}
        in_order = int(weight.kind is QuantKind.INT8)
        self.library.round_rows(_at(wide), count, inner, in_order, _at(rounded), _at(scales))
        self.library.multiply(
            _at(rounded), _at(scales), _at(row_ends), len(row_ends),
            _at(parts["qdata"]), _at(parts["scale"]),
            _at(parts.get("zero_point")), _at(parts.get("global_scale")),
            _KINDS[weight.kind], _SCALES[weight.scale.dtype], int(weight.global_scale_divides),
            weight.shape[-2], inner, weight.scale.shape[-1], _at(result),
        )  # fmt: skip
        return result.to(x.dtype)

    def multiply_plain(self, x: Tensor, weight: Tensor, ends: Tensor | None = None) -> Tensor:
        """The same for a plain weight [..., out, in], float32 or bfloat16, in float32 arithmetic."""
        return self._multiply_float(x, weight, ends)

    def _multiply_float(self, x: Tensor, weight: QuantizedTensor | Tensor, ends: Tensor | None) -> Tensor:
        count, inner = x.shape
        assert inner <= MAX_INNER, inner
        result = torch.empty((count, weight.shape[-2]), dtype=torch.float32)
        row_ends = torch.tensor([count], dtype=torch.int32) if ends is None else ends
        wide = x.float().contiguous()
        if isinstance(weight, Tensor):
            own = weight.contiguous()
            pointers, kinds, groups = (_at(own), None, None, None), (_PLAIN_KINDS[own.dtype], 0, 0), 1
        else:
            parts = {name: part.contiguous() for name, part in weight.parts.items()}
            names = ("qdata", "scale", "zero_point", "global_scale")
            pointers = tuple(_at(parts.get(name)) for name in names)  # type: ignore[assignment]
            kinds = (_KINDS[weight.kind], _SCALES[weight.scale.dtype], int(weight.global_scale_divides))
            groups = weight.scale.shape[-1]
        self.library.multiply_float(
            _at(wide), _at(row_ends), len(row_ends), *pointers, *kinds, weight.shape[-2], inner, groups,
            _at(result),
        )  # fmt: skip
        return result.to(x.dtype)


def fake_quantize_activations(x: Tensor) -> Tensor:
    """`x` [..., in] quantized to int8 and dequantized, in fp32: reference of the kernel's rounding."""
    inner = x.shape[-1]
    padded: Tensor = torch.nn.functional.pad(x.float(), (0, -inner % CHUNK)).unflatten(-1, (-1, CHUNK))
    top = padded.abs().amax(-1, keepdim=True)
    # Not `127 / top`, which torch computes as a reciprocal and a product: two roundings.
    inverse = torch.where(top > 0, torch.full_like(top, 127.0) / top, torch.zeros(()))
    return ((padded * inverse).round() * (top / 127)).flatten(-2)[..., :inner]


@cache
def quantized_matmul() -> QuantizedMatmul | None:
    """The library, compiled if necessary; None where it is not available."""
    return None if unavailable_reason() is not None else _load()


@cache
def unavailable_reason() -> str | None:
    """Why the library is not available here; None if it is."""
    try:
        _load()
    except UnsafeCacheError as error:
        _LOG.warning("quantized weights are dequantized for each product: %s", error)
        return str(error)
    except NoKernelError as error:
        return str(error)
    return None


@cache
def _load() -> QuantizedMatmul:
    library = load_kernel(_SOURCE, _FLAGS, needs=_AVX512, title="AVX-512")
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    weight: list[Any] = [long] + [pointer] * 4 + [ctypes.c_int] * 3 + [long] * 3 + [pointer]
    library.multiply_float.argtypes = [pointer] * 2 + weight
    library.multiply_float.restype = None
    rounds = "avx512_vnni" in cpu_flags()
    if rounds:
        library.round_rows.argtypes = [pointer, long, long, ctypes.c_int, pointer, pointer]
        library.round_rows.restype = None
        library.multiply.argtypes = [pointer] * 3 + weight
        library.multiply.restype = None
    return QuantizedMatmul(library, rounds)


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
