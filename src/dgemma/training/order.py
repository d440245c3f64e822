"""What comes when: from the number of a presentation to an epoch and a record, without any state.

Presentations are counted from 0 over the whole run. Each epoch presents every record once, in an order of its
own: a permutation that is computed, not stored, so a run resumes at presentation p from p alone. All numbers
come from one hash written here; Python's and numpy's generators may change between versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import islice
from typing import TypeVar

from dgemma.errors import InputError

T = TypeVar("T")

_WORD = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # splitmix64's
# Small domains need more rounds than the usual four to look shuffled; they cost microseconds.
_ROUNDS = 12


class Use(IntEnum):
    """What a number is for; part of its hash, so that no two uses share one."""

    ORDER = 0
    REPLACEMENT = 1
    CHOICE = 2
    SHIFT = 3
    BUFFER = 4


def mix(*words: int) -> int:
    """64 random bits that depend on these words and nothing else: splitmix64's scrambler, chained."""
    state = 0
    for word in words:
        state = _scrambled((state ^ word) + _STEP & _WORD)
    return state


def below(limit: int, *words: int) -> int:
    """A random number in [0, limit); the bias is below limit / 2^64."""
    return mix(*words) * limit >> 64


def _scrambled(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31


class Permutation:
    """A random order of `count` numbers: a Feistel network on the next power of four, walked until inside."""

    def __init__(self, count: int, *key: int) -> None:
        self.count = count
        self._half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
        self._round_keys = tuple(mix(*key, number) for number in range(_ROUNDS))

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < self.count:
            raise IndexError(place)
        bits, mask = self._half_bits, (1 << self._half_bits) - 1
        while True:  # fewer than four rounds on average: the network's domain is at most four times `count`
            left, right = place >> bits, place & mask
            for key in self._round_keys:
                left, right = right, left ^ _scrambled(key ^ right) & mask
            place = left << bits | right
            if place < self.count:
                return place


# A batch's presentations share their epoch's keys.
_permutation = lru_cache(maxsize=8)(Permutation)


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order of records that can be read in any order."""

    num_records: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_records < 1:
            raise InputError(f"num_records is {self.num_records}; there must be at least one record.")
        check_seed(self.seed)

    def place(self, presentation: int) -> tuple[int, int]:
        """The epoch of a presentation, and which record it shows."""
        if presentation < 0:
            raise InputError(f"presentation is {presentation}; presentations are counted from 0.")
        epoch, place = divmod(presentation, self.num_records)
        if not self.shuffle:
            return epoch, place
        return epoch, _permutation(self.num_records, self.seed, Use.ORDER, epoch)[place]

    def replacements(self, presentation: int) -> Iterator[int]:
        """Every record once, for a presentation whose own has nothing to show.

        Another permutation than the order's: neighbours in a file are often alike, so after a stretch of
        records that are too long, the next one would be shown for all of them.
        """
        epoch, place = divmod(presentation, self.num_records)
        others = _permutation(self.num_records, self.seed, Use.REPLACEMENT, epoch)
        for offset in range(self.num_records):
            yield others[(place + offset) % self.num_records]


def shuffled(items: Iterable[T], *, buffer_len: int, seed: int, epoch: int) -> Iterator[T]:
    """A stream's items in a random order that looks `buffer_len` items ahead."""
    source = iter(items)
    buffer = list(islice(source, buffer_len))
    number = 0
    for item in source:
        slot = below(len(buffer), seed, Use.BUFFER, epoch, number)
        buffer[slot], item = item, buffer[slot]
        number += 1
        yield item
    while buffer:
        slot = below(len(buffer), seed, Use.BUFFER, epoch, number)
        buffer[slot], buffer[-1] = buffer[-1], buffer[slot]
        number += 1
        yield buffer.pop()


def check_seed(seed: int) -> None:
    if not 0 <= seed <= _WORD:
        raise InputError(f"seed is {seed}; it must be a whole number from 0 to 2^64 - 1.")
