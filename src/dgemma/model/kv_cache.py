"""Keys and values of the past: the KV cache, and the views of it that a forward reads.

`KVCache` is owned by the caller and keeps one contiguous store per layer. A forward never reads it directly;
it reads one of two contexts made of plain tensors:

- `AttentionContext`: all rows share one set of slots, shorter rows are masked. `KVCache.context()` makes one;
  training makes one from `NewKeysValues`, the result of `encode`.
- `RaggedContext`: each row has tensors of its own length, without padding. The engine makes one from the
  blocks of its block pool.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma.errors import InputError
from dgemma.model.config import LayerKind, ModelConfig

# Shapes: rows = sequences of the batch, slots = entries for context tokens, tokens = computed now,
# past = context tokens of one row.

# Full layers grow by steps of this many slots, so that a long chat does not copy at every turn.
_GROWTH = 256


@dataclass(frozen=True)
class NewKeysValues:
    """Keys and values that one forward computed, per layer [rows, tokens, kv_heads, head_dim]."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


@dataclass(frozen=True)
class AttentionContext:
    """The past of every row. Rows of different length share the slots; empty slots are masked.

    The token at position p is in slot p % slots: the slots of a sliding-window layer form a ring buffer
    that keeps the newest tokens, those of a full layer never wrap. Empty slots must hold finite numbers.
    """

    keys: tuple[Tensor, ...]  # per layer [rows, slots, kv_heads, head_dim]
    values: tuple[Tensor, ...]
    slots: dict[LayerKind, int]
    lengths: Tensor  # [rows] tokens in the past of each row, on the device
    host_lengths: tuple[int, ...]  # the same numbers on the host, where reading them costs nothing

    def positions(self, kind: LayerKind) -> Tensor:
        """The position each slot holds [rows, slots]; negative where the slot is empty."""
        slots = self.slots[kind]
        newest = self.lengths[:, None] - 1
        if slots == 0:
            return newest[:, :0]
        return newest - (newest - torch.arange(slots, device=newest.device)) % slots

    def select(self, rows: Tensor) -> AttentionContext:
        """The past of `rows`, for training: lengths on the host are left out."""
        return AttentionContext(
            keys=tuple(part[rows] for part in self.keys),
            values=tuple(part[rows] for part in self.values),
            slots=self.slots,
            lengths=self.lengths[rows],
            host_lengths=(),
        )


def context_from_new_kv(
    new_kv: NewKeysValues, kinds: Sequence[LayerKind], lengths: Tensor
) -> AttentionContext:
    """The first `lengths` [rows] tokens of rows encoded in one chunk, without a cache: for training.

    Only exact execution reads lengths on the host, and training does not use it.
    """
    return AttentionContext(
        keys=new_kv.keys,
        values=new_kv.values,
        slots=dict.fromkeys(kinds, new_kv.keys[0].shape[1]),
        lengths=lengths,
        host_lengths=(),
    )


@dataclass(frozen=True)
class PastKeysValues:
    """One row's past, in position order.

    `capacity` after the past is for the tokens computed now: a canvas that is denoised many times then copies
    its past once, not at every step.
    """

    keys: tuple[Tensor, ...]  # per layer [past + capacity, kv_heads, head_dim]
    values: tuple[Tensor, ...]
    firsts: dict[LayerKind, int]  # the position of the first key
    length: int  # tokens in the past; a sliding-window layer holds only the last of them


@dataclass(frozen=True)
class RaggedContext:
    """The past of rows of any lengths, each row in tensors of its own."""

    keys: tuple[tuple[Tensor, ...], ...]  # per layer and row [past + capacity, kv_heads, head_dim]
    values: tuple[tuple[Tensor, ...], ...]
    firsts: dict[LayerKind, tuple[int, ...]]  # the position of each row's first key
    lengths: Tensor  # [rows] tokens in the past of each row, on the device
    host_lengths: tuple[int, ...]
    # Pasts of canvases that share this forward: (row, past). The forward writes the row's new keys and values
    # into the past of its canvas, layer by layer. They are the last entries of `keys` and `values`.
    canvas_pasts: tuple[tuple[int, PastKeysValues], ...] = ()


