"""Prefix caching: the KV blocks of earlier contexts, found by the hash of their tokens.

Full-attention layers need every block of a prefix, sliding-window layers only its *tail*: the blocks that
hold the last window before its end. A prefix of i blocks can be reused if the full pool still has all i
blocks and the window pool still has the tail at that length. Tails are kept only where another request is
likely to continue (ends of prompts and of turns): elsewhere the window blocks were freed as the window slid.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from dgemma.engine.block_pool import BlockPool
from dgemma.images.preprocess import PlacedImage

BLOCK_SIZE = 32  # tokens
_TOKEN_BYTES = array("q").itemsize
BlockHash = bytes
"""Hash of all tokens up to the end of a block: equal hashes, equal contents."""


class BlockHashChain:
    """The hashes of a growing sequence's complete blocks."""

    def __init__(self, block_size: int, root: bytes = b"", images: Sequence[PlacedImage] = ()) -> None:
        """root: what the contents depend on besides the tokens, such as the adapter.

        images: in ascending order. All images have the same tokens, so their digests are hashed, too.
        """
        self.hashes: list[BlockHash] = []
        self._block_size = block_size
        self._last = hashlib.blake2b(root, digest_size=16).digest()
        self._rest: list[int] = []  # tokens of the incomplete last block
        self._images = images

    def add(self, tokens: Sequence[int]) -> None:
        pending = [*self._rest, *tokens]
        complete = len(pending) // self._block_size * self._block_size
        contents = array("q", pending[:complete]).tobytes()
        block = self._block_size * _TOKEN_BYTES
        for start in range(0, len(contents), block):
            content = contents[start : start + block] + self._images_in_block(len(self.hashes))
            self._last = hashlib.blake2b(self._last + content, digest_size=16).digest()
            self.hashes.append(self._last)
        self._rest = pending[complete:]

    def image_around(self, length: int) -> PlacedImage | None:
        """The image that a prefix of `length` tokens would cut.

        Its tokens attend to all of it, so none of them may be computed without the others.
        """
        return next((image for image in self._images if image.start < length < image.stop), None)

    def _images_in_block(self, index: int) -> bytes:
        """Where the images of a block begin, and their digests."""
        first, stop = index * self._block_size, (index + 1) * self._block_size
        found = [image for image in self._images if image.start < stop and first < image.stop]
        return b"".join(array("q", [image.start]).tobytes() + image.patches.digest for image in found)


class PrefixCache:
    """Maps block hashes to blocks. Evicts the least recently used, and a chain from its end."""

    def __init__(self, full: BlockPool, window: BlockPool) -> None:
        self._full_pool = full
        self._window_pool = window
        self._full: OrderedDict[BlockHash, int] = OrderedDict()
        self._tails: OrderedDict[BlockHash, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._full)

    @property
    def num_tails(self) -> int:
        return len(self._tails)

    def match(self, hashes: Sequence[BlockHash]) -> tuple[int, int]:
        """-> the number of leading blocks that can be reused, tail included, and the number cached at all."""
        reusable = cached = 0
        for count, key in enumerate(hashes, 1):
            if key not in self._full:
                break
            cached = count
            if key in self._tails:
                reusable = count
        return reusable, cached

    def blocks_of(self, hashes: Sequence[BlockHash]) -> tuple[list[int], tuple[int, ...]]:
        """Full blocks and tail of a cached prefix."""
        return [self._full[key] for key in hashes], self._tails[hashes[-1]]

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """Mark as most recently used."""
        # From the end to the root: so a chain is evicted from its end, and never a block before its
        # successors.
        for key in reversed(hashes):
            if key in self._full:
                self._full.move_to_end(key)
            if key in self._tails:
                self._tails.move_to_end(key)

    def add_block(self, key: BlockHash, block: int) -> None:
        """Cache a complete block. If the same contents are cached already, that entry stays."""
        if key not in self._full:
            self._full[key] = block
            self._full_pool.add_cache_ref(block)

    def add_tail(self, key: BlockHash, blocks: Sequence[int]) -> None:
        if key not in self._tails:
            self._tails[key] = tuple(blocks)
            for block in blocks:
                self._window_pool.add_cache_ref(block)

    def evict_full_block(self) -> None:
        """Evict the least recently used block that no sequence uses."""
        while self._full_pool.in_use(self._full[key := next(iter(self._full))]):
            self._full.move_to_end(key)
        self._full_pool.drop_cache_ref(self._full.pop(key))
        if key in self._tails:  # unusable without the block before its end
            self._evict_tail(key)

    def evict_window_block(self) -> None:
        """Evict tails, least recently used first, until a block is free. An incomplete tail is useless."""
        while not self._window_pool.num_free:
            while all(map(self._window_pool.in_use, self._tails[key := next(iter(self._tails))])):
                self._tails.move_to_end(key)
            self._evict_tail(key)

    def _evict_tail(self, key: BlockHash) -> None:
        for block in self._tails.pop(key):
            self._window_pool.drop_cache_ref(block)
