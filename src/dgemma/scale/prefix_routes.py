"""Which replica has the longest prefix of a prompt in its cache, as far as the router knows.

A prompt that went to a replica is likely to be in its cache for a while: that is all the router remembers.
What it believes may be stale; then a request computes its prefix again, and nothing else happens.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

Replica = TypeVar("Replica")


class PrefixRoutes(Generic[Replica]):
    """blocks: hashes that are remembered, least recently used first forgotten.

    imbalance: a replica that runs so many more requests than the least loaded is not preferred for its
      prefix.
    """

    def __init__(self, *, blocks: int = 200_000, imbalance: int = 8, seed: int = 0) -> None:
        self._replicas_of: OrderedDict[bytes, dict[Replica, None]] = OrderedDict()
        self._max_blocks = blocks
        self._imbalance = imbalance
        self._random = random.Random(seed)  # noqa: S311

    def __len__(self) -> int:
        return len(self._replicas_of)

    def choose(self, hashes: Sequence[bytes], loads: Mapping[Replica, int]) -> list[Replica]:
        """The replicas of `loads` (running requests) in the order to try them."""
        rest = sorted(loads, key=lambda replica: (loads[replica], self._random.random()))
        least = loads[rest[0]]
        matches = self._matches(hashes, loads)
        best = max(matches.values(), default=0)
        preferred = [
            replica
            for replica in rest
            if best and matches.get(replica) == best and loads[replica] - least < self._imbalance
        ]
        if not preferred:  # the less loaded of two: the least loaded of all would get a herd
            two = self._random.sample(rest, min(2, len(rest)))
            preferred = [min(two, key=loads.__getitem__)]
        first = preferred[0]
        return [first, *(replica for replica in rest if replica != first)]

    def sent(self, hashes: Sequence[bytes], replica: Replica) -> None:
        """The prompt with these blocks went to `replica`."""
        for key in reversed(hashes):  # as in the cache: a chain is forgotten from its end
            self._replicas_of.setdefault(key, {})[replica] = None
            self._replicas_of.move_to_end(key)
        while len(self._replicas_of) > self._max_blocks:
            self._replicas_of.popitem(last=False)

    def lost(self, replica: Replica) -> None:
        """A replica is gone, and its cache."""
        for key in [key for key, replicas in self._replicas_of.items() if replica in replicas]:
            del self._replicas_of[key][replica]
            if not self._replicas_of[key]:
                del self._replicas_of[key]

    def _matches(self, hashes: Sequence[bytes], among: Mapping[Replica, int]) -> dict[Replica, int]:
        """The number of leading blocks that each replica has."""
        found: dict[Replica, int] = {}
        alive = set(among)
        for count, key in enumerate(hashes, 1):
            alive &= self._replicas_of.get(key, {}).keys()
            if not alive:
                break
            found.update(dict.fromkeys(alive, count))
        return found
