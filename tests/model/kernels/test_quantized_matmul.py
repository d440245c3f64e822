"""The compiled products agree with their plain twin, and a row's result never depends on its company."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dgemma.model.kernels import quantized_matmul as module
from dgemma.model.kernels.quantized_matmul import (
    QuantizedMatmul,
    fake_quantize_activations,
    quantized_matmul,
    unavailable_reason,
)
from dgemma.model.quantized_tensor import QuantizedTensor, QuantKind
from model.test_quantized_tensor import random_codes

KINDS = (QuantKind.INT4, QuantKind.INT8, QuantKind.FLOAT4)
reason = unavailable_reason()
needs_kernel = pytest.mark.skipif(reason is not None, reason=f"{reason}")


def kernel() -> QuantizedMatmul:
    found = quantized_matmul()
    assert found is not None
    return found


def activations(count: int, inner: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn((count, inner), generator=g) * torch.rand((count, 1), generator=g).exp()


def twin(x: torch.Tensor, quantized: QuantizedTensor) -> torch.Tensor:
    return (fake_quantize_activations(x).double() @ quantized.dequantize(torch.float32).double().t()).float()


def groups_of(kind: QuantKind, inner: int, group_len: int) -> int:
    return 1 if kind is QuantKind.INT8 else inner // group_len


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@example(count=17, out=1, groups=6, group_len=64, seed=53)  # a number halfway between two
@given(
    count=st.integers(1, 19),
    out=st.integers(1, 70),
    groups=st.integers(1, 20),
    group_len=st.sampled_from([16, 32, 64, 128]),
    seed=st.integers(0, 2**31),
)
def test_products_are_those_of_the_reference(
    kind: QuantKind, count: int, out: int, groups: int, group_len: int, seed: int
) -> None:
    inner = groups * group_len
    quantized = random_codes(kind, out, inner, groups=groups_of(kind, inner, group_len), seed=seed)
    x = activations(count, inner, seed)
    expected = twin(x, quantized)
    assert kernel().supports(quantized)
    assert torch.allclose(
        kernel().multiply(x, quantized), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item()
    )


@needs_kernel
def test_zero_points_are_taken_off() -> None:
    quantized = random_codes(QuantKind.INT4, 33, 352, groups=11, zero_point=True)
    x = activations(7, 352)
    expected = twin(x, quantized)
    assert torch.allclose(kernel().multiply(x, quantized), expected, rtol=1e-5, atol=1e-4)


@needs_kernel
@pytest.mark.parametrize("scale", [torch.float32, torch.float16, torch.float8_e4m3fn])
def test_scales_are_read_in_every_type(scale: torch.dtype) -> None:
    quantized = random_codes(QuantKind.INT4, 8, 256, groups=8)
    small = (quantized.scale.float() * torch.logspace(-3, 2, 8)).to(scale)
    odd = QuantizedTensor(QuantKind.INT4, quantized.qdata, small)
    x = activations(3, 256)
    expected = twin(x, odd)
    assert torch.allclose(
        kernel().multiply(x, odd), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item()
    )


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_a_bank_gives_each_expert_its_rows_and_an_idle_one_none(kind: QuantKind) -> None:
    quantized = random_codes(kind, 4, 66, 160, groups=groups_of(kind, 160, 32))
    x = activations(30, 160)
    ends = torch.tensor([3, 3, 20, 30], dtype=torch.int32)
    together = kernel().multiply(x, quantized, ends)
    for expert, rows in ((0, slice(0, 3)), (2, slice(3, 20)), (3, slice(20, 30))):
        assert torch.equal(together[rows], kernel().multiply(x[rows], quantized[expert]))


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_bit_for_bit_in_any_company(kind: QuantKind) -> None:
    quantized = random_codes(kind, 130, 704, groups=groups_of(kind, 704, 32))
    x = activations(29, 704)
    together = kernel().multiply(x, quantized)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for row in range(29):
            assert torch.equal(kernel().multiply(x[row : row + 1], quantized)[0], together[row])
    finally:
        torch.set_num_threads(threads)


@needs_kernel
def test_rounding_is_within_half_a_step_and_keeps_zeros() -> None:
    x = activations(5, 300)
    x[2] = 0
    top = torch.nn.functional.pad(x.abs(), (0, 212)).unflatten(-1, (-1, 256)).amax(-1)
    step = (top / 127).repeat_interleave(256, -1)[:, :300]
    assert ((fake_quantize_activations(x) - x).abs() <= step / 2 * 1.0001).all()
    quantized = random_codes(QuantKind.INT4, 4, 320, groups=10)
    assert kernel().multiply(torch.zeros(2, 320), quantized).eq(0).all()


@needs_kernel
def test_what_it_cannot_do_is_left_to_the_plain_product() -> None:
    assert not kernel().supports(random_codes(QuantKind.FLOAT8, 4, 64, groups=1))
    assert not kernel().supports(random_codes(QuantKind.INT4, 1, 64 * 257, groups=1))
    assert not kernel().supports(random_codes(QuantKind.INT4, 2, 32, groups=8))  # four neighbours to a scale


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The compiled kernel in a cache of its own, as a new process would find it."""

    def forget() -> None:
        for function in (module._load, unavailable_reason, quantized_matmul):
            function.cache_clear()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    assert quantized_matmul() is not None
    forget()
    yield tmp_path / "dgemma" / "kernels"
    forget()


@needs_kernel
def test_a_truncated_library_is_compiled_again(fresh_cache: Path) -> None:
    """In a new process, which mapping it would end by a SIGBUS."""
    (library,) = fresh_cache.glob("*.so")
    content = library.read_bytes()
    library.unlink()  # the mapped file stays whole
    library.write_bytes(content[:4096])
    library.chmod(0o600)
    code = f"import sys, {module.__name__} as m; sys.exit(m.quantized_matmul() is None)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert library.read_bytes() == content


@needs_kernel
@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give a file away")
def test_a_library_of_another_user_is_not_loaded(fresh_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    (library,) = fresh_cache.glob("*.so")
    fresh_cache.chmod(0o777)
    os.chown(library, 65_533, 65_533)
    with caplog.at_level(logging.WARNING, "dgemma.model"):
        assert quantized_matmul() is None
    assert str(fresh_cache) in str(unavailable_reason())
    (warning,) = caplog.messages
    assert str(fresh_cache) in warning
    assert "set XDG_CACHE_HOME" in warning


def test_without_a_home_there_is_no_kernel_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(module, "_compiler", lambda: "true")
    monkeypatch.setattr(module, "_cpu_flags", lambda: frozenset({"avx512_vnni"}))
    monkeypatch.setattr(module.platform, "system", lambda: "Linux")
    for function in (module._load, unavailable_reason):
        function.cache_clear()
    try:
        assert "home directory" in str(unavailable_reason())
    finally:
        unavailable_reason.cache_clear()


def test_without_a_compiler_there_is_no_kernel_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_compiler", lambda: None)
    monkeypatch.setattr(module, "_cpu_flags", lambda: frozenset({"avx512_vnni"}))
    unavailable_reason.cache_clear()
    quantized_matmul.cache_clear()
    try:
        assert quantized_matmul() is None
        assert "compiler" in str(unavailable_reason())
    finally:
        unavailable_reason.cache_clear()
        quantized_matmul.cache_clear()
