"""The past of rows that have little in common: each row's keys and values apart, in the order of positions.

A `Context` has slots that all rows share; here every row has tensors of its own length, so that rows of any
lengths meet in a forward without padding. Behind a row's past there may be room for the tokens computed now:
a canvas that is refined many times then copies its past once, not at every step. A canvas may even share the
forward of the text right before it: layer by layer it reads what that text has just written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma.model.attention import Attend, RowSpan, mix, seen_by_block
from dgemma.model.config import LayerKind

# Shapes: rows = sequences, tokens = computed now, keys = past + tokens.


@dataclass(frozen=True)
class RowPast:
    """One row's past."""

    keys: tuple[Tensor, ...]  # per layer [past + room, kv_heads, head_dim]
    values: tuple[Tensor, ...]
    firsts: dict[LayerKind, int]  # the position of the first key
    length: int  # tokens in the past; a sliding layer has the last of them only


@dataclass(frozen=True)
class RowContexts:
    keys: tuple[tuple[Tensor, ...], ...]  # per layer and row [past + room, kv_heads, head_dim]
    values: tuple[tuple[Tensor, ...], ...]
    firsts: dict[LayerKind, tuple[int, ...]]  # the position of each row's first key
    lengths: Tensor  # [rows] tokens in the past of each row, on the device
    host_lengths: tuple[int, ...]
    # Behind the rows' own keys and values stand those of canvases, which wait for what a row computes now:
    # its number, and the past of its canvas.
    waiting: tuple[tuple[int, RowPast], ...] = ()


def join_rows(
    pasts: Sequence[RowPast], device: torch.device, canvases: Sequence[RowPast | None] = ()
) -> RowContexts:
    """`canvases`: per row, the past of the canvas behind it; it has a gap where this row's tokens belong."""
    waiting = tuple((row, past) for row, past in enumerate(canvases) if past is not None)
    every = (*pasts, *(past for _, past in waiting))
    return RowContexts(
        keys=tuple(zip(*(past.keys for past in every), strict=True)),
        values=tuple(zip(*(past.values for past in every), strict=True)),
        firsts={kind: tuple(past.firsts[kind] for past in pasts) for kind in pasts[0].firsts},
        lengths=torch.tensor([past.length for past in pasts], device=device),
        host_lengths=tuple(past.length for past in pasts),
        waiting=waiting,
    )


def attend_pieces(
    context: RowContexts, kind: LayerKind, spans: Sequence[RowSpan], block: int, window: int | None
) -> Attend:
    """Each row's piece of text, causally, so many tokens at a time: no mask is larger than a block's.

    The keys of a block depend on its absolute position only, as in `attend_encode_by_row`: same bits.
    """
    firsts = context.firsts[kind]

    def attend(
        query: Tensor, past_k: Sequence[Tensor], past_v: Sequence[Tensor], key: Tensor, value: Tensor
    ) -> Tensor:
        mixed = torch.zeros_like(query)
        for row, (span, first) in enumerate(zip(spans, firsts, strict=True)):
            low = _first_key(span.first, block, window)
            base = min(low, first)
            # What slid out of the window is masked: any key will do.
            slid_out = key.new_zeros(first - base, *key.shape[2:])
            past, lead = span.length - first, span.length - span.first
            all_k = torch.cat((slid_out, past_k[row][:past], key[row, lead:]))
            all_v = torch.cat((slid_out, past_v[row][:past], value[row, lead:]))
            for start in range(span.first, span.stop, block):
                stop = min(start + block, span.first + query.shape[1])
                low = _first_key(start, block, window)
                mask = seen_by_block(torch.arange(low, stop), start, stop - start, window).to(query.device)
                seen, at = slice(low - base, stop - base), slice(start - span.first, stop - span.first)
                mixed[row, at] = mix(query[row : row + 1, at], all_k[None, seen], all_v[None, seen], mask)[0]
        for place, (row, canvas) in enumerate(context.waiting, len(spans)):
            first, span = canvas.firsts[kind], spans[row]
            begin = max(span.length, first)
            new, gap = (
                slice(begin - span.first, span.stop - span.first),
                slice(begin - first, span.stop - first),
            )
            past_k[place][gap] = key[row, new]
            past_v[place][gap] = value[row, new]
        return mixed

    return attend


def _first_key(start: int, block: int, window: int | None) -> int:
    """The first position that a block from `start` on is given: whole blocks, by its position alone."""
    return 0 if window is None else max(0, start - window + 1) // block * block


def attend_canvases(context: RowContexts, kind: LayerKind) -> Attend:
    """Each canvas with its own past, the window of a sliding layer being all that it holds."""
    pasts = [n - first for n, first in zip(context.host_lengths, context.firsts[kind], strict=True)]

    def attend(
        query: Tensor, past_k: Sequence[Tensor], past_v: Sequence[Tensor], key: Tensor, value: Tensor
    ) -> Tensor:
        mixed = []
        for row, past in enumerate(pasts):
            stop = past + key.shape[1]
            past_k[row][past:stop] = key[row]
            past_v[row][past:stop] = value[row]
            mixed.append(mix(query[row : row + 1], past_k[row][None, :stop], past_v[row][None, :stop], None))
        return torch.cat(mixed)

    return attend
