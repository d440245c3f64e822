"""Which replica has the longest prefix of a prompt in its cache, as far as the router knows.

A prompt that went to a replica is likely to be in its cache for a while: that is all the router remembers.
What it believes may be stale; then a request computes its prefix again, and nothing else happens. A choice
takes as long among a thousand replicas as among two.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from typing import Generic, TypeVar

Replica = TypeVar("Replica")


class PrefixRoutes(Generic[Replica]):
    """blocks: hashes that are remembered, least recently used first forgotten.

    per_block: replicas that are remembered for a block, the latest ones. Everybody's system prompt is soon
      on all of them.
    imbalance: a replica that runs so many more requests than another is not preferred for its prefix. In
      simulated fleets 2 to 4 gave the shortest answers, short prompts or long; with 8 a busy fleet answered
      later than one that was routed by load alone (docs/scale.md).
    """

    def __init__(
        self, *, blocks: int = 200_000, per_block: int = 8, imbalance: int = 3, seed: int = 0
    ) -> None:
        self._replicas_of: OrderedDict[bytes, dict[Replica, None]] = OrderedDict()
        self._max_blocks = blocks
        self._per_block = per_block
        self._imbalance = imbalance
        self._random = random.Random(seed)  # noqa: S311

    def __len__(self) -> int:
        return len(self._replicas_of)

    def choose(
        self, hashes: Sequence[bytes], loads: Mapping[Replica, int], replicas: Sequence[Replica]
    ) -> Replica:
        """hashes: of the prompt's blocks, each of all tokens up to its end. loads: running requests."""
        # Of two, not of all: those that several routers take for the least loaded would get a herd.
        two = self._random.sample(replicas, min(2, len(replicas)))
        less_loaded = min(two, key=loads.__getitem__)
        having = self._having(hashes, loads)
        if not having:
            return less_loaded
        best = min(having, key=loads.__getitem__)
        return best if loads[best] - loads[less_loaded] < self._imbalance else less_loaded

    def sent(self, hashes: Sequence[bytes], replica: Replica) -> None:
        """The prompt with these blocks went to `replica`."""
        for key in reversed(hashes):  # as in the cache: a chain is forgotten from its end
            replicas = self._replicas_of.setdefault(key, {})
            replicas.pop(replica, None)
            replicas[replica] = None
            if len(replicas) > self._per_block:
                del replicas[next(iter(replicas))]
            self._replicas_of.move_to_end(key)
        while len(self._replicas_of) > self._max_blocks:
            self._replicas_of.popitem(last=False)

    def _having(self, hashes: Sequence[bytes], among: Container[Replica]) -> list[Replica]:
        """The replicas that have most of the prompt. A block's hash stands for all before it too.

        Those that are gone are left out here, and forgotten as their blocks grow old.
        """
        for key in reversed(hashes):
            having = [replica for replica in self._replicas_of.get(key, ()) if replica in among]
            if having:
                return having
        return []
