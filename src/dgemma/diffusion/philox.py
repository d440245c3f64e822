"""Random numbers as a function of where they are used: Philox-4x32-10, counter-based.

A number depends on its seed and its counter only: not on the batch, the tile size, the shard, or what was
drawn before. All arithmetic is on int64, which every device has.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    mantissa, exponent = torch.frexp(x)  # mantissa in [1/2, 1)
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
