"""elementwise.cpp, compiled on this machine at first use, and called through ctypes.

It needs Linux, a C++ compiler and AVX2. Where one is missing `kernels_for` is None and torch's operations do
the same work, more slowly.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgemma.kernels.kernel_cache import NoKernelError, UnsafeCacheError, load_kernel

GRAD_ROWS = 64  # rows whose gradients to a weight are added up by one thread
BLOCK = 2048  # most tokens of a block, as in the .cpp
_SOURCE = Path(__file__).with_name("elementwise.cpp")
# No contraction: random numbers have the same bits on every device.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
_DTYPES = (torch.float32, torch.bfloat16, torch.int64)
_LOG = logging.getLogger(__name__)
_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class _Scan(ctypes.Structure):
    """`Scan` of the .cpp."""

    _fields_ = [
        ("products", _POINTER),
        *((name, _LONG) for name in ("rows", "canvas", "tokens", "stride", "width", "chunks", "first_chunk")),
        ("cap", _FLOAT), ("temperature", _POINTER),
        ("bias", _POINTER), ("bias_stride", _LONG),
        ("races", _POINTER), ("race_stride", _LONG),
        *((name, _POINTER) for name in ("best_score", "race_score", "best_chunk", "race_chunk")),
        *((name, _POINTER) for name in ("best_products", "race_products", "top", "mass", "moment", "shares")),
    ]  # fmt: skip


class Counters(NamedTuple):
    """Philox counters and keys; all int64."""

    seed: Tensor  # [rows]
    stream: Tensor  # [rows]
    step: Tensor  # [rows]
    positions: Tensor  # [canvas]
    quads: Tensor  # [rows, canvas, n]


@dataclass(frozen=True)
class Elementwise:
    """The compiled library."""

    library: Any

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """As `F.rms_norm` over the last dimension, with a weight of x's dtype."""
        x = x.contiguous()
        result = torch.empty_like(x)
        size = x.shape[-1]
        assert weight is None or (weight.shape == (size,) and weight.is_contiguous()), weight
        self.library.rms_norm(
            x.data_ptr(), _at(weight), x.dtype is torch.bfloat16, eps, x.numel() // size, size,
            result.data_ptr(),
        )  # fmt: skip
        return result

    def rms_norm_backward(
        self, x: Tensor, weight: Tensor | None, grad: Tensor, eps: float
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of `rms_norm` to x and to the weight, in float32."""
        x, grad = x.contiguous(), grad.contiguous()
        size = x.shape[-1]
        rows = x.numel() // size
        assert x.dtype is grad.dtype is torch.float32, (x.dtype, grad.dtype)
        assert grad.shape == x.shape, grad.shape
        assert weight is None or (weight.shape == (size,) and weight.is_contiguous()), weight
        assert weight is None or weight.dtype is torch.float32, weight
        to_x = torch.empty_like(x)
        to_weight = None if weight is None else torch.zeros(-(-rows // GRAD_ROWS), size)
        self.library.rms_norm_backward(
            x.data_ptr(), _at(weight), grad.data_ptr(), eps, rows, size, GRAD_ROWS, to_x.data_ptr(),
            _at(to_weight),
        )  # fmt: skip
        return to_x, None if to_weight is None else to_weight.sum(0)

    def gated_gelu_backward(self, gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of `gated_gelu`, in float32."""
        rows, size = gate.shape
        assert gate.stride() == up.stride(), (gate.stride(), up.stride())
        assert gate.dtype is up.dtype is grad.dtype is torch.float32, (gate.dtype, up.dtype, grad.dtype)
        assert grad.shape == up.shape == gate.shape, (gate.shape, up.shape, grad.shape)
        grad = grad.contiguous()
        to_gate, to_up = torch.empty_like(grad), torch.empty_like(grad)
        self.library.gated_gelu_backward(
            gate.data_ptr(), up.data_ptr(), grad.data_ptr(), rows, size, gate.stride(0), to_gate.data_ptr(),
            to_up.data_ptr(),
        )  # fmt: skip
        return to_gate, to_up

    def gated_gelu(self, gate: Tensor, up: Tensor) -> Tensor:
        """`gelu(gate) * up`, both [rows, size] of one stride; the last dimension is contiguous."""
        rows, size = gate.shape
        assert gate.dtype is up.dtype, up.dtype
        result = torch.empty((rows, size), dtype=gate.dtype)
        self.library.gated_gelu(
            gate.data_ptr(), up.data_ptr(), gate.dtype is torch.bfloat16, rows, size, gate.stride(0),
            result.data_ptr(),
        )  # fmt: skip
        return result

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """RoPE of `x` [..., heads, dim], with tables [tokens, dim]; all contiguous and of one dtype."""
        result = torch.empty_like(x)
        heads, dim = x.shape[-2:]
        tokens = x.numel() // (heads * dim)
        assert cos.shape == sin.shape == (tokens, dim), (cos.shape, sin.shape, x.shape)
        assert x.is_contiguous(), x.stride()
        self.library.rotate(
            x.data_ptr(), cos.data_ptr(), sin.data_ptr(), x.dtype is torch.bfloat16, tokens, heads, dim,
            result.data_ptr(),
        )  # fmt: skip
        return result

    def combine(self, outputs: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
        """Each token's outputs [slots, size], weighted in fp32 [n, k] and added in order -> [n, size]."""
        assert weights.shape == slots.shape, (weights.shape, slots.shape)
        result = torch.empty((len(slots), outputs.shape[-1]), dtype=outputs.dtype)
        inputs = [tensor.contiguous() for tensor in (outputs, weights, slots)]
        self.library.combine(
            *map(_at, inputs), outputs.dtype is torch.bfloat16, *slots.shape, outputs.shape[-1],
            result.data_ptr(),
        )  # fmt: skip
        return result

    def random_words(self, counters: Counters) -> Tensor:
        """The four words of each counter [rows, canvas, 4 n], int64."""
        return self._random(self.library.random_words, counters, torch.int64)

    def race_times(self, counters: Counters) -> Tensor:
        """A log of a unit exponential from each of those words [rows, canvas, 4 n]."""
        return self._random(self.library.race_times, counters, torch.float32)

    def _random(self, function: Any, counters: Counters, dtype: torch.dtype) -> Tensor:
        rows, canvas, count = counters.quads.shape
        result = torch.empty((rows, canvas, 4 * count), dtype=dtype)
        inputs = [tensor.contiguous() for tensor in counters]
        function(*map(_at, inputs), rows, canvas, count, result.data_ptr())
        return result

    def scan_block(
        self,
        products: Tensor,
        temperature: Tensor,
        cap: float | None,
        bias: Tensor | None,
        first_chunk: int,
        races: Tensor | None,
        best: tuple[Tensor, Tensor, Tensor],
        race_winner: tuple[Tensor, Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `scan_block` of vocab_scan.py; writes to `best` and `race_winner`. -> top, mass, moment, shares.

        The last dimension of `products`, `bias` and `races` is contiguous.
        """
        rows, canvas, tokens = products.shape
        width = best[2].shape[-1]
        chunks = -(-tokens // width)
        assert tokens <= BLOCK, tokens
        assert chunks <= 2, chunks
        assert bias is None or bias.dtype is torch.float32, bias
        for tensor in (products, races):  # positions follow each other
            assert tensor is None or rows == 1 or tensor.stride(0) == canvas * tensor.stride(1), tensor
        for tensor in (products, races, bias):
            assert tensor is None or tensor.shape[-1] == 1 or tensor.stride(-1) == 1, tensor
        top = torch.empty((rows, canvas))
        mass, moment = torch.empty((2, rows, canvas, chunks))
        shares = torch.empty((rows, canvas, tokens), dtype=products.dtype)
        scan = _Scan(
            products.data_ptr(), rows, canvas, tokens, products.stride(1), width, chunks, first_chunk,
            cap or 0.0, temperature.data_ptr(),
            _at(bias), 0 if bias is None else bias.stride(0),
            _at(races), 0 if races is None else races.stride(1),
            *(pair[i].data_ptr() for i in range(3) for pair in (best, race_winner)),
            *(tensor.data_ptr() for tensor in (top, mass, moment, shares)),
        )  # fmt: skip
        self.library.scan_block(ctypes.byref(scan), products.dtype is torch.bfloat16)
        return top, mass, moment, shares


def kernels_for(x: Tensor) -> Elementwise | None:
    """The library where it can compute on `x`: a real tensor on the CPU, outside a graph."""
    if x.device.type != "cpu" or type(x) is not Tensor or x.dtype not in _DTYPES:
        return None
    return None if torch.compiler.is_compiling() else elementwise()


@cache
def elementwise() -> Elementwise | None:
    """The library, compiled if necessary; None where it is not available."""
    try:
        library = load_kernel(_SOURCE, _FLAGS, needs=("avx2", "fma3"), title="AVX2")
    except UnsafeCacheError as error:
        _LOG.warning("norms and sampling use torch's operations: %s", error)
        return None
    except NoKernelError:
        return None
    library.rms_norm.argtypes = [_POINTER, _POINTER, _INT, _FLOAT, _LONG, _LONG, _POINTER]
    library.gated_gelu.argtypes = [_POINTER] * 2 + [_INT] + [_LONG] * 3 + [_POINTER]
    library.rotate.argtypes = [_POINTER] * 3 + [_INT] + [_LONG] * 3 + [_POINTER]
    library.combine.argtypes = library.rotate.argtypes
    library.random_words.argtypes = [_POINTER] * 5 + [_LONG] * 3 + [_POINTER]
    library.race_times.argtypes = library.random_words.argtypes
    library.scan_block.argtypes = [_POINTER, _INT]
    library.rms_norm_backward.argtypes = [_POINTER] * 3 + [_FLOAT] + [_LONG] * 3 + [_POINTER] * 2
    library.gated_gelu_backward.argtypes = [_POINTER] * 3 + [_LONG] * 3 + [_POINTER] * 2
    for name in (
        "rms_norm", "gated_gelu", "rotate", "combine", "random_words", "race_times", "scan_block",
        "rms_norm_backward", "gated_gelu_backward",
    ):  # fmt: skip
        getattr(library, name).restype = None
    return Elementwise(library)


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
