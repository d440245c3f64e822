"""Positions that are given: a fixed one never moves, a limited one is read exactly, and neither is counted.

Ten thousand random canvases: 450 examples of 20 rows on made-up readings, 50 of 20 behind a real head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from chi_square import chi_square
from dgemma.diffusion import pins as pins_module
from dgemma.diffusion.acceptance import (
    Acceptance,
    ConfidenceThreshold,
    EntropyBound,
    EntropyScore,
    FixedCount,
    SurpriseScore,
)
from dgemma.diffusion.noise import Place, Use, place_at, random_tokens
from dgemma.diffusion.pins import CanvasPins, Limited, fix, limit, watched_log_probs
from dgemma.diffusion.reading import Likeliest, Reading, draw_dense
from dgemma.diffusion.step import CanvasState, Renoise, Sampler, UniformRenoise, open_canvas, step
from dgemma.diffusion.stopping import StableAndConfident
from dgemma.diffusion.walk import Wishes, walk
from dgemma.generation.parts import pins_of, read_vocabulary, refine
from dgemma.given import Given
from dgemma.model.execution import Execution
from dgemma.model.stack import Stack
from dgemma.params import GenerationParams
from engine_life import tiny_models

CPU = torch.device("cpu")
HIDDEN = 6
ALIKE = ("guess", "drawn", "entropy", "log_mass", "top_logit", "soft")


@dataclass
class SmallVocabulary:
    weight: Tensor  # [vocab, hidden]
    logit_cap: float | None = None
    embedding_scale: float = 1.0

    @property
    def vocab_size(self) -> int:
        return len(self.weight)

    def products(self, hidden: Tensor, words: slice) -> Tensor:
        return hidden @ self.weight[words].T

    def mix(self, shares: Tensor, words: slice) -> Tensor:
        return shares @ self.weight[words]

    def scaled(self, hidden: Tensor, temperature: float) -> Tensor:
        """The plain twin's logits [..., vocab], in fp64."""
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


def places(rows: int, seed: int, step_number: int = 3) -> Place:
    return place_at(range(seed, seed + rows), [1] * rows, [step_number] * rows, CPU)


