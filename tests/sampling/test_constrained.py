"""A canvas read within a language, against every string of tokens written out."""

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
from dgemma.sampling import constrained
from dgemma.sampling.constrained import CanvasConstraint, scan_constrained, vocab_dfa
from dgemma.sampling.pinned import AllowedTokens, CanvasPins
from dgemma.sampling.rng import NoiseKey, noise_key
from dgemma.sampling.vocab_scan import VocabScan, scaled_logits
from sizes import cases

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

    def products(self, hidden: Tensor, tokens: slice) -> Tensor:
        return hidden @ self.weight[tokens].T

    def mix(self, shares: Tensor, tokens: slice) -> Tensor:
        return shares @ self.weight[tokens]


class Case:
    """A random vocabulary of few tokens, a random DFA on random classes of them, a random canvas."""

    def __init__(self, seed: int, *, spread: float = 2.0) -> None:
        rng = np.random.default_rng(seed)
        self.vocab, self.length = int(rng.integers(2, 6)), int(rng.integers(1, 5))
        states, classes = int(rng.integers(1, 5)), int(rng.integers(2, 5))
        self.class_of_token = rng.integers(0, classes, self.vocab)
        self.transitions = rng.integers(-1, states, (classes, states))
        self.transitions[0] = -1
        self.last = rng.random(states) < 0.6
        self.first = int(rng.integers(states))
        generator = torch.Generator().manual_seed(seed)
        self.head = Head(torch.randn(self.vocab, HIDDEN, generator=generator))
        self.hidden = torch.randn(1, self.length, HIDDEN, generator=generator) * spread
        self.temperature = torch.tensor([0.4 + 0.6 * float(rng.random())])
        self.constraint = CanvasConstraint(
            vocab_dfa(self.class_of_token, self.transitions, CPU),
            self.first,
            self.last,
            slice(0, self.length),
        )

    def log_probs(self) -> Tensor:
        """Of each token, free of the language [length, vocab], in 64 bits."""
        products = self.head.products(self.hidden, slice(0, self.vocab))
        logits = scaled_logits(products, self.head.logit_cap, self.temperature)[0].double()
        return logits.log_softmax(-1)

    def known(self) -> dict[tuple[int, ...], float]:
        """Every string of the language with its log-probability under the step's distribution."""
        log_probs = self.log_probs().tolist()
        return {
            string: sum(log_probs[at][token] for at, token in enumerate(string)) for string in self._all()
        }

    def _all(self) -> Iterator[tuple[int, ...]]:
        for string in itertools.product(range(self.vocab), repeat=self.length):
            state = self.first
            for token in string:
                state = int(self.transitions[self.class_of_token[token], state]) if state >= 0 else -1
            if state >= 0 and self.last[state]:
                yield string

    def read(self, key: NoiseKey | None = None, pins: CanvasPins | None = None) -> VocabScan:
        return scan_constrained(
            self.hidden, self.head, self.temperature, key, self.constraint, pins=pins, num_top_k=self.vocab
        )


def probabilities(case: Case, scan: VocabScan) -> Tensor:
    """Of each token at each position, as the reading has them."""
    assert scan.top_k is not None
    found = torch.zeros(case.length, case.vocab, dtype=torch.float64)
    for at in range(case.length):
        for token, value in zip(*(part[0, at].tolist() for part in scan.top_k), strict=True):
            if value > -math.inf:
                found[at, token] = math.exp(value)
    return found


def conditioned(case: Case, known: dict[tuple[int, ...], float]) -> Tensor:
    """The same, from all strings."""
    total = math.fsum(map(math.exp, known.values()))
    found = torch.zeros(case.length, case.vocab, dtype=torch.float64)
    for string, value in known.items():
        for at, token in enumerate(string):
            found[at, token] += math.exp(value) / total
    return found


many = settings(max_examples=cases(1000, 300), deadline=None, derandomize=True, database=None)


