"""The tensors behind the pages: keys and values of every layer. Only encoding writes them."""

from __future__ import annotations

import torch
from torch import Tensor

from dgemma.engine.memory import Holding, Memory
from dgemma.model.config import LayerKind, ModelConfig
from dgemma.model.context import Fresh
from dgemma.model.row_contexts import RowPast


class PageStore:
    def __init__(
        self, config: ModelConfig, memory: Memory, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._page_len = memory.page_len
        self._memory = memory
        shapes = [(0, memory.page_len, s.num_kv_heads, s.head_dim) for s in config.layers]
        self._keys = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        self._values = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        self.fit()

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in (*self._keys, *self._values))

    def fit(self) -> None:
        """Have tensors for all pages there are."""
        counts = {LayerKind.FULL: self._memory.full.size, LayerKind.SLIDING: self._memory.window.size}
        for stores in (self._keys, self._values):
            for layer, shape in enumerate(self._config.layers):
                old = stores[layer]
                if len(old) < counts[shape.kind]:
                    stores[layer] = old.new_empty(counts[shape.kind], *old.shape[1:])
                    stores[layer][: len(old)] = old

    def read(self, holding: Holding, room: int = 0, gap: int = 0) -> RowPast:
        """A copy of what the next token may see, with `room` for tokens behind it.

        With a `gap`: of what the token behind so many more may see, which are still to be written there.
        """
        page_len, length = self._page_len, holding.length
        end = -(-length // page_len)
        pages, firsts, skips = {}, {}, {}
        for kind in self._config.kinds:
            if kind is LayerKind.FULL:
                begin, least, table = 0, 0, holding.full[:end]
            else:
                begin, least = min(holding.window, default=0), max(0, length + gap - self._config.window + 1)
                table = [holding.window[number] for number in range(begin, end)]
            pages[kind] = torch.tensor(table, dtype=torch.int64, device=self._keys[0].device)
            firsts[kind] = max(begin * page_len, least)
            skips[kind] = firsts[kind] - begin * page_len

        def gather(store: Tensor, kind: LayerKind) -> Tensor:
            past = max(0, length - firsts[kind])
            row = store.new_zeros(length + gap - firsts[kind] + room, *store.shape[2:])
            row[:past] = store[pages[kind]].flatten(0, 1)[skips[kind] :][:past]
            return row

        kinds = [shape.kind for shape in self._config.layers]
        return RowPast(
            keys=tuple(map(gather, self._keys, kinds)),
            values=tuple(map(gather, self._values, kinds)),
            firsts=firsts,
            length=length + gap,
        )

    def write(self, holding: Holding, start: int, stop: int, fresh: Fresh, row: int, skip: int) -> None:
        """Keep positions `start` to `stop` of what was computed for `row` behind `skip` tokens of padding.

        A sliding layer's pages that are not held have slid out of sight: what belongs there is left out.
        """
        device = self._keys[0].device
        for kind in self._config.kinds:
            held = dict(enumerate(holding.full)) if kind is LayerKind.FULL else holding.window
            positions = [p for p in range(start, stop) if p // self._page_len in held]
            if not positions:
                continue
            pages = torch.tensor([held[p // self._page_len] for p in positions], device=device)
            places = torch.tensor([p % self._page_len for p in positions], device=device)
            taken = slice(positions[0] - start + skip, positions[-1] - start + skip + 1)
            for layer, shape in enumerate(self._config.layers):
                if shape.kind is kind:
                    self._keys[layer][pages, places] = fresh.keys[layer][row, taken]
                    self._values[layer][pages, places] = fresh.values[layer][row, taken]
