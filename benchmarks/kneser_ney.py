"""An n-gram model with interpolated Kneser-Ney smoothing: what a neural model has to beat.

N-grams are single 64-bit numbers, sorted once, found again by bisection: 15 million tokens take half a minute
and a gigabyte. The lowest order is smoothed with the uniform distribution, so no token has probability zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Shapes: n-grams = different n-grams of one order, histories = different beginnings of them.

Numbers = NDArray[np.int64]
Reals = NDArray[np.float64]


@dataclass(frozen=True)
class _Order:
    """One order's counts, and what its histories give away to the order below."""

    grams: Numbers  # [n-grams] sorted
    counts: Numbers  # [n-grams]; of the highest order occurrences, else different tokens in front
    histories: Numbers  # [histories] sorted
    totals: Numbers  # [histories] sum of counts
    followers: Numbers  # [histories] different tokens after
    discount: float


class KneserNey:
    def __init__(self, tokens: NDArray[Any], vocab_size: int, order: int = 5) -> None:
        if vocab_size**order >= 1 << 63:
            raise ValueError(f"{order}-grams over {vocab_size} tokens do not fit into 63 bits")
        self._words = vocab_size
        self.order = order
        highest, counts = np.unique(_packed(tokens, order, vocab_size), return_counts=True)
        self._orders = [_order(highest, counts, vocab_size)]
        grams = highest
        for size in range(order - 1, 0, -1):
            # How many different tokens stand in front: each gram of the order above is one of them.
            grams, counts = np.unique(grams % vocab_size**size, return_counts=True)
            self._orders.insert(0, _order(grams, counts, vocab_size))

    def log_probs(self, tokens: NDArray[Any]) -> Reals:
        """log p of each token but the first `order - 1`, in nats."""
        packed = _packed(tokens, self.order, self._words)
        found = np.full(len(packed), 1 / self._words)
        for size, counted in enumerate(self._orders, start=1):
            grams = packed % self._words**size
            count = _look_up(counted.grams, counted.counts, grams)
            total = _look_up(counted.histories, counted.totals, grams // self._words)
            followers = _look_up(counted.histories, counted.followers, grams // self._words)
            kept = np.maximum(count - counted.discount, 0)
            given_away = counted.discount * followers
            mixed = (kept + given_away * found) / np.maximum(total, 1)
            found = np.where(total > 0, mixed, found)
        logs: Reals = np.log(found)
        return logs


def _order(grams: Numbers, counts: NDArray[Any], vocab_size: int) -> _Order:
    histories, first, followers = np.unique(grams // vocab_size, return_index=True, return_counts=True)
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return _Order(
        grams=grams,
        counts=counts.astype(np.int64),
        histories=histories,
        totals=np.add.reduceat(counts, first).astype(np.int64),
        followers=followers.astype(np.int64),
        discount=once / (once + 2 * twice) if once else 0.5,  # Ney's estimate
    )


def _packed(tokens: NDArray[Any], size: int, vocab_size: int) -> Numbers:
    """The n-gram that ends at each token, as one number; the newest token is its last digit."""
    ids = np.asarray(tokens, np.int64)
    packed = np.zeros(max(0, len(ids) - size + 1), np.int64)
    for offset in range(size):
        packed = packed * vocab_size + ids[offset : offset + len(packed)]
    return packed


def _look_up(keys: Numbers, values: Numbers, wanted: Numbers) -> Numbers:
    """The values of `wanted`, 0 where a key is not there."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    found: Numbers = np.where(keys[at] == wanted, values[at], 0)
    return found