@given(st.integers(0, 1 << 30))
@many
def test_probabilities_and_entropies_are_those_of_all_strings(seed: int) -> None:
    case = Case(seed)
    known = case.known()
    if not known:
        with pytest.raises(RuntimeError, match="no string"):
            case.read()
        return
    scan = case.read()
    truth = conditioned(case, known)
    assert (probabilities(case, scan) - truth).abs().max() < 1e-6
    entropy = -torch.special.xlogy(truth, truth).sum(-1)
    assert (scan.entropy[0] - entropy).abs().max() < 1e-5
    assert (scan.top_logit[0].double().exp() - truth.amax(-1)).abs().max() < 1e-6


@given(st.integers(0, 1 << 30))
@many
def test_the_guess_is_the_most_likely_string_of_the_language(seed: int) -> None:
    case = Case(seed)
    known = case.known()
    if known:
        argmax = tuple(case.read().argmax[0].tolist())
        assert known[argmax] >= max(known.values()) - 1e-5


@given(st.integers(0, 1 << 30))
@settings(max_examples=cases(300, 100), deadline=None, derandomize=True, database=None)
def test_the_soft_embedding_is_of_each_position_by_itself_among_tokens_of_the_language(seed: int) -> None:
    case = Case(seed)
    if case.known():
        alone = case.log_probs()
        alone[:, torch.from_numpy(case.class_of_token == 0)] = -math.inf
        soft = case.read().soft
        assert soft is not None
        assert (soft[0] - alone.softmax(-1) @ case.head.weight.double() * 1.5).abs().max() < 1e-5


@given(st.integers(0, 1 << 30), st.integers(0, 1 << 40))
@many
def test_a_draw_is_a_string_of_the_language(seed: int, own: int) -> None:
    case = Case(seed)
    known = case.known()
    if known:
        assert tuple(case.read(noise_key([own], [0], [1], CPU)).sampled[0].tolist()) in known


def test_draws_follow_the_conditioned_distribution() -> None:
    drawn = (Case(seed, spread=0.5) for seed in range(60))
    wide = (case for case in drawn if 8 < len(case.known()) < 30)
    for case in itertools.islice(wide, cases(2, 1)):
        known = case.known()
        draws = 500
        index = {string: number for number, string in enumerate(known)}
        counts = torch.zeros(len(known))
        for number in range(draws):
            counts[index[tuple(case.read(noise_key([number], [0], [0], CPU)).sampled[0].tolist())]] += 1
        logs = torch.tensor(list(known.values())).double()
        assert abs(chi_square(counts, logs.softmax(-1) * draws)) < 4
        # The test can fail: against a hotter distribution it does.
        assert chi_square(counts, (logs / 2).softmax(-1) * draws) > 4


@given(st.integers(0, 1 << 30), st.data())
@settings(max_examples=cases(300, 100), deadline=None, derandomize=True, database=None)
def test_pins_narrow_the_language(seed: int, data: st.DataObject) -> None:
    case = Case(seed)
    known = case.known()
    if not known:
        return
    chosen = data.draw(st.sampled_from(sorted(known)))
    fixed = data.draw(st.integers(0, case.length - 1))
    allowed = data.draw(st.integers(0, case.length - 1))
    tokens = sorted({chosen[allowed], data.draw(st.integers(0, case.vocab - 1))})
    free = torch.ones(case.length, dtype=torch.bool)
    free[fixed] = False
    among = AllowedTokens(torch.tensor([allowed]), (torch.tensor(tokens),))
    pins = CanvasPins(torch.tensor(chosen), ~free, free, among)
    left = {s: v for s, v in known.items() if s[fixed] == chosen[fixed] and s[allowed] in tokens}
    scan = case.read(noise_key([seed], [0], [0], CPU), pins)
    assert (probabilities(case, scan) - conditioned(case, left)).abs().max() < 1e-6
    assert tuple(scan.sampled[0].tolist()) in left
    assert left[tuple(scan.argmax[0].tolist())] >= max(left.values()) - 1e-5


