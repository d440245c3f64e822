"""The generator equals its published vectors, and a number depends on its place only."""

from __future__ import annotations

import pytest
import torch

from dgemma.sampling.rng import (
    NoiseKey,
    NoiseStream,
    _words,
    exact_log,
    noise_key,
    philox,
    race_times,
    random_tokens,
    to_below,
    to_exponential,
    to_unit,
)

CPU = torch.device("cpu")

# Known-answer vectors of Philox-4x32-10 published with Random123.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(int(word, 16)) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_published_vectors(counter: str, key: str, expected: str) -> None:
    found = philox(words(counter), words(key))  # type: ignore[arg-type]
    assert [int(word) for word in found] == [int(word) for word in words(expected)]


def key(*seeds: int, canvas: int = 0, step: int = 0) -> NoiseKey:
    return noise_key(seeds, [canvas] * len(seeds), [step] * len(seeds), CPU)


def test_a_rows_numbers_do_not_depend_on_its_company() -> None:
    index = torch.arange(260).expand(3, 7, 260)
    together = race_times(key(5, 6, 7), NoiseStream.CHUNK_RACE, index)
    alone = race_times(key(6), NoiseStream.CHUNK_RACE, index[:1])
    tokens = random_tokens(key(5, 6, 7), NoiseStream.OPEN, 9, 1000)
    assert torch.equal(tokens[1:2], random_tokens(key(6), NoiseStream.OPEN, 9, 1000)), "integers differ"
    assert torch.equal(together[1:2], alone), (together[1:2] - alone).abs().max()


def test_the_key_of_one_row_is_its_own() -> None:
    keys = noise_key([5, 6, 7], [1, 2, 3], [4, 8, 9], CPU)
    for row in range(3):
        alone = keys.row(row)
        assert [part.tolist() for part in (alone.seed, alone.canvas, alone.step)] == [
            [part[row].item()] for part in (keys.seed, keys.canvas, keys.step)
        ]


def test_a_part_of_the_words_has_the_numbers_of_the_whole() -> None:
    whole = race_times(key(1), NoiseStream.TOKEN_RACE, torch.arange(4096).expand(1, 3, 4096))
    part = race_times(key(1), NoiseStream.TOKEN_RACE, torch.arange(1024, 2048).expand(1, 3, 1024))
    assert torch.equal(whole[..., 1024:2048], part)


def test_every_coordinate_changes_the_numbers() -> None:
    base = random_tokens(key(1), NoiseStream.OPEN, 64, 1 << 18)
    others = [
        random_tokens(key(2), NoiseStream.OPEN, 64, 1 << 18),
        random_tokens(key(1 + (1 << 40)), NoiseStream.OPEN, 64, 1 << 18),
        random_tokens(key(1, canvas=1), NoiseStream.OPEN, 64, 1 << 18),
        random_tokens(key(1, step=1), NoiseStream.OPEN, 64, 1 << 18),
        random_tokens(key(1), NoiseStream.RENOISE, 64, 1 << 18),
    ]
    for other in others:
        assert (base == other).float().mean() < 0.05
    assert len(set(base.flatten().tolist())) > 60  # positions differ too


STREAMS = {"OPEN": 0, "RENOISE": 1, "CHUNK_RACE": 2, "TOKEN_RACE": 3, "CLASS_RACE": 4}


@pytest.mark.parametrize("seed", [5, 1 << 40, (1 << 63) - 2, (1 << 63) + 9, (1 << 64) - 1])
@pytest.mark.parametrize("name", STREAMS)
def test_a_seed_keeps_its_numbers_across_versions(seed: int, name: str) -> None:
    """The layout of key and counter is a promise: else a seed of today has another text tomorrow."""
    stream, canvas, step = NoiseStream[name], 3, 2
    half, prefix = (1 << 32) - 1, canvas * 16 + STREAMS[name]

    def published(quad: int, position: int) -> list[int]:
        counter = (quad, position, step, prefix)
        found = philox(
            tuple(map(torch.tensor, counter)),  # type: ignore[arg-type]
            (torch.tensor(seed & half), torch.tensor(seed >> 32 & half)),
        )
        return [int(word) for word in found]

    row = key(seed, canvas=canvas, step=step)
    tokens = random_tokens(row, stream, 4, 1 << 18)
    assert tokens.tolist() == [[published(0, position)[0] >> 14 for position in range(4)]]
    quads = torch.tensor([2, 7]).expand(1, 3, 2)
    words = torch.tensor([[published(quad, position) for quad in (2, 7)] for position in range(3)])
    assert torch.equal(_words(row, stream, torch.arange(3), quads)[0], words.flatten(1))
    index = torch.arange(8, 12).expand(1, 3, 4)  # the four of quad 2
    assert torch.equal(race_times(row, stream, index)[0], to_exponential(words[:, 0]))


def test_seeds_of_64_bits_are_taken_whole() -> None:
    for seed in (0, -1, (1 << 64) - 1, 1 << 63):
        random_tokens(key(seed), NoiseStream.OPEN, 4, 10)
    assert torch.equal(
        random_tokens(key(-1), NoiseStream.OPEN, 4, 10),
        random_tokens(key((1 << 64) - 1), NoiseStream.OPEN, 4, 10),
    )


def test_units_stay_inside_and_tokens_cover_their_range() -> None:
    edges = torch.tensor([0, (1 << 32) - 1])
    assert 0 < to_unit(edges)[0] < to_unit(edges)[1] < 1
    assert to_below(edges, 262_144).tolist() == [0, 262_143]
    tokens = random_tokens(key(*range(40)), NoiseStream.RENOISE, 256, 7)
    counts = torch.bincount(tokens.flatten(), minlength=7).double()
    expected = tokens.numel() / 7
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 22.5  # 0.1 % point of 6 degrees of freedom


def test_the_exact_logarithm_is_a_logarithm() -> None:
    x = torch.cat((torch.logspace(-30, 30, 20_000, base=2), to_unit(torch.arange(0, 1 << 32, 1 << 20))))
    truth = x.double().log()
    error = (exact_log(x) - truth).abs() / truth.abs().clamp(min=1e-3)
    assert error.max() < 1e-6


def test_the_exact_logarithm_takes_a_number_apart_as_frexp_does() -> None:
    powers = 2.0 ** torch.arange(-126, 128)
    border = powers * 0.70710678  # where one mantissa is doubled and the next is not
    x = torch.cat([powers, powers * 1.9999999, border[1:], to_unit(torch.randint(0, 1 << 32, (5000,)))])
    mantissa, exponent = torch.frexp(x)
    low = mantissa < 0.70710678
    s = (torch.where(low, mantissa * 2, mantissa) - 1) / (torch.where(low, mantissa * 2, mantissa) + 1)
    square = s * s
    series = torch.full_like(x, 1 / 9)
    for divisor in (7, 5, 3, 1):
        series = series * square + 1 / divisor
    assert torch.equal(exact_log(x), 2 * s * series + torch.where(low, exponent - 1, exponent) * 0.69314718)


def test_the_exact_logarithm_does_not_feel_its_place_in_memory() -> None:
    x = to_unit(torch.randint(1 << 32, (5001,)))
    whole = exact_log(x)
    for start in range(1, 40):
        assert torch.equal(exact_log(x[start:]), whole[start:])
        assert torch.equal(exact_log(x[start : start + 1]), whole[start : start + 1])
