"""The KV cache of all sequences: block tables over two block pools, the prefix cache, and their capacity.

Full-attention layers need every token of a sequence, sliding-window layers the last window: hence two pools.
Only encoding writes blocks; a complete block never changes again. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dgemma.engine.block_pool import BlockPool
from dgemma.engine.prefix_cache import BlockHashChain, PrefixCache
from dgemma.errors import InputError
from dgemma.model.config import LayerKind, ModelConfig

# The full pool is at most this many times what all sequences can use: more would never be reused.
_MAX_OVERSIZE = 2


@dataclass
class BlockTable:
    """The blocks of one sequence. Its i-th block holds the positions from i * block_size on."""

    chain: BlockHashChain
    max_len: int  # tokens the context may grow to
    length: int  # tokens encoded
    num_cached: int  # of these, found in the prefix cache
    full: list[int]
    window: dict[int, int]  # by index in the sequence; only blocks that the next token can attend to
    full_reserved: int
    window_reserved: int
    num_shared_full: int  # the leading full blocks that are shared, not owned
    branch: int  # up to here the prefix cache had the same text without a tail: others may continue here
    shared_window: set[int] = field(default_factory=set)  # indices
    num_added: int = 0  # leading complete blocks that were added to the prefix cache


class KVCacheManager:
    def __init__(
        self,
        *,
        block_size: int,
        window: int,
        full_blocks: int = 0,
        window_blocks: int = 0,
        max_gathered: int | None = None,
        reuse: bool = True,
    ) -> None:
        """window: positions a token of a sliding-window layer attends to, itself included.

        max_gathered: tokens of all sequences together, each counted on its own. A running canvas reads a copy
        of its context, including blocks it shares. reuse: enable prefix caching.
        """
        self.block_size = block_size
        self.full = BlockPool(full_blocks)
        self.window = BlockPool(window_blocks)
        self.prefix_cache = PrefixCache(self.full, self.window)
        self._window = window
        self._max_gathered = max_gathered
        self._num_gathered = 0
        self._reuse = reuse

    @property
    def max_len(self) -> int:
        """The longest context a sequence may have."""
        tokens = self.full.size * self.block_size
        return tokens if self._max_gathered is None else min(tokens, self._max_gathered)

    def ensure_capacity(self, lengths: Sequence[int]) -> None:
        """Grow the pools for sequences of these lengths at once, and as much again for the prefix cache."""
        for pool, count in ((self.full, self._num_blocks), (self.window, self._num_window_blocks)):
            in_use = pool.size - pool.num_available
            pool.grow(max(pool.size, in_use + 2 * sum(map(count, lengths))))

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` could be allocated if it were alone."""
        return num_tokens <= self.max_len and self._num_window_blocks(num_tokens) <= self.window.size

    def allocate(self, chain: BlockHashChain, num_tokens: int, reusable: int) -> BlockTable | None:
        """Reserve blocks for a sequence that may grow to `num_tokens`; None if too few are available now.

        Of its first `reusable` tokens, cached ones are shared and not computed again.
        """
        if self._max_gathered is not None and self._num_gathered + num_tokens > self._max_gathered:
            return None
        num_reusable, num_known = self.prefix_cache.match(chain.hashes[: reusable // self.block_size])
        hashes = chain.hashes[:num_reusable]
        own_window = self._num_window_blocks(num_tokens)
        if hashes and own_window + self._tail_len(len(hashes)) > self.window.size:
            hashes = []  # the tail and the sequence's own window would never fit together
        full, tail = self.prefix_cache.blocks_of(hashes) if hashes else ([], ())
        full_reserved, window_reserved = self._num_blocks(num_tokens) - len(full), own_window
        needs = (self.full, full_reserved, full), (self.window, window_reserved, tail)
        for pool, reserved, shared in needs:
            if reserved + sum(not pool.is_shared(block) for block in shared) > pool.num_available:
                return None
        for pool, reserved, shared in needs:
            pool.reserve(reserved)
            for block in shared:
                pool.share(block)
        self._num_gathered += num_tokens
        self.prefix_cache.touch(hashes)
        indices = range(len(full) - len(tail), len(full))
        return BlockTable(
            chain=chain,
            max_len=num_tokens,
            length=len(full) * self.block_size,
            num_cached=len(full) * self.block_size,
            full=full,
            window=dict(zip(indices, tail, strict=True)),
            full_reserved=full_reserved,
            window_reserved=window_reserved,
            num_shared_full=len(full),
            branch=num_known * self.block_size,
            shared_window=set(indices),
        )

    def extend(self, table: BlockTable, length: int) -> None:
        """Allocate blocks for tokens up to `length`; free window blocks that no later token attends to."""
        first, end = self._first_visible(length), self._num_blocks(length)
        for index in [i for i in table.window if i < first]:
            self._free_window_block(table, index)
        for index in range(max(first, table.length // self.block_size), end):
            if index not in table.window:
                if not self.window.num_free:
                    self.prefix_cache.evict_window_block()
                table.window[index] = self.window.allocate()
        while len(table.full) < end:
            if not self.full.num_free:
                self.prefix_cache.evict_full_block()
            table.full.append(self.full.allocate())
        table.length = length

    def cache_blocks(self, table: BlockTable, *, tail: bool) -> None:
        """Add complete blocks to the prefix cache; with `tail`, also what continuing after them needs."""
        if not self._reuse:
            return
        complete = min(table.length // self.block_size, len(table.chain.hashes))
        # Without a tail only new blocks are added: a long context would be scanned in every step.
        for index in range(0 if tail else table.num_added, complete):
            self.prefix_cache.add_block(table.chain.hashes[index], table.full[index])
        table.num_added = complete
        if not tail or table.chain.image_around(complete * self.block_size) is not None:
            return
        indices = range(max(0, self._first_visible(complete * self.block_size)), complete)
        if complete and all(index in table.window for index in indices):
            self.prefix_cache.add_tail(table.chain.hashes[complete - 1], [table.window[i] for i in indices])
        self.prefix_cache.touch(table.chain.hashes[:complete])

    def free(self, table: BlockTable) -> None:
        for index in list(table.window):
            self._free_window_block(table, index)
        for index, block in enumerate(table.full):
            if index < table.num_shared_full:
                self.full.unshare(block)
            else:
                self.full.release(block)
        self.full.unreserve(table.full_reserved)
        self.window.unreserve(table.window_reserved)
        self._num_gathered -= table.max_len
        table.full = []

    def _free_window_block(self, table: BlockTable, index: int) -> None:
        block = table.window.pop(index)
        if index in table.shared_window:
            table.shared_window.discard(index)
            self.window.unshare(block)
        else:
            self.window.release(block)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _first_visible(self, length: int) -> int:
        """The first block that a token after `length`, or after its last complete block, attends to."""
        complete = length // self.block_size * self.block_size
        return max(0, complete - self._window + 1) // self.block_size

    def _tail_len(self, num_blocks: int) -> int:
        return num_blocks - self._first_visible(num_blocks * self.block_size)

    def _num_window_blocks(self, num_tokens: int) -> int:
        """The most window blocks that a sequence of `num_tokens` owns at any time."""
        return min(self._num_blocks(num_tokens), max_window_blocks(self._window, self.block_size))


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Sizes of the KV cache."""

    full_blocks: int
    window_blocks: int
    max_gathered: int
    """Tokens of context that running canvases may hold as copies, besides the blocks."""


def token_bytes(config: ModelConfig, kind: LayerKind, item_bytes: int) -> int:
    """Keys and values of one token in all layers of a kind."""
    sizes = (2 * shape.num_kv_heads * shape.head_dim for shape in config.layers if shape.kind is kind)
    return item_bytes * sum(sizes)


def max_window_blocks(window: int, block_size: int) -> int:
    """The most blocks of sliding-window layers that a sequence has at any time."""
    return -(-(window - 1) // block_size) + 2


def plan_capacity(
    config: ModelConfig, *, num_bytes: int, max_num_seqs: int, block_size: int, item_bytes: int, max_len: int
) -> Capacity:
    """The KV cache that fits into `num_bytes` for `max_num_seqs` sequences of at most `max_len` tokens.

    Window blocks come first: per sequence its own, the copy its canvas reads, and the tail of a cached
    prefix. One half of the rest are blocks of full-attention layers, the other half copies of them.
    """
    per_seq = min(max_window_blocks(config.window, block_size), -(-max_len // block_size))
    window_blocks = 2 * max_num_seqs * per_seq
    sliding_token = token_bytes(config, LayerKind.SLIDING, item_bytes)
    full_token = token_bytes(config, LayerKind.FULL, item_bytes)
    window_bytes = (window_blocks + max_num_seqs * per_seq) * block_size * sliding_token
    # Each copy has space for its canvas.
    window_bytes += max_num_seqs * config.canvas_len * (sliding_token + full_token)
    most_used = max_num_seqs * -(-max_len // block_size)
    full_blocks = _MAX_OVERSIZE * most_used
    if full_token:
        full_blocks = min(full_blocks, (num_bytes - window_bytes) // (2 * full_token * block_size))
    if window_bytes > num_bytes or full_blocks * block_size < min(max_len, 2 * config.canvas_len):
        raise InputError(
            f"{num_bytes / 1e9:.1f} GB of memory are too little for {max_num_seqs} sequences at once, whose "
            f"windows alone take {window_bytes / 1e9:.1f} GB. "
            "Lower --max-num-seqs or raise --memory-fraction.",
            field="max_num_seqs",
        )
    return Capacity(
        full_blocks=full_blocks,
        window_blocks=window_blocks,
        max_gathered=min(full_blocks, most_used) * block_size,
    )
