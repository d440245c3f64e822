"""The Triton kernel for experts in four bits agrees with its plain twin, and compiles for every card we name.

No GPU is needed. Products run in Triton's interpreter, which must be chosen before Triton is imported: they
have a process of their own, and so has the compiler. Each runs this file and prints what it found.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import mmap
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dgemma.model.kernels import triton_experts as module
from dgemma.model.kernels.triton_experts import (
    available,
    blocks_for,
    constants,
    kernel,
    multiply_grouped,
    supports,
)
from dgemma.model.quantized_tensor import QuantizedTensor, QuantKind, pack
from fake_cuda import DEVICE, FakeCuda
from model.test_quantized_tensor import random_codes
from sizes import IS_FULL, cases

TESTS = Path(__file__).parents[2]
INT4, FLOAT4 = QuantKind.INT4, QuantKind.FLOAT4
F32, BF16, F16, E4M3 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
# Of the result: its last bit and a little, and in fp32 a sum in another order.
TOLERANCE = {F32: 2e-6, BF16: 2.0**-8, F16: 2.0**-11}
# Bytes of shared memory that one program may have.
SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
CARDS = list(SHARED)[: cases(5, 1)]
TYPES = {F32: "*fp32", BF16: "*bf16", F16: "*fp16", E4M3: "*u8"}

has_triton = importlib.util.find_spec("triton") is not None  # without importing it
needs_triton = pytest.mark.skipif(not has_triton, reason="triton is not installed")


@dataclass(frozen=True)
class Case:
    """A bank and the rows that come to it."""

    kind: QuantKind = INT4
    counts: tuple[int, ...] = (3, 0, 20, 7)  # of each expert's rows
    out: int = 40
    inner: int = 96
    group_len: int = 32
    zero: bool = False
    scale: torch.dtype = BF16
    outer: str = ""  # or "times", "over"
    x: torch.dtype = F32

    def experts_linear(self) -> QuantizedTensor:
        shape = (len(self.counts), self.out, self.inner)
        quantized = random_codes(self.kind, *shape, groups=self.inner // self.group_len, zero_point=self.zero)
        outer = torch.rand((*shape[:2], 1), generator=torch.Generator().manual_seed(1)) + 0.5
        return replace(
            quantized,
            scale=quantized.scale.float().to(self.scale),
            global_scale=outer if self.outer else None,
            global_scale_divides=self.outer == "over",
        )


FLOAT = Case(FLOAT4, group_len=16, scale=E4M3, outer="over")
CASES = {
    "int4": Case(),
    "int4 with zeros": Case(zero=True),
    "int4, scales fp32": Case(scale=F32),
    "int4, scales fp16, zeros": Case(scale=F16, zero=True),
    "int4, scales e4m3, outer": Case(scale=E4M3, outer="times"),
    "float4 times": replace(FLOAT, outer="times"),
    "float4 over": FLOAT,
    "float4, scales bf16": replace(FLOAT, scale=BF16, outer=""),
    "one row": Case(counts=(0, 0, 1, 0), zero=True),
    "all rows to one expert": Case(counts=(0, 50, 0, 0)),
    "all rows to the last expert": Case(counts=(0, 0, 0, 50)),
    "as many blocks as can be": Case(counts=(17, 1, 1, 1)),
    "five experts": Case(counts=(5, 1, 0, 2, 9)),
    "one expert": Case(counts=(9,)),
    "the shortest rows, one output": Case(inner=32, group_len=16, out=1),
    "groups that are no power of two": Case(group_len=48, zero=True),
    "whole rows as groups": Case(counts=(2, 0, 1), inner=704, group_len=704, out=20, zero=True),
    "rows of 704": Case(counts=(2, 0, 1), inner=704, zero=True),
    "rows of 2816, bf16": replace(FLOAT, counts=(18, 1), out=70, inner=2816, x=BF16),
    "rows of 704, bf16": Case(counts=(3, 0, 18, 7), inner=704, group_len=64, out=70, zero=True, x=BF16),
    "few rows of 704, bf16": replace(FLOAT, counts=(3, 0, 18, 7), inner=704, out=70, x=BF16),
    "few rows of 704, fp16": replace(FLOAT, counts=(1, 0, 2, 1), inner=704, out=70, outer="times", x=F16),
    "many rows, bf16": Case(counts=(130, 2, 0, 70), out=130, x=BF16),
}  # fmt: skip
if not IS_FULL:
    CASES = {name: CASES[name] for name in (
        "int4 with zeros", "int4, scales e4m3, outer", "float4 over", "one row", "one expert",
        "the shortest rows, one output", "whole rows as groups", "many rows, bf16",
    )}  # fmt: skip
# Kind, zeros, outer, dtype of x.
DECODED = {
    f"{kind.value} {'zeros' * zero}{outer} {TYPES[dtype]}": (kind, zero, outer, dtype)
    for kind, zero, outer in (
        (INT4, False, ""), (INT4, True, ""), (FLOAT4, False, "times"), (FLOAT4, False, "over")
    )
    for dtype in (BF16, F32, F16)[: cases(3, 1)]
}  # fmt: skip
COMPILED = {
    "int4": Case(counts=(16,) * 128, out=1408, inner=2816, zero=True, x=BF16),
    "float4": replace(FLOAT, counts=(1,) * 128, out=2816, inner=704, x=F16),
}


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return in_a_process("products", tmp_path_factory.mktemp("triton"), TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return in_a_process("compiler", tmp_path_factory.mktemp("triton"), TRITON_INTERPRET="0")


def in_a_process(what: str, cache: Path, **settings: str) -> dict[str, Any]:
    paths = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(cache), **settings}
    done = subprocess.run(
        [sys.executable, __file__, what], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_the_reference(products: dict[str, Any], name: str) -> None:
    error = products[name]
    assert isinstance(error, float), error
    assert error <= TOLERANCE[CASES[name].x]


@needs_triton
@pytest.mark.parametrize("name", DECODED)
def test_weights_are_decoded_to_the_bit(products: dict[str, Any], name: str) -> None:
    assert products[name] is True


@needs_triton
def test_every_e4m3_scale_is_read(products: dict[str, Any]) -> None:
    assert products["every e4m3"] is True


@needs_triton
def test_no_rows_give_no_rows(products: dict[str, Any]) -> None:
    assert products["no rows"] is True


@needs_triton
def test_the_operation_does_what_it_tells_torch(products: dict[str, Any]) -> None:
    assert products["operation"] is True


@needs_triton
def test_triton_is_imported_when_it_is_wanted(products: dict[str, Any]) -> None:
    assert products["imported with the module"] is False


@needs_triton
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("card", CARDS)
def test_the_kernel_compiles_for(compiled: dict[str, Any], card: int, name: str) -> None:
    made = compiled[f"{name} {card}"]
    assert isinstance(made, dict), made
    assert made["cubin"] > 0, f"no cubin for sm_{card}"
    assert 0 < made["shared"] <= SHARED[card]


def test_a_fake_tensor_passes() -> None:
    with FakeCuda():
        quantized = on_cuda(FLOAT.experts_linear())
        x = torch.empty((30, 96), dtype=BF16, device=DEVICE)
        result = multiply_grouped(x, torch.empty(4, dtype=torch.int32, device=DEVICE), quantized)
    assert (result.shape, result.dtype, result.device) == ((30, 40), BF16, DEVICE)


@pytest.mark.parametrize("count", [1, 15, 16, 100, 1000])
def test_a_launch_needs_only_shapes(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake tensor has no values: whoever reads one fails."""
    launched: list[tuple[Any, ...]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *parts, **fixed: launched.append((grid, parts, fixed))

    monkeypatch.setattr(module, "kernel", Recorder)
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: nullcontext())
    with FakeCuda():
        quantized = on_cuda(FLOAT.experts_linear())
        x = torch.empty((count, 96), dtype=BF16, device=DEVICE)
        ends = torch.empty(4, dtype=torch.int32, device=DEVICE)
        result = module._launch(
            x, ends, quantized.qdata, quantized.scale, None, quantized.global_scale, True, True
        )
    ((grid, parts, fixed),) = launched
    assert grid == ((count // fixed["rows"] + min(count, 4)) * -(-40 // fixed["columns"]),)
    assert parts[6] is result
    assert parts[3].dtype == torch.uint8
    assert (fixed["experts"], fixed["lanes"], fixed["group_len"], fixed["unit"]) == (4, 4, 16, 16)


def test_most_experts_fit_in_one_block() -> None:
    for count in range(1, 5000, 7):
        rows = blocks_for(count, 32, BF16).rows
        assert rows in (16, 32, 64, 128)
        assert rows >= min(2 * count // 32, 128)


@needs_triton
def test_what_it_cannot_do_is_left_to_the_plain_product() -> None:
    with FakeCuda():
        assert supports(on_cuda(FLOAT.experts_linear()))
        assert supports(on_cuda(Case(zero=True).experts_linear()))
        assert not supports(on_cuda(random_codes(QuantKind.FLOAT8, 2, 4, 64, groups=1)))
        assert not supports(on_cuda(random_codes(QuantKind.INT8, 2, 4, 64, groups=1)))
        assert not supports(on_cuda(random_codes(INT4, 4, 64, groups=2)))  # no bank
        assert not supports(on_cuda(Case(inner=48, group_len=16).experts_linear()))
        assert not supports(on_cuda(Case(group_len=8).experts_linear()))
        assert not supports(on_cuda(Case(scale=torch.float8_e5m2).experts_linear()))
        quantized = on_cuda(Case().experts_linear())
        assert not supports(replace(quantized, scale=torch.empty((4, 3, 40), dtype=BF16, device=DEVICE).mT))
    assert not supports(Case().experts_linear())  # no CUDA


def test_without_triton_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not available()
    with FakeCuda():
        assert not supports(on_cuda(Case().experts_linear()))


def on_cuda(quantized: QuantizedTensor) -> QuantizedTensor:
    return changed(quantized, lambda part: torch.empty(part.shape, dtype=part.dtype, device=DEVICE))


def changed(quantized: QuantizedTensor, change: Callable[[Tensor], Tensor]) -> QuantizedTensor:
    parts: dict[str, Any] = {name: change(part) for name, part in quantized.parts.items()}
    return replace(quantized, **parts)


# What follows runs in the processes.


def run_products() -> dict[str, Any]:
    early = "triton" in sys.modules
    mend_interpreter()
    return {
        "imported with the module": early,
        **{name: tried(partial(product_error, case)) for name, case in CASES.items()},
        **{name: tried(partial(is_decoded_exactly, *what)) for name, what in DECODED.items()},
        "every e4m3": tried(every_e4m3_is_read),
        "no rows": tried(no_rows_give_none),
        "operation": tried(operation_is_sound),
    }


def mend_interpreter() -> None:
    """Triton's interpreter multiplies the bits of bf16 as integers, and cuts off where a GPU rounds."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    bf16 = importlib.import_module("triton.language").bfloat16
    dot, cast = builder.create_dot, builder.cast_impl

    def wide(handle: Any) -> Any:
        return cast(None, handle, interpreter.tl.float32) if handle.dtype.scalar == bf16 else handle

    def mended_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, wide(a), wide(b), *rest)

    def mended_cast(self: Any, handle: Any, dtype: Any) -> Any:
        if handle.dtype.scalar != interpreter.tl.float32 or dtype.scalar != bf16:
            return cast(self, handle, dtype)
        fake_quantize_activations = torch.from_numpy(handle.data).to(BF16).view(torch.uint16).numpy()
        return interpreter.TensorHandle(fake_quantize_activations, bf16)

    builder.create_dot, builder.cast_impl = mended_dot, mended_cast


def product_error(case: Case) -> float:
    """The worst error beside the twin, relative to the result and to its largest number."""
    x = torch.randn((sum(case.counts), case.inner), generator=torch.Generator().manual_seed(2)).to(case.x)
    quantized = case.experts_linear()
    ends = before_a_wall(ends_of(*case.counts))
    found = multiply_grouped(before_a_wall(x), ends, changed(quantized, before_a_wall))
    expected = twin(x, case.counts, quantized)
    assert found.dtype == x.dtype
    assert found.shape == expected.shape
    return ((found.float() - expected).abs() / (expected.abs() + expected.abs().max())).max().item()


def before_a_wall(x: Tensor) -> Tensor:
    """A copy that ends where memory ends: who reads on kills the process, as it might on a GPU."""
    whole = -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, whole + mmap.PAGESIZE)
    copy = torch.frombuffer(memory, dtype=torch.uint8, count=x.nbytes, offset=whole - x.nbytes)
    copy.copy_(x.flatten().view(torch.uint8))
    wall = ctypes.c_void_p(copy.data_ptr() + x.nbytes)
    assert ctypes.CDLL(None).mprotect(wall, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return copy.view(x.dtype).view(x.shape)


def twin(x: Tensor, counts: tuple[int, ...], quantized: QuantizedTensor) -> Tensor:
    """In fp32, from weights rounded to the dtype of `x`."""
    weights = [quantized[expert].dequantize(x.dtype).float() for expert in range(len(counts))]
    return torch.cat([F.linear(rows.float(), w) for rows, w in zip(x.split(counts), weights, strict=True)])


def is_decoded_exactly(kind: QuantKind, zero: bool, outer: str, dtype: torch.dtype) -> bool:
    """Experts times the identity, with all codes in each group and scales of all sizes."""
    experts, out, groups = 2, 34, 6
    places = torch.arange(experts * out * groups).view(experts, out, groups)
    scale = torch.logspace(-4, 3, places.numel()).view_as(places).to(BF16)
    quantized = QuantizedTensor(
        kind,
        pack(torch.arange(16, dtype=torch.uint8).repeat(experts, out, groups)),
        places.remainder(127).to(torch.uint8).view(E4M3) if kind is FLOAT4 else scale,
        zero_point=places.remainder(16).to(torch.uint8) if zero else None,
        global_scale=torch.linspace(0.3, 3, experts * out).view(experts, out, 1) if outer else None,
        global_scale_divides=outer == "over",
    )
    inner = quantized.shape[-1]
    x = torch.eye(inner, dtype=dtype).repeat(experts, 1)
    found = multiply_grouped(x, ends_of(inner, inner), quantized).unflatten(0, (experts, inner)).mT
    return torch.equal(found, quantized.dequantize(dtype))


def every_e4m3_is_read() -> bool:
    every = torch.arange(256).to(torch.uint8).view(E4M3).view(1, 256, 1).repeat(1, 1, 2)
    ones = torch.full((1, 256, 16), 0x22, dtype=torch.uint8)
    found = multiply_grouped(torch.eye(32)[:1], ends_of(1), QuantizedTensor(FLOAT4, ones, every))
    return torch.allclose(found[0], every[0, :, 0].float(), rtol=0, atol=0, equal_nan=True)


def no_rows_give_none() -> bool:
    return multiply_grouped(torch.zeros(0, 96), ends_of(0, 0, 0, 0), Case().experts_linear()).shape == (0, 40)


def operation_is_sound() -> bool:
    """torch's own checks of an operation: what it says it writes to, and what a fake tensor makes of it."""
    quantized = Case(zero=True).experts_linear()
    args = (
        torch.ones(30, 96),
        ends_of(3, 0, 20, 7),
        quantized.qdata,
        quantized.scale,
        quantized.zero_point,
        None,
        False,
        False,
    )
    torch.library.opcheck(module._operation, args, test_utils=("test_schema", "test_faketensor"))
    return True


def ends_of(*counts: int) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def run_compiler() -> dict[str, Any]:
    return {
        f"{name} {card}": tried(partial(build, case, card))
        for name, case in COMPILED.items()
        for card in CARDS
    }


def build(case: Case, card: int) -> dict[str, int]:
    """Compiled as a launch would have it: sizes of the program and of its shared memory."""
    triton: Any = importlib.import_module("triton")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", card, 32)
    shape = (len(case.counts), case.out, case.inner)
    blocks = blocks_for(sum(case.counts), shape[0], case.x)
    is_float, divides = case.kind is FLOAT4, case.outer == "over"
    fixed: dict[str, Any] = {**constants(blocks, shape, case.group_len, is_float, divides)}
    pointers = {
        "x_at": TYPES[case.x],
        "ends_at": "*i32",
        "codes_at": "*u8",
        "scale_at": TYPES[case.scale],
        "zero_at": "*u8" if case.zero else None,
        "outer_at": "*fp32" if case.outer else None,
        "result_at": TYPES[case.x],
    }
    fixed |= {name: None for name, kind in pointers.items() if kind is None}
    source = triton.compiler.ASTSource(
        fn=kernel(),
        signature={name: pointers.get(name) or "constexpr" for name in kernel().arg_names},
        constexprs=fixed,
        attrs={(at,): [["tt.divisibility", 16]] for at, kind in enumerate(pointers.values()) if kind},
    )
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    made = triton.compile(source, target=target, options=options)
    return {"cubin": len(made.asm["cubin"]), "shared": made.metadata.shared}


def tried(run: Callable[[], Any]) -> Any:
    """What it gives, or why it does not."""
    try:
        return run()
    except Exception:
        return traceback.format_exc()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run_products() if sys.argv[1] == "products" else run_compiler()))