def some_sets(canvas: int, vocab: int, seed: int, sizes: tuple[int, ...] = (1, 2, 5, 40)) -> Limited:
    """About half of the positions, each with words of its own."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randperm(canvas, generator=generator)[: max(1, canvas // 2)].sort().values
    words = [
        torch.randperm(vocab, generator=generator)[: min(vocab, sizes[number % len(sizes)])].sort().values
        for number in range(len(positions))
    ]
    return Limited(positions, tuple(words))


# A fixed position


def test_a_fixed_position_is_a_point_mass_and_the_others_keep_their_bits() -> None:
    vocabulary, hidden = make(2, 9, 50, seed=1)
    reading = walk(hidden, vocabulary, torch.tensor([0.7, 0.4]), places(2, 1), Wishes(num_likeliest=3))
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(50, (2, 9), generator=generator)
    free = torch.rand(2, 9, generator=generator) < 0.6
    embeddings = vocabulary.weight[tokens] * vocabulary.embedding_scale
    found = fix(reading, tokens, free, embeddings)
    assert 0 < free.sum() < free.numel()
    for name in ALIKE:
        assert torch.equal(getattr(found, name)[free], getattr(reading, name)[free]), name
    assert all(torch.equal(a[free], b[free]) for a, b in zip(found.likeliest, reading.likeliest, strict=True))
    assert torch.equal(found.guess[~free], tokens[~free])
    assert torch.equal(found.drawn[~free], tokens[~free])
    assert torch.equal(found.soft[~free], embeddings[~free])
    assert not found.entropy[~free].any()
    # What is left of the distribution: all of its mass on one word.
    log_probs = found.likeliest.logits - found.log_mass[..., None]
    assert torch.equal(found.likeliest.words[~free][:, 0], tokens[~free])
    assert torch.equal(log_probs[~free].exp(), torch.tensor([1.0, 0, 0]).expand(int((~free).sum()), 3))
    assert not SurpriseScore()(found)[~free].any()


def test_fixing_changes_nothing_that_it_was_given() -> None:
    vocabulary, hidden = make(1, 6, 20, seed=3)
    reading = walk(hidden, vocabulary, torch.ones(1), places(1, 1))
    before = [value.clone() for value in tensors_of(reading)]
    fix(reading, torch.zeros(1, 6, dtype=torch.long), torch.zeros(1, 6, dtype=torch.bool), hidden)
    assert all(map(torch.equal, before, tensors_of(reading)))


def tensors_of(reading: Reading) -> list[Tensor]:
    values = [getattr(reading, field.name) for field in fields(Reading)]
    return [value for value in values if isinstance(value, Tensor)]


def test_the_soft_embedding_of_a_fixed_position_is_the_tokens_own_in_the_readings_dtype() -> None:
    flat = torch.zeros(1, 3)
    soft = torch.ones(1, 3, 4, dtype=torch.bfloat16)
    reading = Reading(flat.long(), flat.long(), flat, flat, flat, soft=soft)
    found = fix(reading, flat.long(), torch.tensor([[True, False, True]]), torch.full((1, 3, 4), 1 / 3)).soft
    assert found.dtype == torch.bfloat16
    assert torch.equal(found[0, 1], torch.full((4,), 1 / 3, dtype=torch.bfloat16))
    assert torch.equal(found[0, [0, 2]], soft[0, [0, 2]])


def test_what_was_not_read_is_not_made_up() -> None:
    flat = torch.zeros(1, 2)
    reading = Reading(flat.long(), flat.long(), flat, flat, flat)
    found = fix(reading, flat.long(), torch.zeros(1, 2, dtype=torch.bool), torch.ones(1, 2, 4))
    assert found.soft is None
    assert found.likeliest is None


def test_a_canvas_opens_with_what_is_given_and_noise_elsewhere() -> None:
    noise = torch.tensor([[10, 11, 12, 13, 14]])
    pinned = pins_of(Given(fixed={6: 1, 3: 9}, begin={8: 2, 6: 7, 1: 5}), 1, 5, CPU)
    assert pinned.open(noise).tolist() == [[10, 1, 12, 2, 14]], "what is fixed comes before a beginning"
    assert pinned.free.tolist() == [True, False, True, True, True], "a beginning may change"
    first = pins_of(Given(fixed={6: 1, 3: 9}, begin={8: 2, 6: 7, 1: 5}), 0, 5, CPU)
    assert first.open(noise).tolist() == [[10, 5, 12, 9, 14]]


def test_positions_are_shared_out_to_their_canvases() -> None:
    what = Given(among={1: (4, 5), 7: (6,)}, watch={5: (3, 2), 9: (1,), 1: (8,)})
    for number, limited, watched in (
        (0, [(1, [4, 5])], [(1, [8])]),
        (1, [(2, [6])], [(0, [3, 2]), (4, [1])]),
    ):
        found = pins_of(what, number, 5, CPU)
        assert flat_sets(found.limited) == limited
        assert flat_sets(found.watched) == watched
        assert found.free.all()
    assert pins_of(what, 2, 5, CPU).limited is None
    assert pins_of(what, 2, 5, CPU).watched is None
    assert pins_of(None, 0, 5, CPU) is None


def flat_sets(limited: Limited) -> list[tuple[int, list[int]]]:
    words = [words.tolist() for words in limited.words]
    return list(zip(limited.positions.tolist(), words, strict=True))


# A limited position


@given(
    vocab=st.sampled_from([7, 60, 1024, 1025, 2500]),
    temperature=st.sampled_from([0.05, 0.4, 0.8, 2.0]),
    cap=st.sampled_from([None, 3.0]),
    biased=st.booleans(),
    draws=st.booleans(),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_a_limited_position_equals_an_fp64_dense_twin(
    vocab: int, temperature: float, cap: float | None, biased: bool, draws: bool, seed: int
) -> None:
    rows, canvas, row = 2, 8, seed % 2
    vocabulary, hidden = make(rows, canvas, vocab, seed, cap)
    place = places(rows, seed) if draws else None
    heat = torch.full((rows,), temperature)
    reading = walk(hidden, vocabulary, heat, place, Wishes(num_likeliest=4))
    limited = some_sets(canvas, vocab, seed)
    bias = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed)) if biased else None
    found = limit(reading, row, hidden[row], vocabulary, heat[row : row + 1], place, limited, bias)

    truth = vocabulary.scaled(hidden[row : row + 1], temperature)  # [1, canvas, vocab]
    if bias is not None:
        truth = truth + bias.double()[:, None]
    allowed = torch.zeros(canvas, vocab, dtype=torch.bool)
    for position, words in zip(limited.positions.tolist(), limited.words, strict=True):
        allowed[position, words] = True
    truth = torch.where(allowed, truth, -math.inf)
    at = limited.positions
    shares = truth[0, at].softmax(-1)
    assert torch.equal(found.guess[row, at], truth[0, at].argmax(-1))
    # The twin reads the whole canvas, so that each position must have kept its own random numbers.
    drawn = draw_dense(truth, place.row(row))[0, at] if place is not None else found.guess[row, at]
    assert torch.equal(found.drawn[row, at], drawn)
    assert allowed[at, found.drawn[row, at]].all()
    torch.testing.assert_close(
        found.entropy[row, at].double(), torch.special.entr(shares).sum(-1), atol=2e-5, rtol=0
    )
    torch.testing.assert_close(
        found.log_mass[row, at].double(), truth[0, at].logsumexp(-1), atol=1e-4, rtol=1e-5
    )
    torch.testing.assert_close(found.top_logit[row, at].double(), truth[0, at].amax(-1), atol=1e-4, rtol=1e-5)
    mixed = shares @ vocabulary.weight.double() * vocabulary.embedding_scale
    torch.testing.assert_close(found.soft[row, at].double(), mixed, atol=2e-5, rtol=0)
    for position in at.tolist():
        best = truth[0, position].topk(4)
        inside = best.values.isfinite()
        assert torch.equal(found.likeliest.words[row, position][inside], best.indices[inside])
        logits = found.likeliest.logits[row, position]
        torch.testing.assert_close(logits.double(), best.values, atol=1e-4, rtol=1e-5)
    untouched = torch.ones(rows, canvas, dtype=torch.bool)
    untouched[row, at] = False
    for name in ALIKE:
        assert torch.equal(getattr(found, name)[untouched], getattr(reading, name)[untouched]), name
    assert torch.equal(found.likeliest.words[untouched], reading.likeliest.words[untouched])


@pytest.mark.parametrize("vocab", [30, 3000], ids=["one chunk", "three chunks"])
@pytest.mark.parametrize("some", [None, [0, 3, 4, 11]], ids=["everywhere", "somewhere"])
def test_a_set_of_all_words_draws_what_is_drawn_without_a_set(vocab: int, some: list[int] | None) -> None:
    canvas = 12
    positions = torch.arange(canvas) if some is None else torch.tensor(some)
    limited = Limited(positions, (torch.arange(vocab),) * len(positions))
    for seed in range(20):
        vocabulary, hidden = make(1, canvas, vocab, seed, cap=30.0)
        heat, place = torch.tensor([0.7]), places(1, seed)
        reading = walk(hidden, vocabulary, heat, place)
        found = limit(reading, 0, hidden[0], vocabulary, heat, place, limited)
        assert torch.equal(found.drawn, reading.drawn)
        assert torch.equal(found.guess, reading.guess)
        torch.testing.assert_close(found.entropy, reading.entropy, atol=1e-5, rtol=0)
        torch.testing.assert_close(found.soft, reading.soft, atol=1e-5, rtol=0)


def test_a_set_of_one_word_is_a_point_mass() -> None:
    vocabulary, hidden = make(1, 4, 3000, seed=5)
    heat, place = torch.tensor([0.8]), places(1, 5)
    reading = walk(hidden, vocabulary, heat, place)
    limited = Limited(torch.tensor([0, 2]), (torch.tensor([2999]), torch.tensor([7])))
    found = limit(reading, 0, hidden[0], vocabulary, heat, place, limited)
    point = fix(
        reading,
        torch.tensor([[2999, 0, 7, 0]]),
        torch.tensor([[False, True, False, True]]),
        vocabulary.weight[torch.tensor([[2999, 0, 7, 0]])] * vocabulary.embedding_scale,
    )
    for name in ("guess", "drawn", "entropy"):
        assert torch.equal(getattr(found, name), getattr(point, name)), name
    torch.testing.assert_close(found.soft, point.soft, atol=1e-6, rtol=0)
    assert torch.equal(SurpriseScore()(found)[0, [0, 2]], torch.zeros(2))


def test_where_no_other_word_would_have_been_faster_the_draw_stays() -> None:
    """In one chunk words race with clocks of their own: taking the slower ones away changes no winner."""
    kept = 0
    for seed in range(30):
        vocabulary, hidden = make(1, 8, 40, seed)
        heat, place = torch.ones(1), places(1, seed)
        reading = walk(hidden, vocabulary, heat, place)
        limited = Limited(torch.arange(8), (torch.arange(0, 40, 2),) * 8)
        found = limit(reading, 0, hidden[0], vocabulary, heat, place, limited)
        inside = reading.drawn % 2 == 0
        assert torch.equal(found.drawn[inside], reading.drawn[inside])
        kept += int(inside.sum())
    assert 0 < kept < 240


@pytest.mark.parametrize("vocab", [500, 3000], ids=["one chunk", "three chunks"])
def test_draws_follow_the_distribution_among_the_words(vocab: int) -> None:
    canvas, seeds = 250, 20
    vocabulary, one = make(1, 1, vocab, seed=6)
    one = one / 3  # flat enough for every word to be met
    hidden = one.expand(1, canvas, HIDDEN).contiguous()
    words = torch.arange(3, vocab, vocab // 9)
    limited = Limited(torch.arange(canvas), (words,) * canvas)
    heat = torch.ones(1)
    logits = vocabulary.scaled(one, 1.0)[0, 0, words]
    nothing = Reading(*(torch.zeros(1, canvas, dtype=torch.long),) * 2, *(torch.zeros(1, canvas),) * 3)
    counts = torch.zeros(vocab).double()
    for seed in range(seeds):
        drawn = limit(nothing, 0, hidden[0], vocabulary, heat, places(1, seed), limited).drawn
        counts += torch.bincount(drawn.flatten(), minlength=vocab)
    total = canvas * seeds
    assert counts[words].sum() == total
    assert abs(chi_square(counts[words], logits.softmax(-1) * total)) < 4
    # The test can fail: against a slightly hotter distribution it does.
    assert chi_square(counts[words], (logits / 1.3).softmax(-1) * total) > 4


def test_positions_in_parts_are_read_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, hidden = make(1, 11, 70, seed=8)
    heat, place = torch.tensor([0.6]), places(1, 9)
    reading = walk(hidden, vocabulary, heat, place)
    limited = some_sets(11, 70, seed=8)
    watched = Limited(torch.arange(11), (torch.tensor([5, 3]),) * 11)
    whole = limit(reading, 0, hidden[0], vocabulary, heat, place, limited)
    told = watched_log_probs(hidden[0], vocabulary, watched, limited)
    monkeypatch.setattr(pins_module, "_MOST_LOGITS", 2 * 70 + 1)
    parts = limit(reading, 0, hidden[0], vocabulary, heat, place, limited)
    assert torch.equal(whole.drawn, parts.drawn)
    assert torch.equal(whole.guess, parts.guess)
    torch.testing.assert_close(whole.entropy, parts.entropy, atol=1e-6, rtol=0)
    torch.testing.assert_close(whole.soft, parts.soft, atol=1e-6, rtol=0)
    again = watched_log_probs(hidden[0], vocabulary, watched, limited)
    torch.testing.assert_close(again, told, atol=1e-5, rtol=0)
    assert not torch.equal(whole.guess, reading.guess), "the sets matter"


# What is watched


def test_watched_words_are_told_at_temperature_one() -> None:
    vocabulary, hidden = make(1, 6, 90, seed=10, cap=5.0)
    watched = Limited(torch.tensor([1, 4]), (torch.tensor([80, 2, 7]), torch.arange(90)))
    found = watched_log_probs(hidden[0], vocabulary, watched, None)
    truth = vocabulary.scaled(hidden[0], 1.0).log_softmax(-1)
    torch.testing.assert_close(found[0].double(), truth[1, [80, 2, 7]], atol=1e-5, rtol=0)
    torch.testing.assert_close(found[1].double(), truth[4], atol=1e-5, rtol=0)
    assert found[1].exp().sum().item() == pytest.approx(1, abs=1e-5)


def test_watched_words_of_a_set_sum_to_one_and_others_are_impossible() -> None:
    vocabulary, hidden = make(1, 6, 90, seed=11)
    allowed = Limited(torch.tensor([1, 4]), (torch.tensor([3, 30, 88]), torch.tensor([5])))
    watched = Limited(
        torch.tensor([1, 2, 4]), (torch.tensor([88, 4, 3, 30]), torch.tensor([3, 30]), torch.tensor([5, 6]))
    )
    inside, open_one, single = watched_log_probs(hidden[0], vocabulary, watched, allowed)
    truth = vocabulary.scaled(hidden[0], 1.0)
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

    def __call__(self, unsure: Tensor, free: Tensor) -> Tensor:
        return torch.ones_like(free)


@dataclass(frozen=True)
class NoiseEverywhere:
    """So did this one."""

    def __call__(self, drawn: Tensor, accepted: Tensor, noise: Tensor) -> Tensor:
        return noise


def accepted_by(accept: Acceptance, unsure: list[float], free: list[bool]) -> set[int]:
    """The rule in plain words, for one row: positions by how sure they are."""
    order = sorted((at for at in range(len(free)) if free[at]), key=lambda at: unsure[at])
    if isinstance(accept, FixedCount):
        return set(order[: accept.count])
    if isinstance(accept, ConfidenceThreshold):
        return {at for at in order if unsure[at] <= accept.at_most} | set(order[:1])
    assert isinstance(accept, EntropyBound)
    kept: set[int] = set()
    total = 0.0
    for at in order:
        if total <= accept.bound:
            kept.add(at)
        total += unsure[at]
    return kept


class Row(NamedTuple):
    """What the plain twin keeps of a canvas."""

    canvas: list[int]
    guess: list[int]
    unchanged: int
    steps: int
    settled: bool


def plain_step(
    row: Row, reading: dict[str, list], unsure: list, noise: list, sampler: Sampler, pins: dict[int, int]
) -> Row:
    """One row, position by position; a fixed one has nothing but its token."""
    if row.settled:
        return row
    free = [at not in pins for at in range(len(noise))]
    kept = accepted_by(sampler.accept, unsure, free)
    canvas = [
        pins[at] if at in pins else reading["drawn"][at] if at in kept else noise[at]
        for at in range(len(noise))
    ]
    guess = [pins.get(at, reading["guess"][at]) for at in range(len(noise))]
    unchanged = row.unchanged + 1 if row.steps and guess == row.guess else 0
    stop = sampler.stop
    assert isinstance(stop, StableAndConfident)
    entropies = [reading["entropy"][at] for at in range(len(noise)) if free[at]]
    sure = sum(entropies) / max(1, len(entropies)) < stop.confidence
    settled = (unchanged >= stop.stability and sure) or row.steps + 1 >= sampler.num_steps
    return Row(canvas, guess, unchanged, row.steps + 1, settled)


def same_state(row: Row, state: CanvasState, number: int) -> None:
    assert state.canvas[number].tolist() == row.canvas
    assert state.guess[number].tolist() == row.guess
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
@settings(max_examples=450, deadline=None, derandomize=True, database=None)
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
    twins = [Row(state.canvas[n].tolist(), state.guess[n].tolist(), 0, 0, False) for n in range(rows)]
    guess = torch.randint(vocab, (rows, canvas), generator=generator)
    for _ in range(5):
        # In steps of 1/64 sums are exact, and no two of a row are equal: nothing hangs on a last bit.
        order = torch.rand(rows, 40, generator=generator).argsort(-1)[:, :canvas]
        moves = torch.rand(rows, canvas, generator=generator) < 0.1
        other = torch.randint(vocab, (2, rows, canvas), generator=generator)
        guess = torch.where(moves, other[0], guess)
        entropy = order / 64
        reading = Reading(
            guess, other[1], entropy, log_mass=entropy + 2.0, top_logit=torch.full_like(entropy, 2.0)
        )
        fixed = fix(reading, state.canvas, free, torch.zeros(rows, canvas, 1))
        noise = torch.randint(vocab, (rows, canvas), generator=generator)
        state = step(state, fixed if knows else reading, noise, sampler, free)
        for number in range(rows):
            plain = {name: getattr(reading, name)[number].tolist() for name in ("guess", "drawn", "entropy")}
            twins[number] = plain_step(
                twins[number], plain, plain["entropy"], noise[number].tolist(), sampler, pins[number]
            )
            same_state(twins[number], state, number)
    assert torch.equal(state.canvas[~free], tokens[~free])
    assert torch.equal(state.guess[~free], tokens[~free])


@pytest.mark.parametrize("renoise", [UniformRenoise(), NoiseEverywhere()], ids=lambda r: type(r).__name__)
def test_parts_that_forget_about_pins_cannot_move_them(renoise: Renoise) -> None:
    generator = torch.Generator().manual_seed(1)
    free = torch.rand(30, 8, generator=generator) < 0.5
    first = torch.randint(9, (30, 8), generator=generator)
    state = open_canvas(first)
    sampler = Sampler(accept=AcceptEverything(), renoise=renoise)
    for _ in range(5):
        drawn, noise = torch.randint(9, (2, 30, 8), generator=generator)
        unsure = torch.rand(30, 8, generator=generator)
        state = step(state, Reading(drawn, drawn, unsure, unsure, unsure), noise, sampler, free)
    assert torch.equal(state.canvas[~free], first[~free])
    assert torch.equal(state.guess[~free], first[~free])
    assert (state.canvas[free] != first[free]).any()


# Behind a real head


@cache
def stack() -> Stack:
    return tiny_models()[None].stack.with_lengths(canvas_len=6).with_execution(Execution())


def rows_given(rows: int, canvas: int, vocab: int, generator: torch.Generator) -> list[Given | None]:
    """Nothing, fixed tokens, sets or both, in each of several ways."""
    found: list[Given | None] = []
    for number in range(rows):
        kinds = torch.randint(4, (canvas,), generator=generator).tolist()
        kinds = [1 if number % 5 == 4 else kind for kind in kinds]  # now and then everything is fixed
        words = torch.randint(vocab, (canvas, 3), generator=generator).tolist()
        fixed = {at: words[at][0] for at in range(canvas) if kinds[at] == 1}
        among = {at: tuple(sorted(set(words[at]))) for at in range(canvas) if kinds[at] == 2}
        found.append(None if number % 5 == 0 else Given(fixed=fixed, among=among))
    return found


@given(
    rule=st.sampled_from(RULES),
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
    logprobs=st.sampled_from([None, 2]),
    seed=st.integers(0, 10**9),
)
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
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
    pins = [pins_of(one, 0, canvas, CPU) for one in what]
    noise = torch.randint(vocab, (rows, canvas), generator=generator)
    opened = [own if one is None else one.open(own) for own, one in zip(noise, pins, strict=True)]
    state = open_canvas(torch.stack(opened))
    twins = [Row(one.tolist(), one.tolist(), 0, 0, False) for one in opened]
    fixed = [{} if one is None else one.fixed for one in what]
    for number in range(2):
        place = place_at(range(seed, seed + rows), [0] * rows, [number] * rows, CPU)
        hidden = torch.randn(rows, canvas, stack().config.hidden_size, generator=generator)
        after, reading = refine(stack(), state, hidden, place, sampler, params, None, pins)
        heat = sampler.schedule((2 - state.steps).to(torch.int32), 2)
        bare = read_vocabulary(stack(), hidden, heat, place if temperature else None, params)
        renoised = random_tokens(place, Use.RENOISE, canvas, vocab)
        unsure = score(reading)
        for row in range(rows):
            plain = {n: getattr(reading, n)[row].tolist() for n in ("guess", "drawn", "entropy")}
            twins[row] = plain_step(
                twins[row], plain, unsure[row].tolist(), renoised[row].tolist(), sampler, fixed[row]
            )
            same_state(twins[row], after, row)
        check_reading(reading, bare, state.canvas, what)
        state = after


def check_reading(reading: Reading, bare: Reading, canvas: Tensor, what: list[Given | None]) -> None:
    """A point mass where a token is fixed, a word of the set where there is one, else as without pins."""
    fixed, among = torch.zeros_like(canvas, dtype=torch.bool), torch.zeros_like(canvas, dtype=torch.bool)
    for row, one in enumerate(what):
        for at, token in ({} if one is None else one.fixed).items():
            fixed[row, at] = True
            assert int(canvas[row, at]) == token
        for at, words in ({} if one is None else one.among).items():
            among[row, at] = True
            assert int(reading.guess[row, at]) in words
            assert int(reading.drawn[row, at]) in words
            assert float(reading.entropy[row, at]) <= math.log(len(words)) + 1e-5
    assert torch.equal(reading.guess[fixed], canvas[fixed])
    assert torch.equal(reading.drawn[fixed], canvas[fixed])
    assert not reading.entropy[fixed].any()
    assert torch.equal(reading.soft[fixed], stack().embed(canvas[fixed]))
    free = ~(fixed | among)
    for name in ALIKE:
        assert torch.equal(getattr(reading, name)[free], getattr(bare, name)[free]), name
    if bare.likeliest is not None:
        both = zip(reading.likeliest, bare.likeliest, strict=True)
        assert all(torch.equal(found[free], alone[free]) for found, alone in both)


@pytest.mark.parametrize("rule", [EntropyBound(), ConfidenceThreshold(at_most=0.01), FixedCount(count=1)])
def test_three_unsure_positions_keep_a_canvas_of_sixty_sure_pinned_ones_open(rule: Acceptance) -> None:
    canvas, open_ones = 63, [4, 30, 62]
    free = torch.zeros(1, canvas, dtype=torch.bool)
    free[0, open_ones] = True
    tokens = torch.arange(canvas)[None]
    sampler = Sampler(num_steps=40, accept=rule, stop=StableAndConfident(stability=1, confidence=0.005))

    def reading(unsure: float) -> Reading:
        entropy = torch.full((1, canvas), unsure)
        guess = torch.full((1, canvas), 77)
        return fix(
            Reading(guess, guess, entropy, entropy + 1, torch.ones(1, canvas)), tokens, free,
            torch.zeros(1, canvas, 1),
        )  # fmt: skip

    unsure = 0.1
    assert float(reading(unsure).entropy.mean()) < 0.005, "counted among all, they would not be seen"
    state = open_canvas(torch.where(free, 5, tokens))
    for _ in range(10):
        state = step(state, reading(unsure), torch.full((1, canvas), 88), sampler, free)
        assert not bool(state.settled)
    state = step(state, reading(0.004), torch.full((1, canvas), 88), sampler, free)
    assert bool(state.settled)
    assert int(state.steps) == 11
    assert state.guess[0].tolist() == [77 if at in open_ones else at for at in range(canvas)]


def test_a_guess_that_moves_keeps_a_canvas_open_and_one_that_would_move_under_a_pin_does_not() -> None:
    free = torch.tensor([[True, False, False]])
    sampler = Sampler(num_steps=40, stop=StableAndConfident(stability=1, confidence=0.5))
    state = open_canvas(torch.tensor([[0, 1, 2]]))
    for number, settled in ((0, False), (1, False), (2, False), (2, True)):
        # Under the pins the model changes its mind at every step, and is unsure.
        guess = torch.tensor([[number, 50 + int(state.steps), 60 + int(state.steps)]])
        entropy = torch.tensor([[0.1, 9.0, 9.0]])
        reading = fix(
            Reading(guess, guess, entropy, entropy, entropy), state.canvas, free, torch.zeros(1, 3, 1)
        )
        state = step(state, reading, torch.tensor([[7, 8, 9]]), sampler, free)
        assert bool(state.settled) is settled
    assert state.guess.tolist() == [[2, 1, 2]]


def test_a_row_without_pins_is_not_touched_by_rows_with_them() -> None:
    vocab = stack().config.vocab_size
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(3, 6, stack().config.hidden_size, generator=generator)
    state = open_canvas(torch.randint(vocab, (3, 6), generator=generator))
    place = place_at([1, 2, 3], [0] * 3, [0] * 3, CPU)
    sampler, params = Sampler(num_steps=5), GenerationParams(logprobs=3)
    alone, bare = refine(stack(), state, hidden, place, sampler, params)
    none = pins_of(Given(), 0, 6, CPU)
    pinned = pins_of(Given(fixed={0: 3, 1: 4, 5: 6}, among={2: (5, 6, 7)}), 0, 6, CPU)
    for company in ([None, pinned, pinned], [none, pinned, None]):
        together, reading = refine(stack(), state, hidden, place, sampler, params, None, company)
        for name in ALIKE:
            assert torch.equal(getattr(reading, name)[0], getattr(bare, name)[0]), name
        for field in fields(CanvasState):
            assert torch.equal(getattr(together, field.name)[0], getattr(alone, field.name)[0]), field.name
        assert not torch.equal(reading.guess[1], bare.guess[1])


def test_a_bias_counts_among_the_words_of_a_set() -> None:
    """As far as without a set: it is a number added to the logit, before the temperature."""
    vocab = stack().config.vocab_size
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(1, 6, stack().config.hidden_size, generator=generator)
    state = open_canvas(torch.zeros(1, 6, dtype=torch.long))
    bias = torch.zeros(1, vocab)
    bias[0, 9] = 3.0
    words = (5, 9, 200)
    pins = [pins_of(Given(among={2: words}), 0, 6, CPU)]
    place = place_at([1], [0], [0], CPU)
    sampler = Sampler(num_steps=5)
    _, found = refine(stack(), state, hidden, place, sampler, GenerationParams(logprobs=3), bias, pins)
    logits = stack().logits(hidden)[0, 2, list(words)] + torch.tensor([0.0, 3.0, 0.0])
    truth = (logits / 0.8).log_softmax(-1).sort(descending=True)
    assert isinstance(found.likeliest, Likeliest)
    assert found.likeliest.words[0, 2].tolist() == [words[at] for at in truth.indices]
    log_probs = found.likeliest.logits[0, 2] - found.log_mass[0, 2]
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
        place = place_at([1], [0], [number], CPU)
        before = state.canvas
        state, reading = refine(stack(), state, hidden, place, sampler, GenerationParams(), None, [one])
        assert torch.equal(state.canvas, before) is (one is pinned)
    assert torch.equal(state.guess, reading.guess)