def test_a_truncation_is_obeyed_where_the_language_leaves_a_choice() -> None:
    """Words 0 and 1 may stand; where both are below the floor they are weighed as before."""
    head = Head(torch.eye(3, HIDDEN), logit_cap=None)
    hidden = torch.tensor([[[3.0, 1.0, 0.0, 0, 0], [1.0, 0.5, 9.0, 0, 0]]])
    constraint = CanvasConstraint(
        vocab_dfa(np.array([1, 1, 0]), np.array([[-1], [0]]), CPU), 0, np.array([True]), slice(0, 2)
    )
    floor = torch.tensor([[2.0, 8.0]])
    found = scan_constrained(hidden, head, torch.ones(1), None, constraint, floor=floor, num_top_k=2)
    assert found.top_k is not None
    assert found.top_k.logits[0, 0].exp().tolist() == [1.0, 0.0]
    assert found.top_k.logits[0, 1].exp().tolist() == pytest.approx([0.6225, 0.3775], abs=1e-4)


def test_a_part_of_a_canvas_is_read_and_the_rest_left_alone() -> None:
    case = next(case for case in map(Case, range(99)) if len(case.known()) > 3)
    wide = torch.cat([torch.zeros(1, 3, HIDDEN), case.hidden, torch.zeros(1, 2, HIDDEN)], dim=1)
    span = slice(3, 3 + case.length)
    part = CanvasConstraint(case.constraint.vocab_dfa, case.first, case.last, span)
    found = scan_constrained(wide, case.head, case.temperature, None, part)
    alone = case.read()
    assert torch.equal(found.argmax[:, span], alone.argmax)
    assert (found.entropy[:, span] - alone.entropy).abs().max() < 1e-6
    assert not found.argmax[:, :3].any()


def test_large_classes_are_drawn_from_as_their_tokens_weigh() -> None:
    """A class of more tokens than race at once: chunks race first."""
    vocab = 2500
    weight = torch.zeros(vocab, HIDDEN)
    weight[:, 0] = torch.linspace(-3, 3, vocab)
    head = Head(weight, logit_cap=None)
    hidden = torch.zeros(1, 40, HIDDEN)
    hidden[..., 0] = 1.0
    constraint = CanvasConstraint(
        vocab_dfa(np.ones(vocab, np.int64), np.array([[-1], [0]]), CPU), 0, np.array([True]), slice(0, 40)
    )
    sampled = torch.cat(
        [
            scan_constrained(hidden, head, torch.ones(1), noise_key([n], [0], [0], CPU), constraint).sampled
            for n in range(25)
        ]
    )
    mean = (weight[:, 0].softmax(0) * weight[:, 0]).sum()
    spread = ((weight[:, 0].softmax(0) * (weight[:, 0] - mean) ** 2).sum() / sampled.numel()).sqrt()
    assert abs(weight[sampled.flatten(), 0].mean() - mean) < 4 * spread


def test_sums_of_a_device_without_float64_are_nearly_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [case for case in map(Case, range(60)) if case.known()]
    expected = [case.read() for case in found]
    monkeypatch.setattr(constrained, "DTYPE_OF_SUMS", {"cpu": torch.float32})
    for case, scan in zip(found, expected, strict=True):
        other = case.read()
        assert torch.equal(other.argmax, scan.argmax)
        assert torch.allclose(other.entropy, scan.entropy, atol=1e-5)
        assert torch.allclose(probabilities(case, other), probabilities(case, scan), atol=1e-5)


def test_a_token_at_the_floor_itself_is_kept() -> None:
    """The floor is the logit of the last token that top-k and top-p keep."""
    head = Head(torch.eye(3, HIDDEN), logit_cap=None)
    hidden = torch.tensor([[[2.0, 2.0, 1.0, 0, 0]]])
    constraint = CanvasConstraint(
        vocab_dfa(np.array([1, 1, 1]), np.array([[-1], [0]]), CPU), 0, np.array([True]), slice(0, 1)
    )
    floor = torch.tensor([[2.0]])
    found = scan_constrained(hidden, head, torch.ones(1), None, constraint, floor=floor, num_top_k=3)
    assert found.top_k is not None
    assert found.top_k.logits[0, 0].exp().tolist() == pytest.approx([0.5, 0.5, 0.0], abs=1e-6)
