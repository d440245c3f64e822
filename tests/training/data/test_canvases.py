"""A batch is a function of seed and presentation numbers; only replies are cut, corrupted and supervised."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dgemma.errors import InputError
from dgemma.training.data.canvases import LEAST_NOISE, CanvasSettings, TrainingBatch, cut, make_batch
from dgemma.training.data.records import Span, TrainingExample

EOS, VOCAB, CANVAS = 1, 50, 4
SETTINGS = CanvasSettings(canvas_len=CANVAS, vocab_size=VOCAB, fill_token=EOS, seed=7)


def chat(*, clipped: bool = False) -> TrainingExample:
    """Three tokens of prompt, a reply of 6, two tokens read only, a reply of 3."""
    return TrainingExample(tuple(range(10, 24)), (Span(3, 9), Span(11, 14)), clipped)


def same(a: TrainingBatch, b: TrainingBatch) -> bool:
    names = [name for name in vars(a) if isinstance(getattr(a, name), torch.Tensor)]
    pairs = [*((getattr(a, name), getattr(b, name)) for name in names)]
    return len(a.guessed) == len(b.guessed) and all(
        torch.equal(x, y) for x, y in (*pairs, *zip(a.guessed, b.guessed, strict=True))
    )


def test_canvases_are_counted_from_each_replys_own_start() -> None:
    assert [(c.start, c.tokens) for c in cut(chat(), CANVAS)] == [
        (3, (13, 14, 15, 16)),
        (7, (17, 18)),
        (11, (21, 22, 23)),
    ]


def test_the_fill_is_supervised_unless_the_text_was_cut_off() -> None:
    assert [c.supervise_fill for c in cut(chat(), CANVAS)] == [True, True, True]
    # Only the last reply was cut off; the ends of those before it are known.
    assert [c.supervise_fill for c in cut(chat(clipped=True), CANVAS)] == [True, True, False]
    rows = [make_batch([chat(clipped=True)], [p], SETTINGS) for p in range(40)]
    last = next(b for b in rows if b.starts.item() == 11)
    assert last.clean.tolist() == [[21, 22, 23, EOS]]
    assert last.weights.tolist() == [[1, 1, 1, 0]]
    middle = next(b for b in rows if b.starts.item() == 7)
    assert middle.clean.tolist() == [[17, 18, EOS, EOS]]
    assert middle.weights.tolist() == [[1, 1, 1, 1]]


def test_no_fill_is_supervised_where_the_settings_say_so() -> None:
    settings = replace(SETTINGS, supervise_fill=False)
    own = TrainingExample((10, 11, 12, 13), (Span(2, 4),), canvas=(30, 31, 32))
    for example in (chat(), chat(clipped=True), own):
        batch = make_batch([example] * 20, range(20), settings)
        assert torch.equal(batch.weights, (batch.clean != EOS).float())


def test_a_canvas_of_its_own_takes_the_place_of_the_response() -> None:
    example = TrainingExample((10, 11, 12, 13), (Span(2, 4),), canvas=(30, 31, 32))
    batch = make_batch([example], [0], SETTINGS)
    assert (batch.starts.item(), batch.clean.tolist()) == (2, [[30, 31, 32, EOS]])
    assert batch.weights.tolist() == [[1, 1, 1, 1]]
    assert batch.encoder_targets.tolist() == [12, 13]
    with pytest.raises(InputError, match="canvas has 3 tokens; it must fit into one canvas, of 2"):
        cut(example, 2)
    for spans, canvas in (((Span(1, 2), Span(2, 4)), (30,)), ((Span(2, 4),), ())):
        with pytest.raises(InputError, match="in place of one response"):
            TrainingExample((10, 11, 12, 13), spans, canvas=canvas)


def test_header_tokens_carry_no_loss() -> None:
    """A canvas or an encoder target outside a reply would teach the model to write headers."""
    replies = {13, 14, 15, 16, 17, 18, 21, 22, 23}
    for presentation in range(60):
        batch = make_batch([chat()], [presentation], SETTINGS)
        supervised = batch.clean[batch.weights > 0].tolist()
        assert set(supervised) <= replies | {EOS}
        counted = batch.encoder_weights > 0
        assert set(batch.encoder_targets[counted].tolist()) == replies
        # Each target is predicted from the token before it.
        before = batch.tokens.flatten()[batch.encoder_places[counted]]
        assert torch.equal(before + 1, batch.encoder_targets[counted])


def test_every_canvas_is_picked_equally_often() -> None:
    count = 6000
    batch = make_batch([chat()] * count, range(count), SETTINGS)
    seen = torch.stack([(batch.starts == start).sum() for start in (3, 7, 11)])
    expected = count / 3
    assert ((seen - expected) ** 2 / expected).sum() < 13.8  # chi-square, 2 degrees, p = 0.001


def test_noise_is_uniform_and_replaces_its_share_with_any_word() -> None:
    count = 4000
    settings = CanvasSettings(canvas_len=32, vocab_size=VOCAB, fill_token=EOS)
    example = TrainingExample((2, *[5] * 32), (Span(1, 33),))
    batch = make_batch([example] * count, range(count), settings)
    assert batch.noise.min() >= LEAST_NOISE
    assert batch.noise.max() <= 1 - LEAST_NOISE
    bins = torch.histc(batch.noise, bins=10, min=0, max=1)
    assert ((bins - count / 10) ** 2 / (count / 10)).sum() < 27.9  # 9 degrees, p = 0.001
    changed = (batch.noisy != batch.clean).float().mean(1)
    # A replacement may equal the original, once in VOCAB times.
    expected = batch.noise * (1 - 1 / VOCAB)
    slope = ((changed * expected).sum() / (expected * expected).sum()).item()
    assert slope == pytest.approx(1, abs=0.01)
    words = torch.bincount(batch.noisy[batch.noisy != 5], minlength=VOCAB).float()
    words = torch.cat((words[:5], words[6:]))
    mean = words.mean()
    assert ((words - mean) ** 2 / mean).sum() < 84  # 48 degrees, p = 0.001
    assert [len(rows) / len(batch.noise) for rows in batch.guessed] == [pytest.approx(0.5, abs=0.03)]


def test_a_power_leans_the_noise_to_high_levels_and_draws_nothing_anew() -> None:
    count, power = 4000, 0.5
    example = TrainingExample((2, *[5] * 32), (Span(1, 33),))
    settings = CanvasSettings(canvas_len=32, vocab_size=VOCAB, fill_token=EOS, noise_power=power)
    even, leaning = (
        make_batch([example] * count, range(count), each)
        for each in (replace(settings, noise_power=1.0), settings)
    )
    assert (leaning.noise < 0.5).float().mean().item() == pytest.approx(0.5 ** (1 / power), abs=0.02)
    torch.testing.assert_close(leaning.noise, even.noise**power, atol=1e-2, rtol=0)
    assert torch.equal(leaning.guessed[0], even.guessed[0])


def test_shifted_canvases_begin_anywhere_in_their_response() -> None:
    example = TrainingExample((2, *range(10, 30)), (Span(1, 21),))
    assert [canvas.start for canvas in cut(example, 8, 3)] == [4, 12, 20]
    assert [canvas.tokens for canvas in cut(chat(), CANVAS, 3)] == [(16, 17, 18), (23,)]
    count = 8000
    settings = CanvasSettings(canvas_len=8, vocab_size=VOCAB, fill_token=EOS, shifted=0.5)
    batch = make_batch([example] * count, range(count), settings)
    seen = torch.bincount(batch.starts, minlength=21).float() / count
    assert seen[0] == 0
    assert (seen[1:] > 0.01).all()
    unshifted = seen[[1, 9, 17]]
    assert unshifted.sum().item() == pytest.approx(0.5 + 0.5 / 8, abs=0.03)


def test_runs_are_neighbours_anywhere_and_mostly_short() -> None:
    count, length = 8000, 32
    example = TrainingExample((2, *[5] * length), (Span(1, length + 1),))
    settings = CanvasSettings(canvas_len=length, vocab_size=100_000, fill_token=EOS, runs=1.0)
    batch = make_batch([example] * count, range(count), settings)
    changed = batch.noisy != batch.clean  # a replacement hardly ever equals the original here
    lengths = changed.sum(1)
    borders = (changed[:, 1:] != changed[:, :-1]).sum(1)
    assert (borders <= 2).float().mean() > 0.99
    torch.testing.assert_close(batch.noise * length, lengths.float(), atol=1.01, rtol=0)
    assert lengths.min() >= 1
    assert (lengths <= 8).float().mean().item() == pytest.approx(0.5, abs=0.03)  # u ** 2 <= 1/4
    alone = batch.noisy[lengths == 1] != 5
    assert (alone.sum(0) > 0).all()
    half = make_batch([example] * count, range(count), replace(settings, runs=0.5))
    scattered = ((half.noisy[:, 1:] != 5) != (half.noisy[:, :-1] != 5)).sum(1) > 2
    assert scattered.float().mean().item() == pytest.approx(0.45, abs=0.04)


@given(st.integers(0, 1 << 40), st.integers(0, (1 << 64) - 1), st.integers(1, 5))
def test_a_rows_randomness_does_not_depend_on_its_company(first: int, seed: int, rows: int) -> None:
    settings = CanvasSettings(canvas_len=CANVAS, vocab_size=VOCAB, fill_token=EOS, seed=seed, guesses=3)
    numbers = [first + i for i in range(rows)]
    together = make_batch([chat()] * rows, numbers, settings)
    for row, number in enumerate(numbers):
        alone = make_batch([chat()], [number], settings)
        for name in ("starts", "clean", "noisy", "weights", "noise"):
            assert torch.equal(getattr(together, name)[row], getattr(alone, name)[0]), name
        assert sum(row in rows for rows in together.guessed) == len(alone.guessed)


def test_guesses_are_drawn_from_one_to_the_most_for_the_share_that_wants_them() -> None:
    settings = replace(SETTINGS, guesses=3, self_conditioning=0.6)
    batch = make_batch([chat()] * 3000, range(3000), settings)
    shares = [len(rows) / 3000 for rows in batch.guessed]
    assert shares == [pytest.approx(share, abs=0.03) for share in (0.6, 0.4, 0.2)]
    for rows, more in zip(batch.guessed, batch.guessed[1:], strict=False):
        assert set(more.tolist()) < set(rows.tolist())
    padded = make_batch([chat()] * 40, range(40), replace(settings, pad_guessed_to=16))
    plain = make_batch([chat()] * 40, range(40), settings)
    for rows, those in zip(padded.guessed, plain.guessed, strict=True):
        assert len(rows) % 16 == 0
        assert set(rows.tolist()) == set(those.tolist())
    assert make_batch([chat()], [0], replace(settings, self_conditioning=0)).guessed == ()


def test_many_canvases_of_an_example_are_different_ones_with_noise_of_their_own() -> None:
    starts = {canvas.start for canvas in cut(chat(), CANVAS)}
    settings = replace(SETTINGS, per_example=len(starts) + 1)
    numbers = range(200)
    batch = make_batch([chat()] * len(numbers), numbers, settings)
    assert batch.tokens.shape[0] == len(numbers)
    rows = batch.starts.view(len(numbers), -1)
    assert all(set(row.tolist()) == starts for row in rows[:, :-1])
    assert torch.equal(rows[:, 0], rows[:, -1])  # all have come: the first comes again
    assert {row[0].item() for row in rows} == starts
    assert len(set(batch.noise.tolist())) == batch.noise.numel()
    alone = make_batch([chat()], [77], settings)
    assert torch.equal(alone.noisy, batch.noisy.view(len(numbers), -1, CANVAS)[77])


def test_seeds_and_presentations_differ_and_repeat() -> None:
    first = make_batch([chat()], [5], SETTINGS)
    assert same(first, make_batch([chat()], [5], SETTINGS))
    assert not same(first, make_batch([chat()], [6], SETTINGS))
    other = CanvasSettings(canvas_len=CANVAS, vocab_size=VOCAB, fill_token=EOS, seed=8)
    assert not same(first, make_batch([chat()], [5], other))


def test_padding_rounds_shapes_and_weighs_nothing() -> None:
    settings = CanvasSettings(canvas_len=CANVAS, vocab_size=VOCAB, fill_token=EOS, pad_to=16, pad_chosen_to=4)
    short = TrainingExample((2, 9, 9), (Span(1, 3),))
    batch = make_batch([chat(), short], [0, 1], settings)
    assert batch.tokens.shape == (2, 16)
    assert len(batch.encoder_places) == 12
    assert batch.encoder_weights.sum() == 9 + 2
    assert batch.encoder_places.max() < 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"canvas_len": 0}, "canvas_len is 0"),
        ({"fill_token": 50}, "fill_token is 50; this vocabulary ends at 49"),
        ({"self_conditioning": 1.5}, "self_conditioning is 1.5"),
        ({"noise_power": 0}, "noise_power is 0"),
        ({"shifted": 2}, "shifted is 2"),
        ({"runs": -1}, "runs is -1"),
        ({"pad_to": 0}, "pad_to is 0"),
        ({"pad_guessed_to": 0}, "pad_guessed_to is 0"),
        ({"per_example": 0}, "per_example is 0"),
        ({"guesses": 0}, "guesses is 0"),
        ({"pad_chosen_to": 0}, "pad_chosen_to is 0"),
    ],
)
def test_settings_are_checked(changes: dict[str, float], message: str) -> None:
    good = {"canvas_len": 4, "vocab_size": 50, "fill_token": 1}
    with pytest.raises(InputError, match=message):
        CanvasSettings(**{**good, **changes})


@pytest.mark.parametrize(
    ("spans", "clipped", "message"),
    [
        ((), False, "no response"),
        ((Span(0, 2),), False, "after at least one token"),
        ((Span(2, 2),), False, "spans tokens 2 to 2"),
        ((Span(2, 6),), False, "an example's 5 tokens"),
        ((Span(1, 3), Span(2, 4)), False, "follow each other"),
        ((Span(1, 3),), True, "does not reach its end"),
    ],
)
def test_examples_are_checked(spans: tuple[Span, ...], clipped: bool, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainingExample((1, 2, 3, 4, 5), spans, clipped)


@pytest.mark.parametrize("words", [1 << 32, 1 << 33])
def test_presentation_numbers_do_not_wrap_at_32_bits(words: int) -> None:
    assert not same(make_batch([chat()], [5], SETTINGS), make_batch([chat()], [5 + words], SETTINGS))


def test_seeds_do_not_wrap_at_32_bits() -> None:
    other = replace(SETTINGS, seed=SETTINGS.seed + (1 << 32))
    assert not same(make_batch([chat()], [5], SETTINGS), make_batch([chat()], [5], other))
