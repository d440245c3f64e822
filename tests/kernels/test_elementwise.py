"""The C++ kernels compute what their reference implementations in torch do; random numbers to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from dgemma.kernels import elementwise as module
from dgemma.kernels import kernel_cache
from dgemma.kernels.elementwise import Elementwise, elementwise, kernels_for
from dgemma.kernels.kernel_cache import UnsafeCacheError
from dgemma.model import attention, moe
from dgemma.model.layers import RmsNorm, gated_gelu, rms_norm
from dgemma.sampling import rng, vocab_scan
from dgemma.sampling.rng import NoiseKey, NoiseStream, noise_key
from dgemma.sampling.vocab_scan import CHUNK, Lead, ScanOptions, Terms, scan_block, scan_block_native

CPU = torch.device("cpu")
needs_kernel = pytest.mark.skipif(elementwise() is None, reason="no AVX2 or no compiler")
DTYPES = [torch.float32, torch.bfloat16]


def kernels() -> Elementwise:
    found = elementwise()
    assert found is not None
    return found


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# RMS norm


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_weight", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (2, 7, 16), (64, 4, 33), (257, 1024)])
def test_norms_are_those_of_torch(dtype: torch.dtype, with_weight: bool, shape: tuple[int, ...]) -> None:
    x = (3 * random(*shape)).to(dtype)
    weight = random(shape[-1], seed=1).to(dtype) if with_weight else None
    exact = F.rms_norm(x.double(), (shape[-1],), None if weight is None else weight.double(), 1e-6)
    found = kernels().rms_norm(x, weight, 1e-6)
    # fp32 arithmetic, rounded once to the dtype.
    error = 1e-6 if dtype == torch.float32 else 2**-8  # to the nearest: half a unit
    assert found.dtype == dtype
    assert ((found.double() - exact).abs() <= error * exact.abs() + 1e-30).all()


@needs_kernel
def test_a_norm_does_not_depend_on_the_other_rows() -> None:
    x = random(300, 1000)
    together = kernels().rms_norm(x, None, 1e-6)
    assert all(torch.equal(kernels().rms_norm(x[i : i + 1], None, 1e-6)[0], together[i]) for i in (0, 7, 299))


def gradients(function: Any, *inputs: Tensor) -> list[Tensor]:
    """Of a weighted sum of the result, in float64 and with the kernels."""
    found = []
    for dtype in (torch.float64, torch.float32):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
        result = function(*leaves)
        (result * random(*result.shape, seed=9).to(dtype)).sum().backward()
        found.append(torch.cat([x.grad.flatten().double() for x in leaves if x.grad is not None]))
    return found


@needs_kernel
@pytest.mark.parametrize("with_weight", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (2, 7, 16), (64, 4, 33), (257, 192)])
def test_gradients_of_norms_are_those_of_torch(with_weight: bool, shape: tuple[int, ...]) -> None:
    inputs = [3 * random(*shape), *([random(shape[-1], seed=1)] if with_weight else [])]
    exact, found = gradients(lambda x, weight=None: rms_norm(x, weight, 1e-6), *inputs)
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-5)


@needs_kernel
@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (2, 7, 16), (300, 128)])
def test_gradients_of_gates_are_those_of_torch(shape: tuple[int, ...]) -> None:
    both = 2 * random(*shape[:-1], 2 * shape[-1])
    for split in (lambda x: x.chunk(2, dim=-1), lambda x: [part.contiguous() for part in x.chunk(2, dim=-1)]):
        exact, found = gradients(lambda x, split=split: gated_gelu(*split(x)), both)
        torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-5)


@needs_kernel
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 5, 3, 16), (3, 70, 6, 32), (1, 9, 2, 46)])
def test_gradients_of_rope_are_those_of_torch(shape: tuple[int, ...]) -> None:
    angles = (3 * random(*shape[:2], 1, shape[-1] // 2, seed=2)).repeat(1, 1, 1, 2)  # of both halves
    exact, found = gradients(
        lambda x: attention.rotate(x, angles.cos().to(x), angles.sin().to(x)), random(*shape)
    )
    torch.testing.assert_close(found, exact, atol=1e-6, rtol=1e-5)


@needs_kernel
def test_training_runs_through_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tests of gradients would compare torch with itself."""
    calls = []
    for name in ("rms_norm_backward", "gated_gelu_backward", "rotate"):
        right = getattr(Elementwise, name)
        spy = lambda self, *args, name=name, right=right: (calls.append(name), right(self, *args))[1]  # noqa: E731
        monkeypatch.setattr(Elementwise, name, spy)
    x = random(4, 6, 2, 16).requires_grad_()
    turned = attention.rotate(rms_norm(x, None, 1e-6), torch.ones(4, 6, 1, 16), torch.zeros(4, 6, 1, 16))
    gated_gelu(turned, turned).sum().backward()
    assert calls == ["rotate", "gated_gelu_backward", "rotate", "rms_norm_backward"]


