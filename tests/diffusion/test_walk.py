"""The walk over tiles equals a dense twin in fp64, for any vocabulary, temperature and bias."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dgemma.diffusion.noise import Place, place_at
from dgemma.diffusion.reading import read_dense, scale
from dgemma.diffusion.walk import BLOCK, Vocabulary, walk

CPU = torch.device("cpu")


@dataclass
class TableVocabulary:
    """Logits from a table, so that the walk alone is compared."""

    table: Tensor  # [rows, canvas, vocab]
    embedding: Tensor  # [vocab, hidden]

    @property
    def vocab_size(self) -> int:
        return self.table.shape[-1]

    def logits(self, hidden: Tensor, words: slice) -> Tensor:
        return self.table[..., words]

    def mix(self, shares: Tensor, words: slice) -> Tensor:
        return shares @ self.embedding[words]


def make(rows: int, canvas: int, vocab: int, seed: int, spread: float = 4.0) -> tuple[Vocabulary, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(rows, canvas, vocab, generator=generator) * spread
    embedding = torch.randn(vocab, 8, generator=generator)
    return TableVocabulary(table.clamp(-30, 30), embedding), torch.zeros(rows, canvas, 8)


def places(rows: int, seed: int) -> Place:
    return place_at(range(seed, seed + rows), [0] * rows, [3] * rows, CPU)


@given(
    vocab=st.sampled_from([7, 1023, 1024, 1025, 4096, 5000, 9000, 12_288, 20_001]),
    temperature=st.sampled_from([0.0, 0.05, 0.4, 0.8, 2.0]),
    bias=st.sampled_from([None, 100.0, -100.0, float("-inf")]),
    tile=st.sampled_from([BLOCK, 2 * BLOCK, 4 * BLOCK]),
    spread=st.sampled_from([0.0, 0.1, 4.0, 15.0]),
    seed=st.integers(0, 10**6),
)
# The same examples every time: among endless ones some race is decided by the last bit of fp32.
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_walk_equals_an_fp64_dense_twin(
    vocab: int, temperature: float, bias: float | None, tile: int, spread: float, seed: int
) -> None:
    vocabulary, hidden = make(2, 3, vocab, seed, spread)
    heat = torch.tensor([temperature, 0.7])
    biases = None
    if bias is not None:  # on some words, never on all
        biases = torch.zeros(2, vocab)
        biases[:, torch.arange(vocab) % 3 == 1] = bias
    place = places(2, seed)
    found = walk(hidden, vocabulary, heat, place, bias=biases, tile=tile)
    scaled = scale(vocabulary.logits(hidden, slice(None)), heat)
    scaled = scaled if biases is None else scaled + biases[:, None]
    truth = read_dense(scaled.double(), place)
    assert torch.equal(found.guess, truth.guess)
    drawn = torch.where(torch.tensor(temperature > 0), truth.drawn[0], truth.guess[0])
    assert torch.equal(found.drawn[0], drawn)
    assert torch.equal(found.drawn[1], truth.drawn[1])
    assert (found.entropy - truth.entropy).abs().max() <= 1e-5
    shares = scaled.double().softmax(-1)
    soft = shares @ vocabulary.embedding.double()
    assert (found.soft - soft).abs().max() <= 1e-5
    relative = (found.log_mass - truth.log_mass).abs() / truth.log_mass.abs().clamp(min=1)
    assert relative.max() <= 1e-5


def test_nothing_of_a_draw_depends_on_the_tile_size() -> None:
    vocabulary, hidden = make(2, 40, 50_000, seed=1)
    heat = torch.tensor([0.8, 0.4])
    base = walk(hidden, vocabulary, heat, places(2, 1), tile=BLOCK)
    for tile in (2 * BLOCK, 3 * BLOCK, 16 * BLOCK):
        other = walk(hidden, vocabulary, heat, places(2, 1), tile=tile)
        for name in ("guess", "drawn", "entropy", "log_mass", "soft"):
            assert torch.equal(getattr(base, name), getattr(other, name)), (tile, name)


def test_a_row_alone_draws_what_it_draws_in_company() -> None:
    vocabulary, hidden = make(3, 10, 9000, seed=2)
    heat = torch.tensor([0.8, 0.5, 0.4])
    together = walk(hidden, vocabulary, heat, places(3, 7))
    only = TableVocabulary(vocabulary.table[1:2], vocabulary.embedding)
    alone = walk(hidden[1:2], only, heat[1:2], places(1, 8))
    for name in ("guess", "drawn", "entropy"):
        assert torch.equal(getattr(together, name)[1:2], getattr(alone, name))


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """Over the likely words, the rest pooled."""
    likely = expected >= 5
    pooled_counts = torch.cat((counts[likely], counts[~likely].sum()[None]))
    pooled = torch.cat((expected[likely], expected[~likely].sum()[None]))
    used = pooled > 0
    assert pooled_counts[~used].sum() == 0, "a word of zero probability was drawn"
    statistic = ((pooled_counts - pooled)[used] ** 2 / pooled[used]).sum().item()
    freedom = int(used.sum()) - 1
    return (statistic - freedom) / (2 * freedom) ** 0.5  # about standard normal


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0, 10.0], ids=lambda s: f"spread {s}")
def test_draws_follow_the_distribution(spread: float) -> None:
    rows, canvas, vocab = 20, 1000, 3000
    one, _ = make(1, 1, vocab, seed=3, spread=spread)
    vocabulary = TableVocabulary(one.table.expand(rows, canvas, vocab), one.embedding)
    drawn = walk(
        torch.zeros(rows, canvas, 8), vocabulary, torch.ones(rows), places(rows, 11), with_soft=False
    ).drawn
    counts = torch.bincount(drawn.flatten(), minlength=vocab).double()
    expected = one.table[0, 0].double().softmax(-1) * rows * canvas
    assert abs(chi_square(counts, expected)) < 4
    if spread:  # the test can fail: against a slightly hotter distribution it does
        hotter = (one.table[0, 0].double() / 1.3).softmax(-1) * rows * canvas
        assert chi_square(counts, hotter) > 4


def test_forbidden_words_are_never_drawn() -> None:
    rows, canvas, vocab = 10, 200, 9000
    vocabulary, hidden = make(rows, canvas, vocab, seed=4, spread=0.5)
    bias = torch.full((rows, vocab), float("-inf"))
    allowed = torch.tensor([3, 4097, 8999])
    bias[:, allowed] = 0
    reading = walk(hidden, vocabulary, torch.ones(rows), places(rows, 5), bias=bias)
    assert torch.isin(reading.drawn, allowed).all()
    assert torch.isin(reading.guess, allowed).all()
    assert len(reading.drawn.unique()) == 3
    assert reading.soft.isfinite().all()
