"""The tensors of the KV cache blocks: keys and values of every layer. Only encoding writes them."""

from __future__ import annotations

import torch
from torch import Tensor

from dgemma.engine.kv_cache_manager import BlockTable, KVCacheManager
from dgemma.model.config import LayerKind, ModelConfig
from dgemma.model.kv_cache import NewKeysValues, PastKeysValues

# Shapes of each layer's keys and values: [blocks, block_size, num_kv_heads, head_dim].


class KVStore:
    def __init__(
        self, config: ModelConfig, kv_manager: KVCacheManager, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._block_size = kv_manager.block_size
        self._kv_manager = kv_manager
        shapes = [(0, self._block_size, s.num_kv_heads, s.head_dim) for s in config.layers]
        self._keys = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        self._values = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        self.resize()

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in (*self._keys, *self._values))

    def resize(self) -> None:
        """Have tensors for all blocks of the pools."""
        counts = {LayerKind.FULL: self._kv_manager.full.size, LayerKind.SLIDING: self._kv_manager.window.size}
        for stores in (self._keys, self._values):
            for layer, shape in enumerate(self._config.layers):
                old = stores[layer]
                if len(old) < counts[shape.kind]:
                    stores[layer] = old.new_empty(counts[shape.kind], *old.shape[1:])
                    stores[layer][: len(old)] = old

    def read(self, table: BlockTable, space: int = 0, gap: int = 0) -> PastKeysValues:
        """Gather a copy of what the next token attends to, with `space` for tokens after it.

        gap: tokens that are still to be encoded before that token; their places are left empty.
        """
        block_size, length = self._block_size, table.length
        end = -(-length // block_size)
        blocks, firsts, skips = {}, {}, {}
        for kind in self._config.kinds:
            if kind is LayerKind.FULL:
                begin, least, held = 0, 0, table.full[:end]
            else:
                begin, least = min(table.window, default=0), max(0, length + gap - self._config.window + 1)
                held = [table.window[index] for index in range(begin, end)]
            blocks[kind] = torch.tensor(held, dtype=torch.int64, device=self._keys[0].device)
            firsts[kind] = max(begin * block_size, least)
            skips[kind] = firsts[kind] - begin * block_size

        def gather(store: Tensor, kind: LayerKind) -> Tensor:
            past = max(0, length - firsts[kind])
            row = store.new_zeros(length + gap - firsts[kind] + space, *store.shape[2:])
            row[:past] = store[blocks[kind]].flatten(0, 1)[skips[kind] :][:past]
            return row

        kinds = [shape.kind for shape in self._config.layers]
        return PastKeysValues(
            keys=tuple(map(gather, self._keys, kinds)),
            values=tuple(map(gather, self._values, kinds)),
            firsts=firsts,
            length=length + gap,
        )

    def write(
        self, table: BlockTable, start: int, stop: int, fresh: NewKeysValues, row: int, skip: int
    ) -> None:
        """Store positions `start` to `stop`, computed in `row` of `fresh` after `skip` tokens of padding.

        Positions whose window block was freed already are left out: no later token attends to them.
        """
        device = self._keys[0].device
        for kind in self._config.kinds:
            held = dict(enumerate(table.full)) if kind is LayerKind.FULL else table.window
            positions = [p for p in range(start, stop) if p // self._block_size in held]
            if not positions:
                continue
            blocks = torch.tensor([held[p // self._block_size] for p in positions], device=device)
            offsets = torch.tensor([p % self._block_size for p in positions], device=device)
            source = slice(positions[0] - start + skip, positions[-1] - start + skip + 1)
            for layer, shape in enumerate(self._config.layers):
                if shape.kind is kind:
                    self._keys[layer][blocks, offsets] = fresh.keys[layer][row, source]
                    self._values[layer][blocks, offsets] = fresh.values[layer][row, source]
