"""The walk over tiles equals a dense twin in fp64, for any vocabulary, temperature and bias."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from chi_square import chi_square
from dgemma.diffusion.block import BLOCK
from dgemma.diffusion.likeliest import truncation_floor
from dgemma.diffusion.noise import Place, place_at
from dgemma.diffusion.reading import Reading, read_dense, scale
from dgemma.diffusion.walk import Vocabulary, Wishes, join, walk, walk_part

CPU = torch.device("cpu")


@dataclass
class TableVocabulary:
    """Logits from a table, so that the walk alone is compared."""

    table: Tensor  # [rows, canvas, vocab]
    embedding: Tensor  # [vocab, hidden]

    @property
    def vocab_size(self) -> int:
        return self.table.shape[-1]

    logit_cap = None
    embedding_scale = 1.0

    def products(self, hidden: Tensor, words: slice) -> Tensor:
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
    found = walk(hidden, vocabulary, heat, place, Wishes(bias=biases), tile=tile)
    scaled = scale(vocabulary.products(hidden, slice(None)), heat)
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


def in_shards(
    count: int, vocabulary: Vocabulary, hidden: Tensor, heat: Tensor, place: Place, wishes: Wishes
) -> Reading:
    """Each shard walks its own words, as if it stood on a device of its own."""
    size = -(-vocabulary.vocab_size // (count * BLOCK)) * BLOCK
    shards = [slice(a, min(a + size, vocabulary.vocab_size)) for a in range(0, vocabulary.vocab_size, size)]
    assert len(shards) == count
    return join([walk_part(hidden, vocabulary, heat, place, wishes, words=words) for words in shards])


def test_four_vocabulary_shards_join_to_the_same_bits() -> None:
    vocabulary, hidden = make(2, 40, 60_000, seed=6)
    heat = torch.tensor([0.8, 0.3])
    wishes = Wishes(num_likeliest=7)
    whole = walk(hidden, vocabulary, heat, places(2, 3), wishes)
    joined = in_shards(4, vocabulary, hidden, heat, places(2, 3), wishes)
    for name in ("guess", "drawn", "entropy", "log_mass", "top_logit"):
        assert torch.equal(getattr(whole, name), getattr(joined, name)), name
    assert all(map(torch.equal, whole.likeliest, joined.likeliest))
    assert torch.allclose(whole.soft, joined.soft, atol=1e-5, rtol=0)


def test_a_row_alone_draws_what_it_draws_in_company() -> None:
    vocabulary, hidden = make(3, 10, 9000, seed=2)
    heat = torch.tensor([0.8, 0.5, 0.4])
    together = walk(hidden, vocabulary, heat, places(3, 7))
    only = TableVocabulary(vocabulary.table[1:2], vocabulary.embedding)
    alone = walk(hidden[1:2], only, heat[1:2], places(1, 8))
    for name in ("guess", "drawn", "entropy"):
        assert torch.equal(getattr(together, name)[1:2], getattr(alone, name))


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0, 10.0], ids=lambda s: f"spread {s}")
@pytest.mark.parametrize(("vocab", "shards"), [(3000, 1), (14_000, 4)], ids=["whole", "four shards"])
def test_draws_follow_the_distribution(spread: float, vocab: int, shards: int) -> None:
    rows, canvas = 10, 1000
    one, _ = make(1, 1, vocab, seed=3, spread=spread)
    vocabulary = TableVocabulary(one.table.expand(rows, canvas, vocab), one.embedding)
    hidden, heat, wishes = torch.zeros(rows, canvas, 8), torch.ones(rows), Wishes(with_soft=False)
    drawn = in_shards(shards, vocabulary, hidden, heat, places(rows, 11), wishes).drawn
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
    reading = walk(hidden, vocabulary, torch.ones(rows), places(rows, 5), Wishes(bias=bias))
    assert torch.isin(reading.drawn, allowed).all()
    assert torch.isin(reading.guess, allowed).all()
    assert len(reading.drawn.unique()) == 3
    assert reading.soft.isfinite().all()


def test_the_likeliest_words_do_not_depend_on_the_tile_size() -> None:
    vocabulary, hidden = make(1, 20, 30_000, seed=10)
    heat = torch.tensor([0.6])
    wishes = Wishes(num_likeliest=5)
    small, large = (walk(hidden, vocabulary, heat, places(1, 1), wishes, tile=n * BLOCK) for n in (1, 4))
    assert all(map(torch.equal, small.likeliest, large.likeliest))


def test_the_likeliest_words_are_those_of_a_full_sort() -> None:
    vocabulary, hidden = make(2, 9, 10_000, seed=11)
    heat = torch.tensor([0.7, 2.0])
    found = walk(hidden, vocabulary, heat, None, Wishes(num_likeliest=20))
    scaled = scale(vocabulary.products(hidden, slice(None)), heat)
    truth = scaled.log_softmax(-1).topk(20)
    assert torch.equal(found.likeliest.words, truth.indices)
    log_probs = found.likeliest.logits - found.log_mass[..., None]
    assert (log_probs - truth.values).abs().max() <= 1e-5


@pytest.mark.parametrize("top_p", [1e-6, 1e-44, 5e-324])
def test_a_nucleus_holds_at_least_one_word_however_small_it_is(top_p: float) -> None:
    vocabulary, hidden = make(2, 9, 1000, seed=12)
    found = walk(hidden, vocabulary, torch.ones(2), None, Wishes(num_likeliest=20, with_soft=False))
    floor = truncation_floor(found.likeliest, found.log_mass, None, top_p)
    assert torch.equal(floor, found.likeliest.logits[..., 0])


@pytest.mark.parametrize(("top_k", "top_p"), [(1, None), (10, None), (None, 0.5), (None, 0.9), (40, 0.8)])
def test_a_second_walk_draws_only_above_the_floor(top_k: int | None, top_p: float | None) -> None:
    rows, canvas, vocab = 4, 200, 9000
    vocabulary, hidden = make(rows, canvas, vocab, seed=12, spread=3.0)
    heat = torch.ones(rows)
    first = walk(hidden, vocabulary, heat, None, Wishes(num_likeliest=1024, with_soft=False))
    floor = truncation_floor(first.likeliest, first.log_mass, top_k, top_p)
    second = walk(hidden, vocabulary, heat, places(rows, 6), Wishes(floor=floor))
    # The plain twin: sort everything, keep the head.
    probabilities, order = (
        vocabulary.products(hidden, slice(None)).double().softmax(-1).sort(-1, descending=True)
    )
    rank = torch.arange(vocab).expand_as(order)
    kept = rank < (top_k or vocab)
    if top_p is not None:
        kept &= probabilities.cumsum(-1) - probabilities < top_p
    allowed = torch.zeros_like(kept).scatter(-1, order, kept)
    assert allowed.gather(-1, second.drawn[..., None]).all()
    truth = torch.where(kept, probabilities, 0)
    truth = truth / truth.sum(-1, keepdim=True)
    # The border of a nucleus may fall on the other side of a word in fp32, rarely.
    wrong = (second.entropy - torch.special.entr(truth).sum(-1)).abs() > 1e-5
    assert wrong.double().mean() <= (0.005 if top_p else 0)
    assert torch.equal(second.guess, first.guess)
    assert len(torch.unique(second.drawn)) > canvas if top_k != 1 else torch.equal(second.drawn, first.guess)


@pytest.mark.parametrize("vocab", [4096, 9001], ids=["whole blocks", "a rest"])
def test_the_compiled_walk_equals_its_plain_twin(vocab: int) -> None:
    vocabulary, hidden = make(2, 33, vocab, seed=13)
    heat = torch.tensor([0.7, 0.0])
    plain = walk(hidden, vocabulary, heat, places(2, 5))
    fused = walk(hidden, vocabulary, heat, places(2, 5), Wishes(compiled=True))
    assert torch.equal(plain.guess, fused.guess)
    assert torch.equal(plain.drawn, fused.drawn)
    assert (plain.entropy - fused.entropy).abs().max() <= 1e-5
    assert (plain.soft - fused.soft).abs().max() <= 1e-5
