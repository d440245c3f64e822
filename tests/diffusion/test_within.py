"""A canvas read within a language, against every string of words written out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from chi_square import chi_square
from dgemma.diffusion.language import Strings, language_of
from dgemma.diffusion.noise import Place, place_at
from dgemma.diffusion.pins import CanvasPins, Limited
from dgemma.diffusion.reading import Reading, scaled_logits
from dgemma.diffusion.within import read_within

CPU = torch.device("cpu")
HIDDEN = 5


@dataclass(frozen=True)
class Head:
    """A plain one."""

    weight: Tensor  # [vocab, hidden]
    logit_cap: float | None = 30.0
    embedding_scale: float = 1.5

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    def products(self, hidden: Tensor, words: slice) -> Tensor:
        return hidden @ self.weight[words].T

    def mix(self, shares: Tensor, words: slice) -> Tensor:
        return shares @ self.weight[words]


class Case:
    """A random vocabulary of few words, a random machine on random classes of them, a random canvas."""

    def __init__(self, seed: int, *, spread: float = 2.0) -> None:
        rng = np.random.default_rng(seed)
        self.vocab, self.length = int(rng.integers(2, 6)), int(rng.integers(1, 5))
        states, classes = int(rng.integers(1, 5)), int(rng.integers(2, 5))
        self.class_of_word = rng.integers(0, classes, self.vocab)
        self.maps = rng.integers(-1, states, (classes, states))
        self.maps[0] = -1
        self.last = rng.random(states) < 0.6
        self.first = int(rng.integers(states))
        generator = torch.Generator().manual_seed(seed)
        self.head = Head(torch.randn(self.vocab, HIDDEN, generator=generator))
        self.hidden = torch.randn(1, self.length, HIDDEN, generator=generator) * spread
        self.temperature = torch.tensor([0.4 + 0.6 * float(rng.random())])
        self.strings = Strings(
            language_of(self.class_of_word, self.maps, CPU), self.first, self.last, slice(0, self.length)
        )

    def log_probs(self) -> Tensor:
        """Of each word, free of the language [length, vocab], in 64 bits."""
        products = self.head.products(self.hidden, slice(0, self.vocab))
        logits = scaled_logits(products, self.head.logit_cap, self.temperature)[0].double()
        return logits.log_softmax(-1)

    def known(self) -> dict[tuple[int, ...], float]:
        """Every string of the language with its log-probability under the step's distribution."""
        log_probs = self.log_probs().tolist()
        return {string: sum(log_probs[at][word] for at, word in enumerate(string)) for string in self._all()}

    def _all(self) -> Iterator[tuple[int, ...]]:
        for string in itertools.product(range(self.vocab), repeat=self.length):
            state = self.first
            for word in string:
                state = int(self.maps[self.class_of_word[word], state]) if state >= 0 else -1
            if state >= 0 and self.last[state]:
                yield string

    def read(self, place: Place | None = None, pins: CanvasPins | None = None) -> Reading:
        return read_within(
            self.hidden, self.head, self.temperature, place, self.strings, pins=pins, num_likeliest=self.vocab
        )


def probabilities(case: Case, reading: Reading) -> Tensor:
    """Of each word at each position, as the reading has them."""
    assert reading.likeliest is not None
    found = torch.zeros(case.length, case.vocab, dtype=torch.float64)
    for at in range(case.length):
        for word, value in zip(*(part[0, at].tolist() for part in reading.likeliest), strict=True):
            if value > -math.inf:
                found[at, word] = math.exp(value)
    return found


def conditioned(case: Case, known: dict[tuple[int, ...], float]) -> Tensor:
    """The same, from all strings."""
    total = math.fsum(map(math.exp, known.values()))
    found = torch.zeros(case.length, case.vocab, dtype=torch.float64)
    for string, value in known.items():
        for at, word in enumerate(string):
            found[at, word] += math.exp(value) / total
    return found


many = settings(max_examples=1000, deadline=None, derandomize=True, database=None)


@given(st.integers(0, 1 << 30))
@many
def test_probabilities_and_entropies_are_those_of_all_strings(seed: int) -> None:
    case = Case(seed)
    known = case.known()
    if not known:
        with pytest.raises(RuntimeError, match="no string"):
            case.read()
        return
    reading = case.read()
    truth = conditioned(case, known)
    assert (probabilities(case, reading) - truth).abs().max() < 1e-6
    entropy = -torch.special.xlogy(truth, truth).sum(-1)
    assert (reading.entropy[0] - entropy).abs().max() < 1e-5
    assert (reading.top_logit[0].double().exp() - truth.amax(-1)).abs().max() < 1e-6


@given(st.integers(0, 1 << 30))
@many
def test_the_guess_is_the_likeliest_string_of_the_language(seed: int) -> None:
    case = Case(seed)
    known = case.known()
    if known:
        guess = tuple(case.read().guess[0].tolist())
        assert known[guess] >= max(known.values()) - 1e-5


@given(st.integers(0, 1 << 30))
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_the_soft_embedding_is_of_each_position_by_itself_among_words_of_the_language(seed: int) -> None:
    case = Case(seed)
    if case.known():
        alone = case.log_probs()
        alone[:, torch.from_numpy(case.class_of_word == 0)] = -math.inf
        soft = case.read().soft
        assert soft is not None
        assert (soft[0] - alone.softmax(-1) @ case.head.weight.double() * 1.5).abs().max() < 1e-5


