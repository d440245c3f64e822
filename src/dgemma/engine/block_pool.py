"""A pool of KV cache blocks: reference counts and reservations. The tensors are in `kv_store`."""

from __future__ import annotations


class BlockPool:
    """Blocks 0 to `size` - 1. A block is free, or it has at least one reference.

    A sequence *owns* the blocks it writes and *shares* the blocks of a cached prefix. The prefix cache holds
    *cache references* to blocks whose contents may be reused; it evicts them when blocks are needed.

    On admission a sequence reserves the largest number of blocks it will own at any time. A shared block
    counts once, whatever the number of sequences that share it. Reserved and shared blocks together never
    exceed `size`, so an allocation within a reservation always finds a block that is free or can be evicted:
    an admitted sequence never has to be preempted.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._num_reserved = 0
        self._free = list(range(size - 1, -1, -1))
        self._owned = [False] * size
        self._num_sharers = [0] * size
        self._num_cache_refs = [0] * size
        self._num_owned = 0
        self._num_shared = 0
        self._num_both = 0  # owned by one sequence and shared by another

    @property
    def num_available(self) -> int:
        """Blocks that can still be reserved or shared."""
        return self.size - self._num_reserved - self._num_shared

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that a sequence owns or shares."""
        return self._num_owned + self._num_shared - self._num_both

    def grow(self, size: int) -> None:
        """Add free blocks up to `size`."""
        more = size - self.size
        self._free[:0] = range(size - 1, self.size - 1, -1)
        self._owned += [False] * more
        self._num_sharers += [0] * more
        self._num_cache_refs += [0] * more
        self.size = size

    def in_use(self, block: int) -> bool:
        return self._owned[block] or self._num_sharers[block] > 0

    def is_shared(self, block: int) -> bool:
        return self._num_sharers[block] > 0

    def reserve(self, count: int) -> None:
        assert 0 <= count <= self.num_available, "the reservation exceeds the available blocks"
        self._num_reserved += count

    def unreserve(self, count: int) -> None:
        assert self._num_owned <= self._num_reserved - count, "reserved blocks are still owned"
        self._num_reserved -= count

    def allocate(self) -> int:
        """Take ownership of a free block. If there is none, the caller evicts a cached block first."""
        assert self._num_owned < self._num_reserved, "more blocks than were reserved"
        block = self._free.pop()
        self._owned[block] = True
        self._num_owned += 1
        return block

    def release(self, block: int) -> None:
        """End the ownership of a block."""
        assert self._owned[block]
        self._owned[block] = False
        self._num_owned -= 1
        self._num_both -= self.is_shared(block)
        self._free_if_unreferenced(block)

    def share(self, block: int) -> None:
        """Read a block that another sequence owns or that the prefix cache refers to."""
        assert self.in_use(block) or self._num_cache_refs[block], "a free block has no contents to share"
        if not self._num_sharers[block]:
            assert self.num_available, "no block is available for sharing"
            self._num_shared += 1
            self._num_both += self._owned[block]
        self._num_sharers[block] += 1

    def unshare(self, block: int) -> None:
        assert self._num_sharers[block]
        self._num_sharers[block] -= 1
        if not self._num_sharers[block]:
            self._num_shared -= 1
            self._num_both -= self._owned[block]
            self._free_if_unreferenced(block)

    def add_cache_ref(self, block: int) -> None:
        """An entry of the prefix cache refers to the block. Only a block in use has contents to cache."""
        assert self.in_use(block)
        self._num_cache_refs[block] += 1

    def drop_cache_ref(self, block: int) -> None:
        assert self._num_cache_refs[block]
        self._num_cache_refs[block] -= 1
        self._free_if_unreferenced(block)

    def _free_if_unreferenced(self, block: int) -> None:
        if not self.in_use(block) and not self._num_cache_refs[block]:
            self._free.append(block)