@needs_kernel
def test_a_norm_of_bf16_keeps_nan() -> None:
    x = torch.tensor([[1.0, float("nan")]], dtype=torch.bfloat16)
    assert kernels().rms_norm(x, None, 1e-6).isnan().all()


@needs_kernel
def test_a_kernel_refuses_what_it_would_read_past() -> None:
    with pytest.raises(AssertionError):
        kernels().rms_norm(torch.ones(2, 8), torch.ones(4), 1e-6)
    with pytest.raises(AssertionError):
        kernels().combine(torch.ones(4, 8), torch.ones(2, 2), torch.zeros(2, 1, dtype=torch.int64))
    terms = Terms(torch.ones(1), None, torch.zeros(1, 16, dtype=torch.bfloat16), None)
    with pytest.raises(AssertionError):
        scan_block_native(kernels(), torch.ones(1, 2, 16), terms, 0, None, *leads(1, 2, 16, torch.float32))
    columns = torch.ones(1, 16, 2).transpose(1, 2)
    with pytest.raises(AssertionError):
        scan_block_native(
            kernels(), columns, terms._replace(bias=None), 0, None, *leads(1, 2, 16, torch.float32)
        )


@needs_kernel
def test_what_trains_has_torchs_gradient() -> None:
    norm = RmsNorm(8, 1e-6, dtype=torch.float32, device=CPU)
    torch.nn.init.ones_(norm.weight)
    norm.weight.requires_grad_()
    norm(random(2, 8)).sum().backward()
    assert norm.weight.grad is not None
    x = random(2, 8).requires_grad_()
    rms_norm(x, None, 1e-6).square().sum().backward()
    assert x.grad is not None
    gate = random(2, 8).requires_grad_()
    gated_gelu(gate, random(2, 8)).sum().backward()
    assert gate.grad is not None


def test_a_norm_that_trains_in_bf16_is_torchs() -> None:
    x, weight = random(3, 100).bfloat16().requires_grad_(), random(100, seed=1).bfloat16().requires_grad_()
    found, expected = rms_norm(x, weight, 1e-6), F.rms_norm(x, (100,), weight, 1e-6)
    assert torch.equal(found, expected)
    assert found.grad_fn is not None
    gradients = (
        torch.autograd.grad(found.sum(), (x, weight)),
        torch.autograd.grad(expected.sum(), (x, weight)),
    )
    torch.testing.assert_close(*gradients, atol=0, rtol=0)


def test_a_gate_of_any_strides_is_torchs() -> None:
    gate, up = random(96, 40).T, random(96, 40, seed=1).T  # no row stands together in memory
    torch.testing.assert_close(gated_gelu(gate, up), F.gelu(gate, approximate="tanh") * up)


def test_tensors_without_numbers_and_graphs_are_left_to_torch() -> None:
    with torch.device("meta"):
        assert kernels_for(torch.empty(2, 2)) is None
    assert kernels_for(torch.empty(2, 2, dtype=torch.float64)) is None
    assert kernels_for(torch.nn.Parameter(torch.empty(2, 2))) is None
    graph = torch.compile(lambda x: x + (0 if kernels_for(x) is None else 1), backend="eager")
    assert torch.equal(graph(torch.zeros(2)), torch.zeros(2))


