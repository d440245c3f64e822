"""The compiled products agree with their plain twin, and a row's result never depends on its company.

Each is tested with activations in float32 and, where the processor has VNNI, rounded to int8.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dgemma.kernels import kernel_cache
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
no_vnni = "this processor has no AVX-512 VNNI"
needs_vnni = pytest.mark.skipif("avx512_vnni" not in kernel_cache.cpu_flags(), reason=no_vnni)
both = pytest.mark.parametrize("rounds", [False, pytest.param(True, marks=needs_vnni)])


def kernel(rounds: bool = False) -> QuantizedMatmul:
    found = quantized_matmul()
    assert found is not None
    return replace(found, rounds=rounds)


def activations(count: int, inner: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn((count, inner), generator=g) * torch.rand((count, 1), generator=g).exp()


def twin(x: torch.Tensor, quantized: QuantizedTensor, rounds: bool) -> torch.Tensor:
    x = fake_quantize_activations(x) if rounds else x
    return (x.double() @ quantized.dequantize(torch.float32).double().t()).float()


def groups_of(kind: QuantKind, inner: int, group_len: int) -> int:
    return 1 if kind is QuantKind.INT8 else inner // group_len


@needs_kernel
@both
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
    kind: QuantKind, rounds: bool, count: int, out: int, groups: int, group_len: int, seed: int
) -> None:
    inner = groups * group_len
    quantized = random_codes(kind, out, inner, groups=groups_of(kind, inner, group_len), seed=seed)
    x = activations(count, inner, seed)
    expected = twin(x, quantized, rounds)
    assert kernel(rounds).supports(quantized)
    # What is added up, not what is left of it: terms may cancel.
    added = x.abs() @ quantized.dequantize(torch.float32).abs().T
    assert ((kernel(rounds).multiply(x, quantized) - expected).abs() <= 1e-5 * added).all()


@needs_kernel
@both
def test_zero_points_are_taken_off(rounds: bool) -> None:
    quantized = random_codes(QuantKind.INT4, 33, 352, groups=11, zero_point=True)
    x = activations(7, 352)
    expected = twin(x, quantized, rounds)
    assert torch.allclose(kernel(rounds).multiply(x, quantized), expected, rtol=1e-5, atol=1e-4)


@needs_kernel
@both
@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_scales_are_read_in_every_type(scale: torch.dtype, rounds: bool) -> None:
    quantized = random_codes(QuantKind.INT4, 8, 256, groups=8)
    small = (quantized.scale.float() * torch.logspace(-3, 2, 8)).to(scale)
    odd = QuantizedTensor(QuantKind.INT4, quantized.qdata, small)
    x = activations(3, 256)
    expected = twin(x, odd, rounds)
    assert torch.allclose(
        kernel(rounds).multiply(x, odd), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item()
    )


@needs_kernel
@both
@pytest.mark.parametrize("kind", KINDS)
def test_a_bank_gives_each_expert_its_rows_and_an_idle_one_none(kind: QuantKind, rounds: bool) -> None:
    quantized = random_codes(kind, 4, 66, 160, groups=groups_of(kind, 160, 32))
    x = activations(30, 160)
    ends = torch.tensor([3, 3, 20, 30], dtype=torch.int32)
    together = kernel(rounds).multiply(x, quantized, ends)
    for expert, rows in ((0, slice(0, 3)), (2, slice(3, 20)), (3, slice(20, 30))):
        assert torch.equal(together[rows], kernel(rounds).multiply(x[rows], quantized[expert]))


@needs_kernel
@both
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_bit_for_bit_in_any_company(kind: QuantKind, rounds: bool) -> None:
    quantized = random_codes(kind, 130, 704, groups=groups_of(kind, 704, 32))
    x = activations(29, 704)
    together = kernel(rounds).multiply(x, quantized)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for row in range(29):
            alone = kernel(rounds).multiply(x[row : row + 1], quantized)[0]
            assert torch.equal(alone, together[row])
    finally:
        torch.set_num_threads(threads)


@needs_kernel
@settings(max_examples=40)
@given(
    count=st.integers(1, 19), out=st.integers(1, 70), inner=st.integers(1, 90), seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_plain_weights_are_multiplied_in_float32(
    count: int, out: int, inner: int, seed: int, dtype: torch.dtype
) -> None:
    x = activations(count, inner, seed).to(dtype)
    weight = activations(out, inner, seed + 1).to(dtype)
    found = kernel().multiply_plain(x, weight)
    assert found.dtype == dtype
    expected = (x.double() @ weight.double().t()).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 0.01
    assert torch.allclose(found, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_plain_product_is_the_same_in_any_company_and_beyond_a_panel(dtype: torch.dtype) -> None:
    x, weight = activations(400, 120).to(dtype), activations(3 * 70, 120, 1).to(dtype).view(3, 70, 120)
    ends = torch.tensor([150, 150, 400], dtype=torch.int32)
    together = kernel().multiply_plain(x, weight, ends)
    for row, expert in ((0, 0), (149, 0), (150, 2), (341, 2), (342, 2), (399, 2)):
        assert torch.equal(kernel().multiply_plain(x[row : row + 1], weight[expert])[0], together[row])


@needs_kernel
def test_float8_is_decoded_with_every_sign_and_size() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = every[every.float().isfinite()]
    codes = torch.cat([finite, finite[:2]]).view(1, 256)
    quantized = QuantizedTensor(QuantKind.FLOAT8, codes, torch.full((1, 1), 0.37))
    decoded = kernel().multiply(torch.eye(256), quantized)[:, 0]
    assert torch.equal(decoded, quantized.dequantize(torch.float32)[0])


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
@pytest.mark.parametrize("rounds", [False, True])
def test_what_it_cannot_do_is_left_to_the_plain_product(rounds: bool) -> None:
    assert kernel(rounds).supports(random_codes(QuantKind.FLOAT8, 4, 64, groups=1)) is not rounds
    assert not kernel(rounds).supports(random_codes(QuantKind.INT4, 1, 64 * 257, groups=1))
    assert not kernel(rounds).supports(random_codes(QuantKind.INT4, 2, 32, groups=8))  # 4 neighbours a scale


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
    monkeypatch.setattr(kernel_cache, "find_compiler", lambda: "true")
    monkeypatch.setattr(kernel_cache, "cpu_flags", lambda: frozenset(module._AVX512))
    monkeypatch.setattr(kernel_cache.platform, "system", lambda: "Linux")
    for function in (module._load, unavailable_reason):
        function.cache_clear()
    try:
        assert "home directory" in str(unavailable_reason())
    finally:
        unavailable_reason.cache_clear()


def test_a_system_without_kernels_is_no_fault_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "cpu_flags", lambda: frozenset(module._AVX512))
    monkeypatch.setattr(kernel_cache.platform, "system", lambda: "Windows")
    for function in (module._load, unavailable_reason):
        function.cache_clear()
    try:
        assert unavailable_reason() == "kernels are compiled on Linux only, and this is Windows"
    finally:
        unavailable_reason.cache_clear()


def test_without_a_compiler_there_is_no_kernel_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "find_compiler", lambda: None)
    monkeypatch.setattr(kernel_cache, "cpu_flags", lambda: frozenset(module._AVX512))
    unavailable_reason.cache_clear()
    quantized_matmul.cache_clear()
    try:
        assert quantized_matmul() is None
        assert "compiler" in str(unavailable_reason())
    finally:
        unavailable_reason.cache_clear()
        quantized_matmul.cache_clear()
