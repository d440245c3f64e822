"""Counter-based random numbers: Philox-4x32-10, keyed by seed, canvas, step, purpose and position.

A number depends on its seed and its counter only: not on the batch, the tile size, the shard, or what was
sampled before. All arithmetic is on int64, which every device has.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma.kernels.elementwise import Counters, kernels_for

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four random 32-bit words (as int64) for each counter of four words and key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for number in range(_ROUNDS):
        if number:
            k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low word of a 32 x 32 bit product, without ever passing 63 bits."""
    upper = (a >> 16) * b
    lower = (a & 0xFFFF) * b
    return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & _MASK


def to_unit(words: Tensor) -> Tensor:
    """fp32 strictly between 0 and 1, from the upper 23 bits: every value has an exact neighbour."""
    return ((words >> 9).float() + 0.5) * 2.0**-23


def to_exponential(words: Tensor) -> Tensor:
    """Log of a unit exponential variable, for races in the log domain: log(-log(u))."""
    return exact_log(-exact_log(to_unit(words)))


def exact_log(x: Tensor) -> Tensor:
    """Natural logarithm of positive normal numbers, with the same bits everywhere.

    A library's logarithm promises no last bit, and another device has another library. Each operation
    here is correctly rounded by the standard, so the result is fixed.
    """
    bits = x.view(torch.int32)  # as torch.frexp, which MPS lacks
    exponent = (bits >> 23) - 126
    mantissa = ((bits & 0x7FFFFF) | 0x3F000000).view(torch.float32)  # in [1/2, 1)
    low = mantissa < 0.70710678
    mantissa = torch.where(low, mantissa * 2, mantissa)
    exponent = torch.where(low, exponent - 1, exponent)
    s = (mantissa - 1) / (mantissa + 1)  # within 0.1716 of zero: the series ends quickly
    square = s * s
    series = square * (1 / 9) + 1 / 7
    series = series * square + 1 / 5
    series = series * square + 1 / 3
    series = series * square + 1
    return 2 * s * series + exponent * 0.69314718


def to_below(words: Tensor, limit: int) -> Tensor:
    """Whole numbers in [0, limit); the bias is below limit / 2^32."""
    return (words * limit) >> 32


# Shapes: rows = canvases, canvas = positions of a canvas.


class NoiseStream(enum.IntEnum):
    """What a random number is for. Part of its counter, so that no two purposes share a number."""

    OPEN = 0
    RENOISE = 1
    CHUNK_RACE = 2
    TOKEN_RACE = 3
    CLASS_RACE = 4


# Spare streams can be added without changing the numbers of those that exist.
_NUM_STREAMS = 16


@dataclass(frozen=True)
class NoiseKey:
    """Seed and counter prefix of each row; all [rows], int64."""

    seed: Tensor
    canvas: Tensor  # index of the canvas in its answer
    step: Tensor  # index of the step in its canvas

    def row(self, row: int) -> NoiseKey:
        """The key of one row."""
        only = slice(row, row + 1)
        return NoiseKey(self.seed[only], self.canvas[only], self.step[only])


def noise_key(
    seeds: Sequence[int], canvases: Sequence[int], steps: Sequence[int], device: torch.device
) -> NoiseKey:
    def tensor(values: Sequence[int]) -> Tensor:
        # A seed of 64 bits is kept as the signed number of the same bits.
        return torch.tensor([(v + (1 << 63)) % (1 << 64) - (1 << 63) for v in values], device=device)

    return NoiseKey(tensor(seeds), tensor(canvases), tensor(steps))


def random_tokens(key: NoiseKey, stream: NoiseStream, canvas_len: int, vocab_size: int) -> Tensor:
    """One uniform token per position [rows, canvas]."""
    positions = torch.arange(canvas_len, device=key.seed.device)
    quads = torch.zeros((len(key.seed), canvas_len, 1), dtype=torch.int64, device=key.seed.device)
    kernels = kernels_for(quads)
    if kernels is not None:
        words = kernels.random_words(_counters(key, stream, positions, quads))
    else:
        words = _words(key, stream, positions, quads)
    return to_below(words[..., 0], vocab_size)


def race_times(key: NoiseKey, stream: NoiseStream, index: Tensor, positions: Tensor | None = None) -> Tensor:
    """Log of a unit exponential for each `index` [rows, canvas, n]: the index of a chunk or a token.

    The indices of a position are neighbours, and begin at a multiple of 4.
    positions: which ones of the canvas these are; None: all, from the first.
    """
    if positions is None:
        positions = torch.arange(index.shape[1], device=index.device)
    # Four neighbours share one Philox call: index i takes output i % 4 of counter i // 4.
    quads = (index[..., ::4] >> 2).expand(len(key.seed), -1, -1)
    kernels = kernels_for(quads)
    if kernels is not None:
        times = kernels.race_times(_counters(key, stream, positions, quads))
    else:
        times = to_exponential(_words(key, stream, positions, quads))
    return times[..., : index.shape[-1]]


def _counters(key: NoiseKey, stream: NoiseStream, positions: Tensor, quads: Tensor) -> Counters:
    return Counters(key.seed, key.canvas * _NUM_STREAMS + stream, key.step, positions, quads)


def _words(key: NoiseKey, stream: NoiseStream, positions: Tensor, quads: Tensor) -> Tensor:
    """The four words of each counter: [rows, canvas, n] -> [rows, canvas, 4 n]. Reference of the kernel."""
    counters = _counters(key, stream, positions, quads)
    seed, prefix, step = (word.view(-1, 1, 1).expand_as(quads) for word in counters[:3])
    counter = (quads, positions[None, :, None].expand_as(quads), step, prefix)
    words = philox(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    return torch.stack(words, dim=-1).flatten(-2)