def join_rows(
    pasts: Sequence[PastKeysValues], device: torch.device, canvases: Sequence[PastKeysValues | None] = ()
) -> RaggedContext:
    """`canvases`: per row, the past of the canvas after it, with a gap for this row's new tokens."""
    canvas_pasts = tuple((row, past) for row, past in enumerate(canvases) if past is not None)
    every = (*pasts, *(past for _, past in canvas_pasts))
    return RaggedContext(
        keys=tuple(zip(*(past.keys for past in every), strict=True)),
        values=tuple(zip(*(past.values for past in every), strict=True)),
        firsts={kind: tuple(past.firsts[kind] for past in pasts) for kind in pasts[0].firsts},
        lengths=torch.tensor([past.length for past in pasts], device=device),
        host_lengths=tuple(past.length for past in pasts),
        canvas_pasts=canvas_pasts,
    )


class KVCache:
    """The KV cache of `batch` rows. Full layers keep every token, sliding-window layers only their window.

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
            raise InputError.about("batch", f"is {batch}; a cache needs at least one row.")
        if capacity is not None and not 0 <= capacity <= config.max_positions:
            raise InputError.about(
                "capacity", f"is {capacity}; this model takes 0 to {config.max_positions} tokens."
            )
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
        """A new cache with a copy of these rows' past, in this order."""
        selected = copy.copy(self)
        index = torch.tensor(list(rows), device=self._device_lengths.device)
        selected._batch = len(index)
        selected._lengths = [self._lengths[row] for row in rows]
        selected._slots = dict(self._slots)
        selected._keys = [store.index_select(0, index) for store in self._keys]
        selected._values = [store.index_select(0, index) for store in self._values]
        selected._device_lengths = self._device_lengths.index_select(0, index)
        return selected

    def context(self) -> AttentionContext:
        """The view that a forward reads; valid until the next append."""
        longest = max(self._lengths)
        used = {kind: min(slots, longest) for kind, slots in self._slots.items()}
        kinds = [shape.kind for shape in self._config.layers]
        return AttentionContext(
            keys=tuple(store[:, : used[kind]] for store, kind in zip(self._keys, kinds, strict=True)),
            values=tuple(store[:, : used[kind]] for store, kind in zip(self._values, kinds, strict=True)),
            slots=used,
            lengths=self._device_lengths,
            host_lengths=tuple(self._lengths),
        )

    def check_capacity(self, counts: Sequence[int]) -> None:
        """Refuse `counts[row]` more tokens if they would pass the model's last position."""
        most = max(n + c for n, c in zip(self._lengths, counts, strict=True))
        if most > self._config.max_positions:
            raise InputError(
                f"the context would reach {most} tokens; this model takes "
                f"{self._config.max_positions}. Shorten the prompt."
            )

    def append(self, new_kv: NewKeysValues, counts: Sequence[int], lead: Sequence[int] | None = None) -> None:
        """Keep `counts[row]` tokens of what `encode` computed, after `lead[row]` of padding."""
        lead = lead or [0] * self._batch
        self._reserve(max(n + c for n, c in zip(self._lengths, counts, strict=True)))
        for kind in self._config.kinds:
            rows, sources, slots = self._token_slots(kind, counts, lead)
            for index, shape in enumerate(self._config.layers):
                if shape.kind is not kind or not len(rows):
                    continue
                for stores, new in ((self._keys, new_kv.keys), (self._values, new_kv.values)):
                    taken = new[index][rows, sources]
                    # Out of place when gradients are recorded: attention still needs the old store.
                    recorded = taken.requires_grad or stores[index].requires_grad
                    put = torch.index_put if recorded else torch.index_put_
                    stores[index] = put(stores[index], (rows, slots), taken)
        self._lengths = [n + c for n, c in zip(self._lengths, counts, strict=True)]
        self._device_lengths = torch.tensor(self._lengths, device=self._keys[0].device)

    def _token_slots(
        self, kind: LayerKind, counts: Sequence[int], lead: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(row, source token, slot) of every token to keep; a ring buffer keeps only the newest."""
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
            # A sliding-window layer attends to at most the last window - 1 context tokens.
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