# Gate, RoPE, sum of the experts


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (2, 7, 32), (300, 512)])
def test_gates_are_those_of_torch(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    both = (4 * random(*shape[:-1], 2 * shape[-1])).to(dtype)
    for gate, up in (both.chunk(2, dim=-1), [part.contiguous() for part in both.chunk(2, dim=-1)]):
        expected = F.gelu(gate, approximate="tanh") * up
        error = 2e-6 if dtype == torch.float32 else 2**-7  # two roundings
        # 1 + tanh cancels where the gate is nearly closed.
        cancelled = 1e-6 * (gate.float() * up.float()).abs()
        difference = (gated_gelu(gate, up).float() - expected.float()).abs()
        assert (difference <= error * expected.float().abs() + cancelled).all()


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2, 16, 40, 256])
def test_rotations_have_the_bits_of_torch(
    dtype: torch.dtype, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = random(2, 9, 3, dim).to(dtype)
    cos, sin = (table(random(2, 9, 1, dim, seed=2)).to(dtype) for table in (torch.cos, torch.sin))
    cases = [
        (x, cos, sin),
        (x.transpose(0, 1), cos[:1, :2].expand(9, 2, 1, -1), sin[:1, :2].expand(9, 2, 1, -1)),
    ]
    fast = [attention.rotate(*case) for case in cases]
    monkeypatch.setattr(attention, "kernels_for", lambda x: None)
    for case, found in zip(cases, fast, strict=True):
        assert torch.equal(found, attention.rotate(*case))


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "k", "size"), [(1, 1, 3), (40, 4, 100), (300, 8, 256)])
def test_sums_of_experts_have_the_bits_of_torch(
    dtype: torch.dtype, tokens: int, k: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = torch.randint(16, (tokens, k), generator=torch.Generator().manual_seed(0))
    _, route = moe.sort_by_expert(chosen)
    outputs, weights = random(tokens * k, size).to(dtype), random(tokens, k, seed=1)
    fast = moe.combine(outputs, weights, route)
    monkeypatch.setattr(moe, "kernels_for", lambda x: None)
    assert torch.equal(fast, moe.combine(outputs, weights, route))


# Random numbers


@needs_kernel
@settings(max_examples=50)
@example(seeds=[-1, 1 << 63, 0], canvas=2, step=2**31, first=2**18, count=1030, positions=3)
@given(
    seeds=st.lists(st.integers(-(1 << 63), (1 << 64) - 1), min_size=1, max_size=3),
    canvas=st.integers(0, 1 << 20),
    step=st.integers(0, 1 << 31),
    first=st.integers(0, 1 << 16),
    count=st.integers(1, 200),
    positions=st.integers(1, 5),
)
def test_random_numbers_have_the_bits_of_torch(
    seeds: list[int], canvas: int, step: int, first: int, count: int, positions: int
) -> None:
    rows = len(seeds)
    key = noise_key(seeds, [canvas] * rows, [step] * rows, CPU)
    index = (4 * first + torch.arange(count)).expand(rows, positions, count)
    fast = (
        rng.race_times(key, NoiseStream.TOKEN_RACE, index),
        rng.random_tokens(key, NoiseStream.RENOISE, positions, 262_144),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rng, "kernels_for", lambda x: None)
        plain = (
            rng.race_times(key, NoiseStream.TOKEN_RACE, index),
            rng.random_tokens(key, NoiseStream.RENOISE, positions, 262_144),
        )
    assert all(torch.equal(a, b) for a, b in zip(fast, plain, strict=True))


@needs_kernel
def test_every_random_word_becomes_torchs_time() -> None:
    """The two logarithms, on the smallest, the largest and a million other numbers."""
    key, positions = noise_key([3], [0], [0], CPU), torch.arange(256)
    quads = torch.arange(1024).expand(1, 256, 1024).contiguous()
    counters = rng._counters(key, NoiseStream.OPEN, positions, quads)
    words = kernels().random_words(counters)
    assert torch.equal(words, rng._words(key, NoiseStream.OPEN, positions, quads))
    assert torch.equal(kernels().race_times(counters), rng.to_exponential(words))


# The vocabulary scan


def leads(rows: int, canvas: int, width: int, dtype: torch.dtype) -> tuple[Lead, Lead]:
    def lead() -> Lead:
        return Lead(
            torch.full((rows, canvas), float("inf")),
            torch.zeros((rows, canvas), dtype=torch.int64),
            torch.zeros((rows, canvas, width), dtype=dtype),
        )

    return lead(), lead()


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [30.0, None])
@pytest.mark.parametrize("forbids", [False, True])
@settings(max_examples=15)
@example(tokens=2048, canvas=5, seed=0, spread=8.0)
@example(tokens=1025, canvas=1, seed=1, spread=1.0)
@given(
    tokens=st.integers(1, 2048),
    canvas=st.integers(1, 9),
    seed=st.integers(0, 1 << 20),
    spread=st.sampled_from([0.1, 3.0, 100.0]),
)
def test_a_block_is_scanned_as_by_torch(
    dtype: torch.dtype, cap: float | None, forbids: bool, tokens: int, canvas: int, seed: int, spread: float
) -> None:
    rows, width = 2, min(CHUNK, tokens)
    chunks = -(-tokens // width)
    products = (spread * random(rows, canvas, tokens, seed=seed)).to(dtype)
    bias = torch.where(random(rows, tokens, seed=seed + 1) < 0, float("-inf"), 0.0) if forbids else None
    terms = Terms(torch.tensor([0.7, 1.5]), cap, bias, None)
    races = random(rows, canvas, chunks, seed=seed + 3)
    old, new = leads(rows, canvas, width, dtype), leads(rows, canvas, width, dtype)
    expected, best, winner = scan_block(products, terms, torch.tensor(6), races, *old)
    found = scan_block_native(kernels(), products, terms, 6, races, *new)
    scale = 1 + expected.top.nan_to_num(neginf=0).abs()
    assert torch.allclose(found.top, expected.top, rtol=1e-6, atol=1e-6)
    for name in ("mass", "moment"):
        difference = (getattr(found, name) - getattr(expected, name)).abs()
        assert (difference <= 3e-6 * scale[..., None] * (1 + getattr(expected, name).abs())).all(), name
    error = 1e-6 if dtype == torch.float32 else 2**-8
    assert ((found.shares.float() - expected.shares.float()).abs() <= error * scale[..., None] * 3).all()
    # Two chunks may be as good as equal: then either leads.
    for mine, theirs in ((new[0], best), (new[1], winner)):
        finite = theirs.score.isfinite()
        assert torch.allclose(mine.score[finite], theirs.score[finite], rtol=1e-5, atol=1e-5)
        same = mine.chunk == theirs.chunk
        assert torch.equal(mine.products[same], theirs.products[same])
        assert chunks > 1 or same.all()


@needs_kernel
def test_a_later_block_takes_the_lead_only_if_it_is_better() -> None:
    products = torch.zeros(1, 2, 2048)
    products[0, 0, 1500] = 9.0
    terms, races = Terms(torch.ones(1), None, None, None), torch.zeros(1, 2, 2)
    best, winner = leads(1, 2, CHUNK, torch.float32)
    for first, block in ((0, products), (2, products / 2)):
        scan_block_native(kernels(), block, terms, first, races, best, winner)
    assert best.chunk.tolist() == [[1, 0]]
    assert best.score.tolist() == [[-9.0, 0.0]]
    assert winner.chunk.tolist() == [[1, 0]]
    assert torch.equal(best.products[0, 0], products[0, 0, 1024:])


@needs_kernel
def test_shares_are_never_denormal_and_a_nan_is_seen() -> None:
    products = torch.linspace(-150, 0, 2048).expand(1, 1, 2048).contiguous()
    terms = Terms(torch.ones(1), None, None, None)
    for block in (
        scan_block_native(kernels(), products, terms, 0, None, *leads(1, 1, CHUNK, torch.float32)),
        scan_block(products, terms, torch.tensor(0), None, *leads(1, 1, CHUNK, torch.float32))[0],
    ):
        shares = block.shares
        assert ((shares == 0) | (shares > torch.finfo(torch.float32).tiny)).all()
        assert (shares == 0).any()
    products[0, 0, 5] = float("nan")
    block = scan_block_native(kernels(), products, terms, 0, None, *leads(1, 1, CHUNK, torch.float32))
    assert block.mass.sum().isnan()


@needs_kernel
def test_a_scan_has_the_same_bits_with_any_number_of_threads_and_neighbours() -> None:
    products = 5 * random(1, 64, 2048)
    terms, races = Terms(torch.tensor([0.7]), 30.0, None, None), random(1, 64, 2)

    def scan(part: slice) -> tuple[Tensor, ...]:
        own = products[:, part].contiguous()
        both = leads(1, own.shape[1], CHUNK, torch.float32)
        return (*scan_block_native(kernels(), own, terms, 0, races[:, part].contiguous(), *both), *both[1])

    whole, alone = scan(slice(None)), scan(slice(9, 10))
    threads, found = torch.get_num_threads(), list[tuple[Tensor, ...]]()
    torch.set_num_threads(1)
    try:
        found.append(scan(slice(None)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(whole, found[0], strict=True))
    assert all(torch.equal(a[:, 9:10], b) for a, b in zip(whole, alone, strict=True))


class Head:
    logit_cap, embedding_scale = 30.0, 1.0

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.rows = random(vocab_size, 32, seed=4)

    def products(self, hidden: Tensor, tokens: slice) -> Tensor:
        return hidden @ self.rows[tokens].T

    def mix(self, shares: Tensor, tokens: slice) -> Tensor:
        return shares @ self.rows[tokens]


@needs_kernel
@pytest.mark.parametrize("vocab", [700, 6144, 5000])
def test_a_whole_scan_samples_what_torch_samples(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = random(2, 40, 32, seed=5)
    key: NoiseKey = noise_key([1, 2], [0, 0], [0, 3], CPU)
    temperature = torch.tensor([0.8, 0.0])
    fast = vocab_scan.scan_vocab(hidden, Head(vocab), temperature, key)
    monkeypatch.setattr(vocab_scan, "kernels_for", lambda x: None)
    plain = vocab_scan.scan_vocab(hidden, Head(vocab), temperature, key)
    for name in ("argmax", "sampled"):
        assert torch.equal(getattr(fast, name), getattr(plain, name)), name
    for name in ("entropy", "soft"):
        assert torch.allclose(getattr(fast, name), getattr(plain, name), rtol=1e-4, atol=1e-5), name


@needs_kernel
def test_a_floor_is_compared_with_torchs_own_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The floor of top-k is the logit of the k-th token: another tanh would drop that token now and then."""
    monkeypatch.setattr(vocab_scan, "scan_block_native", None)
    head, hidden = Head(700), random(1, 4, 32)
    floor = torch.zeros(1, 4)
    scan = vocab_scan.scan_vocab(hidden, head, torch.ones(1), None, ScanOptions(floor=floor))
    assert scan.entropy.isfinite().all()


# Where it is missing


@pytest.fixture
def forgetful() -> Iterator[None]:
    elementwise.cache_clear()
    yield
    elementwise.cache_clear()


@pytest.mark.usefixtures("forgetful")
def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "find_compiler", lambda: None)
    assert elementwise() is None
    assert torch.allclose(rms_norm(torch.full((1, 4), 2.0), None, 0.0), torch.ones(1, 4))


@pytest.mark.usefixtures("forgetful")
def test_an_unsafe_cache_is_said_and_torch_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsafe(*_: object, **__: object) -> None:
        raise UnsafeCacheError("the kernel cache is somebody's")

    monkeypatch.setattr(module, "load_kernel", unsafe)
    assert elementwise() is None
    assert "torch's operations" in caplog.text
