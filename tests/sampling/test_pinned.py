"""Positions that are given: a fixed one never moves, a limited one is read exactly, and neither is counted.

Ten thousand random canvases: 450 examples of 20 rows on made-up readings, 50 of 20 after a real head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from chi_square import chi_square
from dgemma.engine import model_runner
from dgemma.engine.canvas_pins import canvas_pins
from dgemma.engine.model_runner import sample_step, scan_rows
from dgemma.engine.request import PinnedTokens
from dgemma.model.execution import Execution
from dgemma.model.transformer import Transformer
from dgemma.params import GenerationParams
from dgemma.sampling import pinned as pins_module
from dgemma.sampling.pinned import (
    AllowedTokens,
    CanvasPins,
    apply_allowed_tokens,
    apply_pins,
    watched_log_probs,
)
from dgemma.sampling.rng import NoiseKey, NoiseStream, noise_key, random_tokens
from dgemma.sampling.sampler import (
    Acceptance,
    CanvasState,
    ConfidenceThreshold,
    EntropyBound,
    EntropyScore,
    FixedCount,
    Renoise,
    Sampler,
    StableAndConfident,
    SurpriseScore,
    UniformRenoise,
    open_canvas,
    step,
)
from dgemma.sampling.top_k import TopK
from dgemma.sampling.vocab_scan import ScanOptions, VocabScan, sample_dense, scan_vocab
from engine_life import tiny_models
from sizes import cases

CPU = torch.device("cpu")
HIDDEN = 6
ALIKE = ("argmax", "sampled", "entropy", "log_mass", "top_logit", "soft")


@dataclass
class SmallVocabulary:
    weight: Tensor  # [vocab, hidden]
    logit_cap: float | None = None
    embedding_scale: float = 1.0

    @property
    def vocab_size(self) -> int:
        return len(self.weight)

    def products(self, hidden: Tensor, tokens: slice) -> Tensor:
        return hidden @ self.weight[tokens].T

    def mix(self, shares: Tensor, tokens: slice) -> Tensor:
        return shares @ self.weight[tokens]

    def scaled(self, hidden: Tensor, temperature: float) -> Tensor:
        """The plain reference's logits [..., vocab], in fp64."""
        products = hidden.double() @ self.weight.double().T
        if self.logit_cap is not None:
            products = torch.tanh(products / self.logit_cap) * self.logit_cap
        return products / torch.tensor(temperature).double()


def make(
    rows: int, canvas: int, vocab: int, seed: int, cap: float | None = None
) -> tuple[SmallVocabulary, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocab, HIDDEN, generator=generator)
    hidden = torch.randn(rows, canvas, HIDDEN, generator=generator)
    return SmallVocabulary(weight, cap, embedding_scale=1.5), hidden


def keys(rows: int, seed: int, step_number: int = 3) -> NoiseKey:
    return noise_key(range(seed, seed + rows), [1] * rows, [step_number] * rows, CPU)


