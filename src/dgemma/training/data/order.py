"""The order of training data: maps a presentation number to an epoch and a record, without state.

Presentations are counted from 0 over the whole run. Each epoch presents every record once, in an order of its
own: a permutation that is computed, not stored, so a run resumes at presentation p from p alone. All numbers
come from the hash in this module, because the generators of Python and numpy may change between versions.
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
# Small domains need more than the usual four rounds to be well shuffled; a round costs microseconds.
_ROUNDS = 12


class Purpose(IntEnum):
    """The use of a random number. It is part of the hash, so that no two uses share a number."""

    ORDER = 0
    REPLACEMENT = 1
    CHOICE = 2
    SHIFT = 3
    BUFFER = 4


def mix(*words: int) -> int:
    """64 random bits that depend on `words` alone: chained splitmix64 finalizers."""
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
    """A random permutation of `count` numbers: a cycle-walking Feistel network on the next power of four."""

    def __init__(self, count: int, *key: int) -> None:
        self.count = count
        self._half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
        self._round_keys = tuple(mix(*key, number) for number in range(_ROUNDS))

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < self.count:
            raise IndexError(place)
        bits, mask = self._half_bits, (1 << self._half_bits) - 1
        while True:  # fewer than four times on average: the network's domain is at most four times `count`
            left, right = place >> bits, place & mask
            for key in self._round_keys:
                left, right = right, left ^ _scrambled(key ^ right) & mask
            place = left << bits | right
            if place < self.count:
                return place


# The presentations of a batch share the keys of their epoch.
_permutation = lru_cache(maxsize=8)(Permutation)


@dataclass(frozen=True, kw_only=True)
class DataOrder:
    """The order of records with random access."""

    num_records: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_records < 1:
            raise InputError.about(
                "num_records", f"is {self.num_records}; there must be at least one record."
            )
        check_seed(self.seed)

    def place(self, presentation: int) -> tuple[int, int]:
        """The epoch and the record index of a presentation."""
        if presentation < 0:
            raise InputError.about("presentation", f"is {presentation}; presentations are counted from 0.")
        epoch, place = divmod(presentation, self.num_records)
        if not self.shuffle:
            return epoch, place
        return epoch, _permutation(self.num_records, self.seed, Purpose.ORDER, epoch)[place]

    def replacements(self, presentation: int) -> Iterator[int]:
        """Every record once: candidates for a presentation whose own record has no example.

        This is not the permutation of the order: otherwise the record after a run of records that are too
        long would replace all of them.
        """
        epoch, place = divmod(presentation, self.num_records)
        others = _permutation(self.num_records, self.seed, Purpose.REPLACEMENT, epoch)
        for offset in range(self.num_records):
            yield others[(place + offset) % self.num_records]


def shuffled(items: Iterable[T], *, buffer_len: int, seed: int, epoch: int) -> Iterator[T]:
    """The items of a stream, shuffled in a buffer of `buffer_len` items."""
    source = iter(items)
    buffer = list(islice(source, buffer_len))
    number = 0
    for item in source:
        slot = below(len(buffer), seed, Purpose.BUFFER, epoch, number)
        buffer[slot], item = item, buffer[slot]
        number += 1
        yield item
    while buffer:
        slot = below(len(buffer), seed, Purpose.BUFFER, epoch, number)
        buffer[slot], buffer[-1] = buffer[-1], buffer[slot]
        number += 1
        yield buffer.pop()


def check_seed(seed: int) -> None:
    if not 0 <= seed <= _WORD:
        raise InputError.about("seed", f"is {seed}; it must be a whole number from 0 to 2^64 - 1.")
