"""few_bits.cpp, compiled on this machine when it is first wanted, and called through ctypes.

It needs a C++ compiler and AVX-512 VNNI. Where either is missing, `few_bits()` is None and the plain products
serve. The compiled file is kept for the next time, under a name that changes with the source and the
processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgemma.model.codes import CodeKind, Codes

CHUNK = 256  # neighbours of x that share a scale
_MAX_INNER = 64 * CHUNK
_KINDS = {CodeKind.INT4: 0, CodeKind.INT8: 1, CodeKind.FLOAT4: 2}
_SCALES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3}
_GROUP_LENS = {CodeKind.INT4: (16, 32, 64, 128), CodeKind.INT8: (), CodeKind.FLOAT4: (16, 32, 64, 128)}
_SOURCE = Path(__file__).with_name("few_bits.cpp")
_COMPILERS = ("c++", "g++", "clang++")
_BUILD_SECONDS = 120


@dataclass(frozen=True)
class FewBits:
    """The compiled library."""

    library: Any

    def serves(self, held: Codes) -> bool:
        """Whether it can multiply with these codes."""
        inner = held.shape[-1]
        if held.kind not in _KINDS or held.scale.dtype not in _SCALES or inner > _MAX_INNER:
            return False
        if held.codes.device.type != "cpu":
            return False
        # A register's lane has one scale: sixteen neighbours, or in eight bits any.
        return (
            held.group_len == inner or held.group_len % CHUNK == 0 or held.group_len in _GROUP_LENS[held.kind]
        )

    def multiply(self, x: Tensor, held: Codes, ends: Tensor | None = None) -> Tensor:
        """`x W^T` [n, out] in x's dtype, x [n, in] rounded to eight bits in chunks of 256.

        With `ends`, `held` is a bank, and expert e owns the rows before `ends[e]` that no earlier one owns.
        """
        count, inner = x.shape
        chunks = -(-inner // CHUNK)
        rounded = torch.empty((count, chunks * CHUNK), dtype=torch.uint8)
        scales = torch.empty((count, chunks), dtype=torch.float32)
        result = torch.empty((count, held.shape[-2]), dtype=torch.float32)
        whole = torch.tensor([count], dtype=torch.int32) if ends is None else ends
        wide = x.float().contiguous()
        parts = {name: part.contiguous() for name, part in held.parts.items()}
        as_they_come = int(held.kind is CodeKind.INT8)
        self.library.round_rows(_at(wide), count, inner, as_they_come, _at(rounded), _at(scales))
        self.library.multiply(
            _at(rounded), _at(scales), _at(whole), len(whole),
            _at(parts["codes"]), _at(parts["scale"]), _at(parts.get("zero")), _at(parts.get("outer")),
            _KINDS[held.kind], _SCALES[held.scale.dtype], int(held.outer_divides),
            held.shape[-2], inner, held.scale.shape[-1], _at(result),
        )  # fmt: skip
        return result.to(x.dtype)


def rounded(x: Tensor) -> Tensor:
    """`x` [..., in] as the kernel sees it: the plain twin of its rounding, in fp32."""
    inner = x.shape[-1]
    padded: Tensor = torch.nn.functional.pad(x.float(), (0, -inner % CHUNK)).unflatten(-1, (-1, CHUNK))
    top = padded.abs().amax(-1, keepdim=True)
    # Not `127 / top`, which torch takes for a reciprocal and a product: two roundings.
    inverse = torch.where(top > 0, torch.full_like(top, 127.0) / top, torch.zeros(()))
    return ((padded * inverse).round() * (top / 127)).flatten(-2)[..., :inner]


@cache
def few_bits() -> FewBits | None:
    """The library, compiled if need be; None where it cannot be had."""
    return _load() if why_not() is None else None


@cache
def why_not() -> str | None:
    """Why there is no library here; None if there is one."""
    if platform.system() != "Linux" or "avx512_vnni" not in _cpu_flags():
        return "this processor has no AVX-512 VNNI"
    if _compiler() is None:
        return f"there is no C++ compiler ({', '.join(_COMPILERS)})"
    try:
        _load()
    except (OSError, subprocess.SubprocessError) as error:
        return f"few_bits.cpp could not be compiled: {error}"
    return None


@cache
def _load() -> FewBits:
    library = ctypes.CDLL(str(_built()))
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    library.round_rows.argtypes = [pointer, long, long, ctypes.c_int, pointer, pointer]
    library.round_rows.restype = None
    library.multiply.argtypes = (
        [pointer] * 3 + [long] + [pointer] * 4 + [ctypes.c_int] * 3 + [long] * 3 + [pointer]
    )
    library.multiply.restype = None
    return FewBits(library)


def _built() -> Path:
    source = _SOURCE.read_bytes()
    name = hashlib.sha256(source + " ".join(sorted(_cpu_flags())).encode()).hexdigest()[:24]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dgemma" / "kernels"
    target = home / f"few_bits-{name}.so"
    if target.exists():
        return target
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    compiler = _compiler()
    assert compiler is not None
    with tempfile.TemporaryDirectory(dir=home) as made:
        fresh = Path(made) / target.name
        flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
        command = [compiler, *flags, "-o", str(fresh), str(_SOURCE)]
        subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_SECONDS)  # noqa: S603
        fresh.replace(target)  # two processes that build at once both end with a whole file
    return target


def _compiler() -> str | None:
    return next((found for name in _COMPILERS if (found := shutil.which(name))), None)


@cache
def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":")[1].split() for line in lines if line.startswith("flags")), ()))


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
