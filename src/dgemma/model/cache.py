"""A key/value cache that the caller owns: one contiguous store per layer."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from dgemma.errors import InputError
from dgemma.model.config import LayerKind, ModelConfig
from dgemma.model.context import Context, Fresh

# Full layers grow by steps of this many slots, so that a long chat does not copy at every turn.
_GROWTH = 256


class KVCache:
    """The past of `batch` rows. Full layers keep every token, sliding layers only their window.

    `encode` appends; `denoise` only reads. Rows may have different lengths.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        capacity: int | None = None,
    ) -> None:
        if batch < 1:
            raise InputError(f"batch is {batch}; a cache needs at least one row.")
        if capacity is not None and not 0 <= capacity <= config.max_positions:
            raise InputError(f"capacity is {capacity}; this model takes 0 to {config.max_positions} tokens.")
        self._config = config
        self._batch = batch
        self._lengths = [0] * batch
        self._slots = dict.fromkeys(config.kinds, 0)
        self._keys = [
            torch.zeros(batch, 0, s.num_kv_heads, s.head_dim, dtype=dtype, device=device)
            for s in config.layers
        ]
        self._values = [keys.clone() for keys in self._keys]
        # Kept beside the host's copy, so that a step sends nothing to the device.
        self._device_lengths = torch.tensor(self._lengths, device=device)
        if capacity is not None:
            self._reserve(capacity)

    @property
    def batch(self) -> int:
        return self._batch

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens encoded so far, per row."""
        return tuple(self._lengths)

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in (*self._keys, *self._values))

    def select(self, rows: Sequence[int]) -> KVCache:
        """A cache of its own with these rows' past, in this order."""
        twin = copy.copy(self)
        index = torch.tensor(list(rows), device=self._device_lengths.device)
        twin._batch = len(index)
        twin._lengths = [self._lengths[row] for row in rows]
        twin._slots = dict(self._slots)
        twin._keys = [store.index_select(0, index) for store in self._keys]
        twin._values = [store.index_select(0, index) for store in self._values]
        twin._device_lengths = self._device_lengths.index_select(0, index)
        return twin

    def context(self) -> Context:
        """What a forward reads: a view, valid until the next append."""
        longest = max(self._lengths)
        used = {kind: min(slots, longest) for kind, slots in self._slots.items()}
        kinds = [shape.kind for shape in self._config.layers]
        return Context(
            keys=tuple(store[:, : used[kind]] for store, kind in zip(self._keys, kinds, strict=True)),
            values=tuple(store[:, : used[kind]] for store, kind in zip(self._values, kinds, strict=True)),
            slots=used,
            lengths=self._device_lengths,
            host_lengths=tuple(self._lengths),
        )

    def check_room(self, counts: Sequence[int]) -> None:
        """Refuse `counts[row]` more tokens if they would pass the model's last position."""
        most = max(n + c for n, c in zip(self._lengths, counts, strict=True))
        if most > self._config.max_positions:
            raise InputError(
                f"the context would reach {most} tokens; this model takes "
                f"{self._config.max_positions}. Shorten the prompt."
            )

    def append(self, fresh: Fresh, counts: Sequence[int], lead: Sequence[int] | None = None) -> None:
        """Keep `counts[row]` tokens of what `encode` computed, after `lead[row]` of padding."""
        lead = lead or [0] * self._batch
        self._reserve(max(n + c for n, c in zip(self._lengths, counts, strict=True)))
        for kind in self._config.kinds:
            rows, sources, slots = self._places(kind, counts, lead)
            for index, shape in enumerate(self._config.layers):
                if shape.kind is not kind or not len(rows):
                    continue
                for stores, new in ((self._keys, fresh.keys), (self._values, fresh.values)):
                    taken = new[index][rows, sources]
                    # Out of place when gradients are recorded: attention still needs the old store.
                    recorded = taken.requires_grad or stores[index].requires_grad
                    put = torch.index_put if recorded else torch.index_put_
                    stores[index] = put(stores[index], (rows, slots), taken)
        self._lengths = [n + c for n, c in zip(self._lengths, counts, strict=True)]
        self._device_lengths = torch.tensor(self._lengths, device=self._keys[0].device)

    def _places(
        self, kind: LayerKind, counts: Sequence[int], lead: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(row, source token, slot) of every token to keep; a ring keeps only its newest."""
        size = self._slots[kind]
        rows, sources, slots = [], [], []
        for row, (length, count, skipped) in enumerate(zip(self._lengths, counts, lead, strict=True)):
            kept = torch.arange(max(0, count - size), count)
            rows.append(torch.full_like(kept, row))
            sources.append(kept + skipped)
            slots.append((kept + length) % max(size, 1))
        device = self._keys[0].device
        return (
            torch.cat(rows).to(device),
            torch.cat(sources).to(device),
            torch.cat(slots).to(device),
        )

    def _reserve(self, num_tokens: int) -> None:
        rounded = -(-num_tokens // _GROWTH) * _GROWTH
        for kind in self._config.kinds:
            # A sliding layer never looks further back than window - 1 tokens.
            most = max(1, self._config.window - 1) if kind is LayerKind.SLIDING else rounded
            size = min(rounded, most)
            if size <= self._slots[kind]:
                continue
            for index, shape in enumerate(self._config.layers):
                if shape.kind is kind:
                    for stores in (self._keys, self._values):
                        old = stores[index]
                        more = old.new_zeros(old.shape[0], size - old.shape[1], *old.shape[2:])
                        stores[index] = torch.cat((old, more), dim=1)
            self._slots[kind] = size
