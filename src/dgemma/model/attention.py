"""One attention for both doors and both layer kinds. What differs is who may be seen, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dgemma.model.config import LayerKind, LayerShape, ModelConfig
from dgemma.model.context import Context
from dgemma.model.norm import RmsNorm, rms_norm
from dgemma.model.rope import rotate
from dgemma.model.weight import Matrix, PlainMatrix

# Shapes: rows = sequences, tokens = computed now, slots = context places, keys = slots + tokens,
# heads = query heads, dim = head size.

Past = Tensor | tuple[Tensor, ...]
"""Keys or values of a context: [rows, slots, kv_heads, dim], or one tensor [keys, kv_heads, dim] per row."""

Attend = Callable[[Tensor, Any, Any, Tensor, Tensor], Tensor]
"""(query, context keys, context values, fresh keys, fresh values) -> mixed values, all
[rows, ..., heads, dim]."""


class Attention(nn.Module):
    query: Matrix
    key: Matrix
    value: Matrix | None
    output: Matrix

    def __init__(
        self, config: ModelConfig, shape: LayerShape, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, shape.head_dim
        heads, kv_heads = config.num_heads, shape.num_kv_heads
        self.head_dim = dim
        self.eps = config.norm_eps
        self.query = PlainMatrix(heads * dim, hidden, dtype=dtype, device=device)
        self.key = PlainMatrix(kv_heads * dim, hidden, dtype=dtype, device=device)
        # Full-attention layers have no value projection: the raw key projection serves as value.
        self.value = (
            PlainMatrix(kv_heads * dim, hidden, dtype=dtype, device=device)
            if shape.kind is LayerKind.SLIDING
            else None
        )
        self.output = PlainMatrix(hidden, heads * dim, dtype=dtype, device=device)
        self.query_norm = RmsNorm(dim, config.norm_eps, dtype=dtype, device=device)
        self.key_norm = RmsNorm(dim, config.norm_eps, dtype=dtype, device=device)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [rows, tokens, heads, dim] of `x` [rows, tokens, hidden]."""
        per_head = (-1, self.head_dim)
        query = rotate(self.query_norm(self.query.multiply(x).unflatten(-1, per_head)), cos, sin)
        raw_key = self.key.multiply(x).unflatten(-1, per_head)
        raw_value = raw_key if self.value is None else self.value.multiply(x).unflatten(-1, per_head)
        key = rotate(self.key_norm(raw_key), cos, sin)
        return query, key, rms_norm(raw_value, None, self.eps)