def some_sets(canvas: int, vocab: int, seed: int, sizes: tuple[int, ...] = (1, 2, 5, 40)) -> AllowedTokens:
    """About half of the positions, each with tokens of its own."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randperm(canvas, generator=generator)[: max(1, canvas // 2)].sort().values
    tokens = [
        torch.randperm(vocab, generator=generator)[: min(vocab, sizes[number % len(sizes)])].sort().values
        for number in range(len(positions))
    ]
    return AllowedTokens(positions, tuple(tokens))


# A fixed position


def test_a_fixed_position_is_a_point_mass_and_the_others_keep_their_bits() -> None:
    head, hidden = make(2, 9, 50, seed=1)
    scan = scan_vocab(hidden, head, torch.tensor([0.7, 0.4]), keys(2, 1), ScanOptions(num_top_k=3))
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(50, (2, 9), generator=generator)
    free = torch.rand(2, 9, generator=generator) < 0.6
    embeddings = head.weight[tokens] * head.embedding_scale
    found = apply_pins(scan, tokens, free, embeddings)
    assert 0 < free.sum() < free.numel()
    for name in ALIKE:
        assert torch.equal(getattr(found, name)[free], getattr(scan, name)[free]), name
    assert all(torch.equal(a[free], b[free]) for a, b in zip(found.top_k, scan.top_k, strict=True))
    assert torch.equal(found.argmax[~free], tokens[~free])
    assert torch.equal(found.sampled[~free], tokens[~free])
    assert torch.equal(found.soft[~free], embeddings[~free])
    assert not found.entropy[~free].any()
    # What is left of the distribution: all of its mass on one token.
    log_probs = found.top_k.logits - found.log_mass[..., None]
    assert torch.equal(found.top_k.tokens[~free][:, 0], tokens[~free])
    assert torch.equal(log_probs[~free].exp(), torch.tensor([1.0, 0, 0]).expand(int((~free).sum()), 3))
    assert not SurpriseScore()(found)[~free].any()


def test_fixing_changes_nothing_that_it_was_given() -> None:
    head, hidden = make(1, 6, 20, seed=3)
    scan = scan_vocab(hidden, head, torch.ones(1), keys(1, 1))
    before = [value.clone() for value in tensors_of(scan)]
    apply_pins(scan, torch.zeros(1, 6, dtype=torch.long), torch.zeros(1, 6, dtype=torch.bool), hidden)
    assert all(map(torch.equal, before, tensors_of(scan)))


def tensors_of(scan: VocabScan) -> list[Tensor]:
    values = [getattr(scan, field.name) for field in fields(VocabScan)]
    return [value for value in values if isinstance(value, Tensor)]


def test_the_soft_embedding_of_a_fixed_position_is_the_tokens_own_in_the_readings_dtype() -> None:
    flat = torch.zeros(1, 3)
    soft = torch.ones(1, 3, 4, dtype=torch.bfloat16)
    scan = VocabScan(flat.long(), flat.long(), flat, flat, flat, soft=soft)
    found = apply_pins(
        scan, flat.long(), torch.tensor([[True, False, True]]), torch.full((1, 3, 4), 1 / 3)
    ).soft
    assert found.dtype == torch.bfloat16
    assert torch.equal(found[0, 1], torch.full((4,), 1 / 3, dtype=torch.bfloat16))
    assert torch.equal(found[0, [0, 2]], soft[0, [0, 2]])


def test_what_was_not_read_is_not_made_up() -> None:
    flat = torch.zeros(1, 2)
    scan = VocabScan(flat.long(), flat.long(), flat, flat, flat)
    found = apply_pins(scan, flat.long(), torch.zeros(1, 2, dtype=torch.bool), torch.ones(1, 2, 4))
    assert found.soft is None
    assert found.top_k is None


def test_a_canvas_opens_with_what_is_given_and_noise_elsewhere() -> None:
    noise = torch.tensor([[10, 11, 12, 13, 14]])
    pinned = canvas_pins(PinnedTokens(fixed={6: 1, 3: 9}, begin={8: 2, 6: 7, 1: 5}), 5, 5, CPU)
    assert pinned.open(noise).tolist() == [[10, 1, 12, 2, 14]], "what is fixed comes before a beginning"
    assert pinned.free.tolist() == [True, False, True, True, True], "a beginning may change"
    first = canvas_pins(PinnedTokens(fixed={6: 1, 3: 9}, begin={8: 2, 6: 7, 1: 5}), 0, 5, CPU)
    assert first.open(noise).tolist() == [[10, 5, 12, 9, 14]]


def test_positions_are_shared_out_to_their_canvases() -> None:
    what = PinnedTokens(among={1: (4, 5), 7: (6,)}, watch={5: (3, 2), 9: (1,), 1: (8,)})
    for number, allowed, watched in (
        (0, [(1, [4, 5])], [(1, [8])]),
        (1, [(2, [6])], [(0, [3, 2]), (4, [1])]),
    ):
        found = canvas_pins(what, 5 * number, 5, CPU)
        assert flat_sets(found.allowed) == allowed
        assert flat_sets(found.watched) == watched
        assert found.free.all()
    assert canvas_pins(what, 10, 5, CPU).allowed is None
    assert canvas_pins(what, 10, 5, CPU).watched is None
    assert canvas_pins(None, 0, 5, CPU) is None


def flat_sets(allowed: AllowedTokens) -> list[tuple[int, list[int]]]:
    tokens = [tokens.tolist() for tokens in allowed.tokens]
    return list(zip(allowed.positions.tolist(), tokens, strict=True))


# A limited position


@given(
    vocab=st.sampled_from([7, 60, 1024, 1025, 2500]),
    temperature=st.sampled_from([0.05, 0.4, 0.8, 2.0]),
    cap=st.sampled_from([None, 3.0]),
    biased=st.booleans(),
    draws=st.booleans(),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=cases(150, 60), deadline=None, derandomize=True, database=None)
def test_a_limited_position_equals_an_fp64_dense_reference(
    vocab: int, temperature: float, cap: float | None, biased: bool, draws: bool, seed: int
) -> None:
    rows, canvas, row = 2, 8, seed % 2
    head, hidden = make(rows, canvas, vocab, seed, cap)
    key = keys(rows, seed) if draws else None
    heat = torch.full((rows,), temperature)
    scan = scan_vocab(hidden, head, heat, key, ScanOptions(num_top_k=4))
    allowed = some_sets(canvas, vocab, seed)
    bias = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed)) if biased else None
    found = apply_allowed_tokens(scan, row, hidden[row], head, heat[row : row + 1], key, allowed, bias)

    truth = head.scaled(hidden[row : row + 1], temperature)  # [1, canvas, vocab]
    if bias is not None:
        truth = truth + bias.double()[:, None]
    mask = torch.zeros(canvas, vocab, dtype=torch.bool)
    for position, tokens in zip(allowed.positions.tolist(), allowed.tokens, strict=True):
        mask[position, tokens] = True
    truth = torch.where(mask, truth, -math.inf)
    at = allowed.positions
    shares = truth[0, at].softmax(-1)
    assert torch.equal(found.argmax[row, at], truth[0, at].argmax(-1))
    # The reference reads the whole canvas, so that each position must have kept its own random numbers.
    sampled = sample_dense(truth, key.row(row))[0, at] if key is not None else found.argmax[row, at]
    assert torch.equal(found.sampled[row, at], sampled)
    assert mask[at, found.sampled[row, at]].all()
    torch.testing.assert_close(
        found.entropy[row, at].double(), torch.special.entr(shares).sum(-1), atol=2e-5, rtol=0
    )
    torch.testing.assert_close(
        found.log_mass[row, at].double(), truth[0, at].logsumexp(-1), atol=1e-4, rtol=1e-5
    )
    torch.testing.assert_close(found.top_logit[row, at].double(), truth[0, at].amax(-1), atol=1e-4, rtol=1e-5)
    mixed = shares @ head.weight.double() * head.embedding_scale
    torch.testing.assert_close(found.soft[row, at].double(), mixed, atol=2e-5, rtol=0)
    for position in at.tolist():
        best = truth[0, position].topk(4)
        inside = best.values.isfinite()
        assert torch.equal(found.top_k.tokens[row, position][inside], best.indices[inside])
        logits = found.top_k.logits[row, position]
        torch.testing.assert_close(logits.double(), best.values, atol=1e-4, rtol=1e-5)
    untouched = torch.ones(rows, canvas, dtype=torch.bool)
    untouched[row, at] = False
    for name in ALIKE:
        assert torch.equal(getattr(found, name)[untouched], getattr(scan, name)[untouched]), name
    assert torch.equal(found.top_k.tokens[untouched], scan.top_k.tokens[untouched])


@pytest.mark.parametrize("vocab", [30, 3000], ids=["one chunk", "three chunks"])
@pytest.mark.parametrize("some", [None, [0, 3, 4, 11]], ids=["everywhere", "somewhere"])
def test_a_set_of_all_tokens_draws_what_is_drawn_without_a_set(vocab: int, some: list[int] | None) -> None:
    canvas = 12
    positions = torch.arange(canvas) if some is None else torch.tensor(some)
    allowed = AllowedTokens(positions, (torch.arange(vocab),) * len(positions))
    for seed in range(20):
        head, hidden = make(1, canvas, vocab, seed, cap=30.0)
        heat, key = torch.tensor([0.7]), keys(1, seed)
        scan = scan_vocab(hidden, head, heat, key)
        found = apply_allowed_tokens(scan, 0, hidden[0], head, heat, key, allowed)
        assert torch.equal(found.sampled, scan.sampled)
        assert torch.equal(found.argmax, scan.argmax)
        torch.testing.assert_close(found.entropy, scan.entropy, atol=1e-5, rtol=0)
        torch.testing.assert_close(found.soft, scan.soft, atol=1e-5, rtol=0)


def test_a_set_of_one_token_is_a_point_mass() -> None:
    head, hidden = make(1, 4, 3000, seed=5)
    heat, key = torch.tensor([0.8]), keys(1, 5)
    scan = scan_vocab(hidden, head, heat, key)
    allowed = AllowedTokens(torch.tensor([0, 2]), (torch.tensor([2999]), torch.tensor([7])))
    found = apply_allowed_tokens(scan, 0, hidden[0], head, heat, key, allowed)
    point = apply_pins(
        scan,
        torch.tensor([[2999, 0, 7, 0]]),
        torch.tensor([[False, True, False, True]]),
        head.weight[torch.tensor([[2999, 0, 7, 0]])] * head.embedding_scale,
    )
    for name in ("argmax", "sampled", "entropy"):
        assert torch.equal(getattr(found, name), getattr(point, name)), name
    torch.testing.assert_close(found.soft, point.soft, atol=1e-6, rtol=0)
    assert torch.equal(SurpriseScore()(found)[0, [0, 2]], torch.zeros(2))


def test_where_no_other_token_would_have_been_faster_the_draw_stays() -> None:
    """In one chunk tokens race with clocks of their own: taking the slower ones away changes no winner."""
    kept = 0
    for seed in range(30):
        head, hidden = make(1, 8, 40, seed)
        heat, key = torch.ones(1), keys(1, seed)
        scan = scan_vocab(hidden, head, heat, key)
        allowed = AllowedTokens(torch.arange(8), (torch.arange(0, 40, 2),) * 8)
        found = apply_allowed_tokens(scan, 0, hidden[0], head, heat, key, allowed)
        inside = scan.sampled % 2 == 0
        assert torch.equal(found.sampled[inside], scan.sampled[inside])
        kept += int(inside.sum())
    assert 0 < kept < 240


@pytest.mark.parametrize("vocab", [500, 3000], ids=["one chunk", "three chunks"])
def test_draws_follow_the_distribution_among_the_tokens(vocab: int) -> None:
    canvas, seeds = 250, 20
    head, one = make(1, 1, vocab, seed=6)
    one = one / 3  # flat enough for every token to be met
    hidden = one.expand(1, canvas, HIDDEN).contiguous()
    tokens = torch.arange(3, vocab, vocab // 9)
    allowed = AllowedTokens(torch.arange(canvas), (tokens,) * canvas)
    heat = torch.ones(1)
    logits = head.scaled(one, 1.0)[0, 0, tokens]
    nothing = VocabScan(*(torch.zeros(1, canvas, dtype=torch.long),) * 2, *(torch.zeros(1, canvas),) * 3)
    counts = torch.zeros(vocab).double()
    for seed in range(seeds):
        sampled = apply_allowed_tokens(nothing, 0, hidden[0], head, heat, keys(1, seed), allowed).sampled
        counts += torch.bincount(sampled.flatten(), minlength=vocab)
    total = canvas * seeds
    assert counts[tokens].sum() == total
    assert abs(chi_square(counts[tokens], logits.softmax(-1) * total)) < 4
    # The test can fail: against a slightly hotter distribution it does.
    assert chi_square(counts[tokens], (logits / 1.3).softmax(-1) * total) > 4


def test_positions_in_parts_are_read_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden = make(1, 11, 70, seed=8)
    heat, key = torch.tensor([0.6]), keys(1, 9)
    scan = scan_vocab(hidden, head, heat, key)
    allowed = some_sets(11, 70, seed=8)
    watched = AllowedTokens(torch.arange(11), (torch.tensor([5, 3]),) * 11)
    whole = apply_allowed_tokens(scan, 0, hidden[0], head, heat, key, allowed)
    told = watched_log_probs(hidden[0], head, watched, allowed)
    monkeypatch.setattr(pins_module, "_MAX_LOGITS", 2 * 70 + 1)
    parts = apply_allowed_tokens(scan, 0, hidden[0], head, heat, key, allowed)
    assert torch.equal(whole.sampled, parts.sampled)
    assert torch.equal(whole.argmax, parts.argmax)
    torch.testing.assert_close(whole.entropy, parts.entropy, atol=1e-6, rtol=0)
    torch.testing.assert_close(whole.soft, parts.soft, atol=1e-6, rtol=0)
    again = watched_log_probs(hidden[0], head, watched, allowed)
    torch.testing.assert_close(again, told, atol=1e-5, rtol=0)
    assert not torch.equal(whole.argmax, scan.argmax), "the sets matter"


# What is watched


def test_watched_tokens_are_told_at_temperature_one() -> None:
    head, hidden = make(1, 6, 90, seed=10, cap=5.0)
    watched = AllowedTokens(torch.tensor([1, 4]), (torch.tensor([80, 2, 7]), torch.arange(90)))
    found = watched_log_probs(hidden[0], head, watched, None)
    truth = head.scaled(hidden[0], 1.0).log_softmax(-1)
    torch.testing.assert_close(found[0].double(), truth[1, [80, 2, 7]], atol=1e-5, rtol=0)
    torch.testing.assert_close(found[1].double(), truth[4], atol=1e-5, rtol=0)
    assert found[1].exp().sum().item() == pytest.approx(1, abs=1e-5)


def test_watched_tokens_of_a_set_sum_to_one_and_others_are_impossible() -> None:
    head, hidden = make(1, 6, 90, seed=11)
    allowed = AllowedTokens(torch.tensor([1, 4]), (torch.tensor([3, 30, 88]), torch.tensor([5])))
    watched = AllowedTokens(
        torch.tensor([1, 2, 4]), (torch.tensor([88, 4, 3, 30]), torch.tensor([3, 30]), torch.tensor([5, 6]))
    )
    inside, open_one, single = watched_log_probs(hidden[0], head, watched, allowed)
    truth = head.scaled(hidden[0], 1.0)
    among = truth[1, [88, 3, 30]].log_softmax(-1)
    torch.testing.assert_close(inside[[0, 2, 3]].double(), among, atol=1e-5, rtol=0)
    assert inside.exp().sum().item() == pytest.approx(1, abs=1e-6)
    assert inside[1] == -math.inf
    torch.testing.assert_close(open_one.double(), truth[2].log_softmax(-1)[[3, 30]], atol=1e-5, rtol=0)
    assert single.tolist() == [0.0, -math.inf]


# Many steps of many canvases

RULES = ("entropy_bound", "confidence", "fixed")


@dataclass(frozen=True)
class AcceptEverything:
    """A rule that forgot about fixed positions."""

    def __call__(self, uncertainty: Tensor, free: Tensor) -> Tensor:
        return torch.ones_like(free)


@dataclass(frozen=True)
class NoiseEverywhere:
    """So did this one."""

    def __call__(self, sampled: Tensor, accepted: Tensor, noise: Tensor) -> Tensor:
        return noise


def accepted_by(accept: Acceptance, uncertainty: list[float], free: list[bool]) -> set[int]:
    """The rule in plain tokens, for one row: positions by how sure they are."""
    order = sorted((at for at in range(len(free)) if free[at]), key=lambda at: uncertainty[at])
    if isinstance(accept, FixedCount):
        return set(order[: accept.count])
    if isinstance(accept, ConfidenceThreshold):
        return {at for at in order if uncertainty[at] <= accept.at_most} | set(order[:1])
    assert isinstance(accept, EntropyBound)
    kept: set[int] = set()
    total = 0.0
    for at in order:
        if total <= accept.bound:
            kept.add(at)
        total += uncertainty[at]
    return kept


class Row(NamedTuple):
    """What the plain reference keeps of a canvas."""

    canvas: list[int]
    argmax: list[int]
    unchanged: int
    steps: int
    settled: bool


def plain_step(
    row: Row, scan: dict[str, list], uncertainty: list, noise: list, sampler: Sampler, pins: dict[int, int]
) -> Row:
    """One row, position by position; a fixed one has nothing but its token."""
    if row.settled:
        return row
    free = [at not in pins for at in range(len(noise))]
    kept = accepted_by(sampler.accept, uncertainty, free)
    canvas = [
        pins[at] if at in pins else scan["sampled"][at] if at in kept else noise[at]
        for at in range(len(noise))
    ]
    argmax = [pins.get(at, scan["argmax"][at]) for at in range(len(noise))]
    unchanged = row.unchanged + 1 if row.steps and argmax == row.argmax else 0
    stop = sampler.stop
    assert isinstance(stop, StableAndConfident)
    entropies = [scan["entropy"][at] for at in range(len(noise)) if free[at]]
    sure = sum(entropies) / max(1, len(entropies)) < stop.confidence
    settled = (unchanged >= stop.stability and sure) or row.steps + 1 >= sampler.num_steps
    return Row(canvas, argmax, unchanged, row.steps + 1, settled)


def same_state(row: Row, state: CanvasState, number: int) -> None:
    assert state.canvas[number].tolist() == row.canvas
    assert state.argmax[number].tolist() == row.argmax
    found = (int(state.unchanged[number]), int(state.steps[number]), bool(state.settled[number]))
    assert found == row[2:]


@given(
    canvas=st.integers(1, 7),
    vocab=st.sampled_from([2, 3, 20]),
    rule=st.sampled_from(
        [
            EntropyBound(bound=0.0),
            EntropyBound(bound=20 / 64),
            EntropyBound(bound=9.0),
            ConfidenceThreshold(at_most=0.0),
            ConfidenceThreshold(at_most=20 / 64),
            FixedCount(count=1),
            FixedCount(count=3),
            FixedCount(count=99),
        ]
    ),
    stability=st.integers(0, 2),
    share=st.sampled_from([0.2, 0.5, 0.8, 1.0]),
    knows=st.booleans(),
    seed=st.integers(0, 10**9),
)
@settings(max_examples=cases(450, 150), deadline=None, derandomize=True, database=None)
def test_a_pinned_position_never_changes_and_free_ones_do_what_the_rule_says(
    canvas: int, vocab: int, rule: Acceptance, stability: int, share: float, knows: bool, seed: int
) -> None:
    """knows: whether the reading has a point mass at each pin. A step keeps them also where it has none."""
    rows = 20
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (rows, canvas), generator=generator)
    free = torch.rand(rows, canvas, generator=generator) > share * torch.rand(rows, 1, generator=generator)
    sampler = Sampler(
        num_steps=6, accept=rule, stop=StableAndConfident(stability=stability, confidence=16 / 64)
    )
    noise = torch.randint(vocab, (rows, canvas), generator=generator)
    state = open_canvas(torch.where(free, noise, tokens))
    pins = [
        {at: int(tokens[number, at]) for at in range(canvas) if not free[number, at]}
        for number in range(rows)
    ]
    references = [Row(state.canvas[n].tolist(), state.argmax[n].tolist(), 0, 0, False) for n in range(rows)]
    argmax = torch.randint(vocab, (rows, canvas), generator=generator)
    for _ in range(5):
        # In steps of 1/64 sums are exact, and no two of a row are equal: nothing hangs on a last bit.
        order = torch.rand(rows, 40, generator=generator).argsort(-1)[:, :canvas]
        moves = torch.rand(rows, canvas, generator=generator) < 0.1
        other = torch.randint(vocab, (2, rows, canvas), generator=generator)
        argmax = torch.where(moves, other[0], argmax)
        entropy = order / 64
        scan = VocabScan(
            argmax, other[1], entropy, log_mass=entropy + 2.0, top_logit=torch.full_like(entropy, 2.0)
        )
        fixed = apply_pins(scan, state.canvas, free, torch.zeros(rows, canvas, 1))
        noise = torch.randint(vocab, (rows, canvas), generator=generator)
        state = step(state, fixed if knows else scan, noise, sampler, free)
        for number in range(rows):
            plain = {name: getattr(scan, name)[number].tolist() for name in ("argmax", "sampled", "entropy")}
            references[number] = plain_step(
                references[number], plain, plain["entropy"], noise[number].tolist(), sampler, pins[number]
            )
            same_state(references[number], state, number)
    assert torch.equal(state.canvas[~free], tokens[~free])
    assert torch.equal(state.argmax[~free], tokens[~free])


@pytest.mark.parametrize("renoise", [UniformRenoise(), NoiseEverywhere()], ids=lambda r: type(r).__name__)
def test_parts_that_forget_about_pins_cannot_move_them(renoise: Renoise) -> None:
    generator = torch.Generator().manual_seed(1)
    free = torch.rand(30, 8, generator=generator) < 0.5
    first = torch.randint(9, (30, 8), generator=generator)
    state = open_canvas(first)
    sampler = Sampler(accept=AcceptEverything(), renoise=renoise)
    for _ in range(5):
        sampled, noise = torch.randint(9, (2, 30, 8), generator=generator)
        uncertainty = torch.rand(30, 8, generator=generator)
        state = step(
            state, VocabScan(sampled, sampled, uncertainty, uncertainty, uncertainty), noise, sampler, free
        )
    assert torch.equal(state.canvas[~free], first[~free])
    assert torch.equal(state.argmax[~free], first[~free])
    assert (state.canvas[free] != first[free]).any()


# Behind a real head


@cache
def stack() -> Transformer:
    return tiny_models()[None].transformer.with_lengths(canvas_len=6).with_execution(Execution())


def rows_given(rows: int, canvas: int, vocab: int, generator: torch.Generator) -> list[PinnedTokens | None]:
    """Nothing, fixed tokens, sets or both, in each of several ways."""
    found: list[PinnedTokens | None] = []
    for number in range(rows):
        kinds = torch.randint(4, (canvas,), generator=generator).tolist()
        kinds = [1 if number % 5 == 4 else kind for kind in kinds]  # now and then everything is fixed
        tokens = torch.randint(vocab, (canvas, 3), generator=generator).tolist()
        fixed = {at: tokens[at][0] for at in range(canvas) if kinds[at] == 1}
        among = {at: tuple(sorted(set(tokens[at]))) for at in range(canvas) if kinds[at] == 2}
        found.append(None if number % 5 == 0 else PinnedTokens(fixed=fixed, among=among))
    return found


@given(
    rule=st.sampled_from(RULES),
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
    logprobs=st.sampled_from([None, 2]),
    seed=st.integers(0, 10**9),
)
@settings(max_examples=cases(50, 20), deadline=None, derandomize=True, database=None)
def test_refining_moves_no_pin_and_leaves_no_set(
    rule: str, temperature: float, logprobs: int | None, seed: int
) -> None:
    rows, canvas, vocab = 20, 6, stack().config.vocab_size
    generator = torch.Generator().manual_seed(seed)
    params = GenerationParams(
        acceptance=rule,  # type: ignore[arg-type]
        temperature=temperature,
        logprobs=logprobs,
        max_denoising_steps=2,
    )
    rules: dict[str, Acceptance] = {
        "entropy_bound": EntropyBound(bound=2.0),
        "confidence": ConfidenceThreshold(at_most=2.0),
        "fixed": FixedCount(count=2),
    }
    score = SurpriseScore() if rule == "confidence" else EntropyScore()
    sampler = Sampler(num_steps=2, accept=rules[rule], score=score)
    what = rows_given(rows, canvas, vocab, generator)
    pins = [canvas_pins(one, 0, canvas, CPU) for one in what]
    noise = torch.randint(vocab, (rows, canvas), generator=generator)
    opened = [own if one is None else one.open(own) for own, one in zip(noise, pins, strict=True)]
    state = open_canvas(torch.stack(opened))
    references = [Row(one.tolist(), one.tolist(), 0, 0, False) for one in opened]
    fixed = [{} if one is None else one.fixed for one in what]
    for number in range(2):
        key = noise_key(range(seed, seed + rows), [0] * rows, [number] * rows, CPU)
        hidden = torch.randn(rows, canvas, stack().config.hidden_size, generator=generator)
        after, scan = sample_step(stack(), state, hidden, key, sampler, params, None, pins)
        heat = sampler.schedule((2 - state.steps).to(torch.int32), 2)
        bare = scan_rows(stack(), hidden, heat, key if temperature else None, params)
        renoised = random_tokens(key, NoiseStream.RENOISE, canvas, vocab)
        uncertainty = score(scan)
        for row in range(rows):
            plain = {n: getattr(scan, n)[row].tolist() for n in ("argmax", "sampled", "entropy")}
            references[row] = plain_step(
                references[row], plain, uncertainty[row].tolist(), renoised[row].tolist(), sampler, fixed[row]
            )
            same_state(references[row], after, row)
        check_reading(scan, bare, state.canvas, what)
        state = after


def check_reading(scan: VocabScan, bare: VocabScan, canvas: Tensor, what: list[PinnedTokens | None]) -> None:
    """A point mass where a token is fixed, a token of the set where there is one, else as without pins."""
    fixed, among = torch.zeros_like(canvas, dtype=torch.bool), torch.zeros_like(canvas, dtype=torch.bool)
    for row, one in enumerate(what):
        for at, token in ({} if one is None else one.fixed).items():
            fixed[row, at] = True
            assert int(canvas[row, at]) == token
        for at, tokens in ({} if one is None else one.among).items():
            among[row, at] = True
            assert int(scan.argmax[row, at]) in tokens
            assert int(scan.sampled[row, at]) in tokens
            assert float(scan.entropy[row, at]) <= math.log(len(tokens)) + 1e-5
    assert torch.equal(scan.argmax[fixed], canvas[fixed])
    assert torch.equal(scan.sampled[fixed], canvas[fixed])
    assert not scan.entropy[fixed].any()
    assert torch.equal(scan.soft[fixed], stack().embed(canvas[fixed]))
    free = ~(fixed | among)
    for name in ALIKE:
        assert torch.equal(getattr(scan, name)[free], getattr(bare, name)[free]), name
    if bare.top_k is not None:
        both = zip(scan.top_k, bare.top_k, strict=True)
        assert all(torch.equal(found[free], alone[free]) for found, alone in both)


@pytest.mark.parametrize("rule", [EntropyBound(), ConfidenceThreshold(at_most=0.01), FixedCount(count=1)])
def test_three_unsure_positions_keep_a_canvas_of_sixty_sure_pinned_ones_open(rule: Acceptance) -> None:
    canvas, open_ones = 63, [4, 30, 62]
    free = torch.zeros(1, canvas, dtype=torch.bool)
    free[0, open_ones] = True
    tokens = torch.arange(canvas)[None]
    sampler = Sampler(num_steps=40, accept=rule, stop=StableAndConfident(stability=1, confidence=0.005))

    def scan(uncertainty: float) -> VocabScan:
        entropy = torch.full((1, canvas), uncertainty)
        argmax = torch.full((1, canvas), 77)
        return apply_pins(
            VocabScan(argmax, argmax, entropy, entropy + 1, torch.ones(1, canvas)), tokens, free,
            torch.zeros(1, canvas, 1),
        )  # fmt: skip

    uncertainty = 0.1
    assert float(scan(uncertainty).entropy.mean()) < 0.005, "counted among all, they would not be seen"
    state = open_canvas(torch.where(free, 5, tokens))
    for _ in range(10):
        state = step(state, scan(uncertainty), torch.full((1, canvas), 88), sampler, free)
        assert not bool(state.settled)
    state = step(state, scan(0.004), torch.full((1, canvas), 88), sampler, free)
    assert bool(state.settled)
    assert int(state.steps) == 11
    assert state.argmax[0].tolist() == [77 if at in open_ones else at for at in range(canvas)]


def test_a_guess_that_moves_keeps_a_canvas_open_and_one_that_would_move_under_a_pin_does_not() -> None:
    free = torch.tensor([[True, False, False]])
    sampler = Sampler(num_steps=40, stop=StableAndConfident(stability=1, confidence=0.5))
    state = open_canvas(torch.tensor([[0, 1, 2]]))
    for number, settled in ((0, False), (1, False), (2, False), (2, True)):
        # Under the pins the model changes its mind at every step, and is unsure.
        argmax = torch.tensor([[number, 50 + int(state.steps), 60 + int(state.steps)]])
        entropy = torch.tensor([[0.1, 9.0, 9.0]])
        scan = apply_pins(
            VocabScan(argmax, argmax, entropy, entropy, entropy), state.canvas, free, torch.zeros(1, 3, 1)
        )
        state = step(state, scan, torch.tensor([[7, 8, 9]]), sampler, free)
        assert bool(state.settled) is settled
    assert state.argmax.tolist() == [[2, 1, 2]]


def test_a_row_without_pins_is_not_touched_by_rows_with_them() -> None:
    vocab = stack().config.vocab_size
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(3, 6, stack().config.hidden_size, generator=generator)
    state = open_canvas(torch.randint(vocab, (3, 6), generator=generator))
    key = noise_key([1, 2, 3], [0] * 3, [0] * 3, CPU)
    sampler, params = Sampler(num_steps=5), GenerationParams(logprobs=3)
    alone, bare = sample_step(stack(), state, hidden, key, sampler, params)
    none = canvas_pins(PinnedTokens(), 0, 6, CPU)
    pinned = canvas_pins(PinnedTokens(fixed={0: 3, 1: 4, 5: 6}, among={2: (5, 6, 7)}), 0, 6, CPU)
    for company in ([None, pinned, pinned], [none, pinned, None]):
        together, scan = sample_step(stack(), state, hidden, key, sampler, params, None, company)
        for name in ALIKE:
            assert torch.equal(getattr(scan, name)[0], getattr(bare, name)[0]), name
        for field in fields(CanvasState):
            assert torch.equal(getattr(together, field.name)[0], getattr(alone, field.name)[0]), field.name
        assert not torch.equal(scan.argmax[1], bare.argmax[1])


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_known_positions_are_not_scanned_and_the_others_read_the_same(
    exact: bool, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab, own = stack().config.vocab_size, stack().with_execution(Execution(exact=exact))
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(3, 6, own.config.hidden_size, generator=generator)
    state = open_canvas(torch.randint(vocab, (3, 6), generator=generator))
    key = noise_key([1, 2, 3], [0] * 3, [0] * 3, CPU)
    sampler, params = Sampler(num_steps=5), GenerationParams(logprobs=3, top_p=0.9, temperature=temperature)
    given = (
        PinnedTokens(fixed={0: 3, 1: 4, 5: 6}, among={2: (5, 6, 7)}),
        PinnedTokens(fixed={0: 3, 2: 9}),
        PinnedTokens(fixed=dict.fromkeys(range(6), 8)),
    )
    pins = [canvas_pins(one, 0, 6, CPU) for one in given]
    scanned: list[int] = []
    scan_vocab = model_runner.scan_vocab

    def counted(hidden: torch.Tensor, *args: Any, **options: Any) -> VocabScan:
        scanned.append(hidden.shape[0] * hidden.shape[1])
        return scan_vocab(hidden, *args, **options)

    monkeypatch.setattr(model_runner, "scan_vocab", counted)
    after, found = sample_step(own, state, hidden, key, sampler, params, None, pins)
    # Twice, because of top-p. Alone, a canvas knows 4, 2 and all of its positions; together they know two.
    assert scanned == ([2, 2, 4, 4, 1, 1] if exact else [12, 12])
    blind = [replace(one, known=frozenset()) for one in pins if one is not None]
    whole, expected = sample_step(own, state, hidden, key, sampler, params, None, blind)
    assert max(scanned) == (6 if exact else 18)
    for name in ("argmax", "sampled"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for name in ("entropy", "log_mass", "top_logit", "soft"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), atol=1e-5, rtol=1e-5)
    assert found.top_k is not None
    assert expected.top_k is not None
    assert torch.equal(found.top_k.tokens[:, 3:5], expected.top_k.tokens[:, 3:5])
    for field in fields(CanvasState):
        assert torch.equal(getattr(after, field.name), getattr(whole, field.name)), field.name


def test_a_bias_counts_among_the_tokens_of_a_set() -> None:
    """As far as without a set: it is a number added to the logit, before the temperature."""
    vocab = stack().config.vocab_size
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(1, 6, stack().config.hidden_size, generator=generator)
    state = open_canvas(torch.zeros(1, 6, dtype=torch.long))
    bias = torch.zeros(1, vocab)
    bias[0, 9] = 3.0
    tokens = (5, 9, 200)
    pins = [canvas_pins(PinnedTokens(among={2: tokens}), 0, 6, CPU)]
    key = noise_key([1], [0], [0], CPU)
    sampler = Sampler(num_steps=5)
    _, found = sample_step(stack(), state, hidden, key, sampler, GenerationParams(logprobs=3), bias, pins)
    logits = stack().logits(hidden)[0, 2, list(tokens)] + torch.tensor([0.0, 3.0, 0.0])
    truth = (logits / 0.8).log_softmax(-1).sort(descending=True)
    assert isinstance(found.top_k, TopK)
    assert found.top_k.tokens[0, 2].tolist() == [tokens[at] for at in truth.indices]
    log_probs = found.top_k.logits[0, 2] - found.log_mass[0, 2]
    torch.testing.assert_close(log_probs, truth.values, atol=1e-5, rtol=0)


def test_pins_of_a_canvas_can_be_replaced_between_two_steps() -> None:
    """They are the caller's: a position that becomes free again is guessed from then on."""
    vocab = stack().config.vocab_size
    generator = torch.Generator().manual_seed(6)
    pinned = CanvasPins(
        tokens=torch.arange(6), begins=torch.ones(6, dtype=torch.bool), free=torch.zeros(6, dtype=torch.bool)
    )
    loose = replace(pinned, free=torch.ones(6, dtype=torch.bool))
    state = open_canvas(pinned.open(torch.randint(vocab, (1, 6), generator=generator)))
    hidden = torch.randn(1, 6, stack().config.hidden_size, generator=generator)
    sampler = Sampler(num_steps=9)
    for number, one in enumerate((pinned, loose)):
        key = noise_key([1], [0], [number], CPU)
        before = state.canvas
        state, scan = sample_step(stack(), state, hidden, key, sampler, GenerationParams(), None, [one])
        assert torch.equal(state.canvas, before) is (one is pinned)
    assert torch.equal(state.argmax, scan.argmax)


def test_a_vocabulary_larger_than_the_buffer_is_read_one_position_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, hidden = make(1, 6, 70, seed=4)
    allowed, heat, key = some_sets(6, 70, seed=5), torch.tensor([0.7]), keys(1, 3)
    scan = scan_vocab(hidden, head, heat, key)

    def read() -> tuple[VocabScan, list[Tensor]]:
        found = apply_allowed_tokens(scan, 0, hidden[0], head, heat, key, allowed)
        return found, watched_log_probs(hidden[0], head, allowed, allowed)

    whole, watched = read()
    monkeypatch.setattr(pins_module, "_MAX_LOGITS", 1)
    alone, watched_alone = read()
    for name in ("argmax", "sampled"):
        assert torch.equal(getattr(alone, name), getattr(whole, name)), name
    torch.testing.assert_close(alone.entropy, whole.entropy)
    torch.testing.assert_close(watched_alone, watched)