@given(st.integers(0, 1 << 30), st.integers(0, 1 << 40))
@many
def test_a_draw_is_a_string_of_the_language(seed: int, own: int) -> None:
    case = Case(seed)
    known = case.known()
    if known:
        assert tuple(case.read(place_at([own], [0], [1], CPU)).drawn[0].tolist()) in known


def test_draws_follow_the_conditioned_distribution() -> None:
    wide = [case for case in (Case(seed, spread=0.5) for seed in range(60)) if 8 < len(case.known()) < 30]
    for case in wide[:2]:
        known = case.known()
        draws = 500
        index = {string: number for number, string in enumerate(known)}
        counts = torch.zeros(len(known))
        for number in range(draws):
            counts[index[tuple(case.read(place_at([number], [0], [0], CPU)).drawn[0].tolist())]] += 1
        logs = torch.tensor(list(known.values())).double()
        assert abs(chi_square(counts, logs.softmax(-1) * draws)) < 4
        # The test can fail: against a hotter distribution it does.
        assert chi_square(counts, (logs / 2).softmax(-1) * draws) > 4


@given(st.integers(0, 1 << 30), st.data())
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_pins_narrow_the_language(seed: int, data: st.DataObject) -> None:
    case = Case(seed)
    known = case.known()
    if not known:
        return
    chosen = data.draw(st.sampled_from(sorted(known)))
    fixed = data.draw(st.integers(0, case.length - 1))
    limited = data.draw(st.integers(0, case.length - 1))
    words = sorted({chosen[limited], data.draw(st.integers(0, case.vocab - 1))})
    free = torch.ones(case.length, dtype=torch.bool)
    free[fixed] = False
    among = Limited(torch.tensor([limited]), (torch.tensor(words),))
    pins = CanvasPins(torch.tensor(chosen), ~free, free, among)
    left = {s: v for s, v in known.items() if s[fixed] == chosen[fixed] and s[limited] in words}
    reading = case.read(place_at([seed], [0], [0], CPU), pins)
    assert (probabilities(case, reading) - conditioned(case, left)).abs().max() < 1e-6
    assert tuple(reading.drawn[0].tolist()) in left
    assert left[tuple(reading.guess[0].tolist())] >= max(left.values()) - 1e-5


def test_a_truncation_is_obeyed_where_the_language_leaves_a_choice() -> None:
    """Words 0 and 1 may stand; where both are below the floor they are weighed as before."""
    head = Head(torch.eye(3, HIDDEN), logit_cap=None)
    hidden = torch.tensor([[[3.0, 1.0, 0.0, 0, 0], [1.0, 0.5, 9.0, 0, 0]]])
    strings = Strings(
        language_of(np.array([1, 1, 0]), np.array([[-1], [0]]), CPU), 0, np.array([True]), slice(0, 2)
    )
    floor = torch.tensor([[2.0, 8.0]])
    found = read_within(hidden, head, torch.ones(1), None, strings, floor=floor, num_likeliest=2)
    assert found.likeliest is not None
    assert found.likeliest.logits[0, 0].exp().tolist() == [1.0, 0.0]
    assert found.likeliest.logits[0, 1].exp().tolist() == pytest.approx([0.6225, 0.3775], abs=1e-4)


def test_a_part_of_a_canvas_is_read_and_the_rest_left_alone() -> None:
    case = next(case for case in map(Case, range(99)) if len(case.known()) > 3)
    wide = torch.cat([torch.zeros(1, 3, HIDDEN), case.hidden, torch.zeros(1, 2, HIDDEN)], dim=1)
    span = slice(3, 3 + case.length)
    part = Strings(case.strings.language, case.first, case.last, span)
    found = read_within(wide, case.head, case.temperature, None, part)
    alone = case.read()
    assert torch.equal(found.guess[:, span], alone.guess)
    assert (found.entropy[:, span] - alone.entropy).abs().max() < 1e-6
    assert not found.guess[:, :3].any()


def test_large_classes_are_drawn_from_as_their_words_weigh() -> None:
    """A class of more words than race at once: chunks race first."""
    vocab = 2500
    weight = torch.zeros(vocab, HIDDEN)
    weight[:, 0] = torch.linspace(-3, 3, vocab)
    head = Head(weight, logit_cap=None)
    hidden = torch.zeros(1, 40, HIDDEN)
    hidden[..., 0] = 1.0
    strings = Strings(
        language_of(np.ones(vocab, np.int64), np.array([[-1], [0]]), CPU), 0, np.array([True]), slice(0, 40)
    )
    drawn = torch.cat(
        [
            read_within(hidden, head, torch.ones(1), place_at([n], [0], [0], CPU), strings).drawn
            for n in range(25)
        ]
    )
    mean = (weight[:, 0].softmax(0) * weight[:, 0]).sum()
    spread = ((weight[:, 0].softmax(0) * (weight[:, 0] - mean) ** 2).sum() / drawn.numel()).sqrt()
    assert abs(weight[drawn.flatten(), 0].mean() - mean) < 4 * spread