def mix(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention with score scale 1; `mask` [rows, 1, tokens or 1, keys], True = visible.

    Query heads that share a KV head are laid one behind the other as if they were more tokens. The
    bits are those of torch's own grouped-query mode (on the CPU), and kernels without that mode need no
    copy of the keys and never hold the whole score matrix.
    """
    tokens, kv_heads = query.shape[1], keys.shape[2]
    sharing = query.shape[2] // kv_heads
    if mask is not None and mask.shape[2] > 1:
        mask = mask.repeat(1, 1, sharing, 1)
    mixed: Tensor = F.scaled_dot_product_attention(
        query.transpose(1, 2).unflatten(1, (kv_heads, sharing)).flatten(2, 3),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=mask,
        scale=1.0,
    )
    mixed = mixed.unflatten(2, (sharing, tokens)).flatten(1, 2)
    return mixed.transpose(1, 2)


def mix_explicitly(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """`mix` as two products and a softmax: holds every score, and its backward is fast in bf16 on a CPU."""
    tokens, kv_heads = query.shape[1], keys.shape[2]
    sharing = query.shape[2] // kv_heads
    laid = query.transpose(1, 2).unflatten(1, (kv_heads, sharing)).flatten(2, 3)
    scores = (laid @ keys.permute(0, 2, 3, 1)).float().unflatten(2, (sharing, tokens))
    if mask is not None:
        scores = torch.where(mask[:, :, None], scores, float("-inf"))
    shares = scores.softmax(-1).to(query.dtype).flatten(2, 3)
    mixed: Tensor = (shares @ values.transpose(1, 2)).unflatten(2, (sharing, tokens)).flatten(1, 2)
    return mixed.transpose(1, 2)


def encode_mask(positions: Tensor, context: Context, kind: LayerKind, window: int) -> Tensor:
    """Causal visibility of context and fresh tokens at `positions` [rows, tokens].

    Fresh tokens in front of a row's length are padding: each sees itself, so that its numbers stay
    finite, and no other token sees it.
    """
    query = positions[:, :, None]
    past = context.positions(kind)[:, None]
    fresh = positions[:, None]
    seen_past = (past >= 0) & (past <= query)
    seen_fresh = (fresh <= query) & (fresh >= context.lengths[:, None, None])
    if kind is LayerKind.SLIDING:
        seen_past &= past > query - window
        seen_fresh &= fresh > query - window
    seen_fresh |= fresh == query
    return torch.cat((seen_past, seen_fresh), dim=-1)[:, None]  # [rows, 1, tokens, keys]


def denoise_mask(context: Context, kind: LayerKind, window: int, canvas_len: int) -> Tensor:
    """Block-anchored visibility: every canvas token sees the same context and the whole canvas."""
    past = context.positions(kind)
    seen_past = past >= 0
    if kind is LayerKind.SLIDING:
        seen_past &= past > context.lengths[:, None] - window
    seen_canvas = seen_past.new_ones(seen_past.shape[0], canvas_len)
    return torch.cat((seen_past, seen_canvas), dim=-1)[:, None, None]  # [rows, 1, 1, keys]


def attend_all_rows(mask: Tensor, *, explicit: bool = False) -> Attend:
    """All rows in one call; `mask` hides what a row may not see."""
    how = mix_explicitly if explicit else mix

    def attend(query: Tensor, past_k: Tensor, past_v: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return how(query, torch.cat((past_k, key), 1), torch.cat((past_v, value), 1), mask)

    return attend


@dataclass(frozen=True)
class RowSpan:
    """Where one row's tokens of this forward stand, in absolute positions."""

    length: int  # tokens already in the context
    first: int  # position of the first token computed now, padding included
    stop: int  # position after the last token that counts


def attend_encode_by_row(spans: tuple[RowSpan, ...], block: int, window: int | None) -> Attend:
    """The exact form of encode: each aligned block of each row alone, its keys in position order.

    The shapes, and so the order of every sum, depend on the block's absolute position only: not on
    the batch, and not on how the prompt was cut into pieces.
    """

    def attend(query: Tensor, past_k: Tensor, past_v: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed = torch.zeros_like(query)
        for row, span in enumerate(spans):
            all_k = torch.cat((past_k[row], key[row]))
            all_v = torch.cat((past_v[row], value[row]))
            for start in range(span.first, span.stop, block):
                low = 0 if window is None else max(0, start - window + 1) // block * block
                places, mask = _linear_keys(span, low, start, block, window, past_k.shape[1])
                at = slice(start - span.first, start - span.first + block)
                places = places.to(query.device)
                mixed[row, at] = mix(
                    query[row : row + 1, at],
                    all_k[places][None],
                    all_v[places][None],
                    mask.to(query.device),
                )[0]
        return mixed

    return attend


def _linear_keys(
    span: RowSpan, low: int, start: int, block: int, window: int | None, slots: int
) -> tuple[Tensor, Tensor]:
    """Where the keys of positions [low, start + block) lie, and who of the block sees them."""
    position = torch.arange(low, start + block)
    in_past = position < span.length
    places = torch.where(in_past, position % max(slots, 1), slots + (position - span.first).clamp(min=0))
    return places, seen_by_block(position, start, block, window)


def seen_by_block(position: Tensor, start: int, block: int, window: int | None) -> Tensor:
    """Which of the keys at `position` the tokens from `start` on see [1, 1, block, keys]."""
    query = torch.arange(start, start + block)[:, None]
    seen = position <= query
    if window is not None:
        seen &= position > query - window
    # Padding in front of the row's length only has to stay finite; its result is thrown away.
    seen |= position == query
    return seen[None, None]


def attend_denoise_by_row(lengths: tuple[int, ...], window: int | None) -> Attend:
    """The exact form of denoise: each canvas alone with its own context, in position order."""

    def attend(query: Tensor, past_k: Tensor, past_v: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed = []
        for row, length in enumerate(lengths):
            low = 0 if window is None else max(0, length - window + 1)
            places = torch.arange(low, length, device=query.device) % max(past_k.shape[1], 1)
            keys = torch.cat((past_k[row, places], key[row]))[None]
            values = torch.cat((past_v[row, places], value[row]))[None]
            mixed.append(mix(query[row : row + 1], keys, values, None))
        return torch.cat(mixed)

    return attend
