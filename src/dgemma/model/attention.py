"""Attention of both passes and both layer kinds: RoPE, grouped-query attention (GQA), masks.

The causal pass (`encode`) and the denoising pass (`denoise`) differ only in which keys a query attends to.
The same holds for full and sliding-window layers. An `Attend` function implements one such rule for one kind
of context. The exact variants run one row at a time with its keys in position order, so that the order of
every sum is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from dgemma.kernels.elementwise import kernels_for
from dgemma.model.config import LayerKind, LayerShape, ModelConfig
from dgemma.model.kv_cache import AttentionContext, RaggedContext
from dgemma.model.layers import RmsNorm, rms_norm
from dgemma.model.linear import Linear, PlainLinear, needs_gradient
from dgemma.model.ranks import ALONE, Ranks

# Shapes: rows = sequences, tokens = computed now, slots = context slots, keys = slots + tokens,
# heads = query heads, dim = head size.

Past = Tensor | tuple[Tensor, ...]
"""Keys or values of a context: [rows, slots, kv_heads, dim], or one tensor [keys, kv_heads, dim] per row."""

Attend = Callable[[Tensor, Any, Any, Tensor, Tensor], Tensor]
"""(query, past keys, past values, new keys, new values) -> attention output, all [rows, ..., heads, dim]."""


def inverse_frequencies(head_dim: int, theta: float, rotated_share: float) -> Tensor:
    """RoPE: the angle per position of each half-dimension; zero for the part that does not rotate."""
    num_angles = int(rotated_share * head_dim // 2)
    exponents = torch.arange(0, 2 * num_angles, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / theta**exponents
    return torch.nn.functional.pad(frequencies, (0, head_dim // 2 - num_angles))  # [dim / 2]


class Rope(nn.Module):
    """Rotary position embedding (RoPE): cosine and sine tables, one per layer kind and forward.

    The frequencies stay fp32 whatever the model's dtype, and are made on the CPU on every device,
    because `pow` differs in its last bits between devices.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__()
        # MKL initialises its vector functions at their first call. If two threads make that call at once, one
        # may compute with four digits (seen in one process of twenty). A single number uses one thread.
        torch.ones(1).cos()
        for kind in config.kinds:
            shape = config.rope[kind]
            frequencies = inverse_frequencies(config.head_dim(kind), shape.theta, shape.rotated_share)
            if device.type != "meta":
                frequencies = frequencies.to(device)
            self.register_buffer(kind.value, frequencies, persistent=False)

    def forward(self, positions: Tensor, kind: LayerKind, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tables [rows, tokens, 1, dim] for `positions` [rows, tokens]."""
        angles = positions[..., None].float() * self.get_buffer(kind.value)
        angles = torch.cat((angles, angles), dim=-1)[:, :, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to `x` [rows, tokens, heads, dim]: rotate the first half against the second."""
    kernels = kernels_for(x)
    has_gradient = needs_gradient(x)
    if kernels is not None and cos.dtype == x.dtype and not (has_gradient and x.dtype != torch.float32):
        x = x.contiguous()
        tables = [table.expand(*x.shape[:2], 1, -1).flatten(0, 2).contiguous() for table in (cos, sin)]
        if has_gradient:
            turned: Tensor = _Rotate.apply(x, *tables)  # type: ignore[no-untyped-call]
            return turned
        return kernels.rotate(x, *tables)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class _Rotate(torch.autograd.Function):
    """The kernel, with gradients; in float32. A gradient is turned back: both halves have one angle."""

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        kernels = kernels_for(x)
        assert kernels is not None
        return kernels.rotate(x, cos, sin)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        kernels = kernels_for(grad)
        assert kernels is not None
        return kernels.rotate(grad.contiguous(), cos, -sin), None, None


class Attention(nn.Module):
    """Projections of one layer's grouped-query attention, with per-head norms of queries and keys.

    `config` and `shape` count this rank's heads; `ranks` sum up what they contribute.
    """

    query: Linear
    key: Linear
    value: Linear | None
    output: Linear

    def __init__(
        self,
        config: ModelConfig,
        shape: LayerShape,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        self.ranks = ranks
        hidden, dim = config.hidden_size, shape.head_dim
        heads, kv_heads = config.num_heads, shape.num_kv_heads
        self.head_dim = dim
        self.eps = config.norm_eps
        self.query = PlainLinear(heads * dim, hidden, dtype=dtype, device=device)
        self.key = PlainLinear(kv_heads * dim, hidden, dtype=dtype, device=device)
        # Full-attention layers have no value projection: the raw key projection serves as value.
        self.value = (
            PlainLinear(kv_heads * dim, hidden, dtype=dtype, device=device)
            if shape.kind is LayerKind.SLIDING
            else None
        )
        self.output = PlainLinear(hidden, heads * dim, dtype=dtype, device=device)
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

    def merge(self, attended: Tensor) -> Tensor:
        """What the heads read [rows, tokens, heads * head_dim] -> [rows, tokens, hidden]."""
        return self.ranks.sum(self.output.multiply(attended))


def grouped_query_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention (GQA) with score scale 1; `mask` [rows, 1, tokens or 1, keys], True = visible.

    Query heads that share a KV head are concatenated along the token dimension. The bits are those of
    torch's own grouped-query mode (on the CPU); kernels without that mode then need no copy of the keys and
    never allocate the whole score matrix.
    """
    tokens, kv_heads = query.shape[1], keys.shape[2]
    sharing = query.shape[2] // kv_heads
    if mask is not None and mask.shape[2] > 1:
        mask = mask.repeat(1, 1, sharing, 1)
    output: Tensor = F.scaled_dot_product_attention(
        query.transpose(1, 2).unflatten(1, (kv_heads, sharing)).flatten(2, 3),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=mask,
        scale=1.0,
    )
    output = output.unflatten(2, (sharing, tokens)).flatten(1, 2)
    return output.transpose(1, 2)


def explicit_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """`grouped_query_attention` as two products and a softmax.

    It allocates every score, and its backward is fast in bf16 on a CPU.
    """
    tokens, kv_heads = query.shape[1], keys.shape[2]
    sharing = query.shape[2] // kv_heads
    grouped = query.transpose(1, 2).unflatten(1, (kv_heads, sharing)).flatten(2, 3)
    scores = (grouped @ keys.permute(0, 2, 3, 1)).float().unflatten(2, (sharing, tokens))
    if mask is not None:
        scores = torch.where(mask[:, :, None], scores, float("-inf"))
    weights = scores.softmax(-1).to(query.dtype).flatten(2, 3)
    output: Tensor = (weights @ values.transpose(1, 2)).unflatten(2, (sharing, tokens)).flatten(1, 2)
    return output.transpose(1, 2)


def causal_mask(positions: Tensor, context: AttentionContext, kind: LayerKind, window: int) -> Tensor:
    """The causal mask over context and new tokens at `positions` [rows, tokens].

    New tokens at positions before the row's length are padding: each sees itself, so that its numbers stay
    finite, and no other token sees it.
    """
    query = positions[:, :, None]
    past = context.positions(kind)[:, None]
    new = positions[:, None]
    seen_past = (past >= 0) & (past <= query)
    seen_new = (new <= query) & (new >= context.lengths[:, None, None])
    if kind is LayerKind.SLIDING:
        seen_past &= past > query - window
        seen_new &= new > query - window
    seen_new |= new == query
    return torch.cat((seen_past, seen_new), dim=-1)[:, None]  # [rows, 1, tokens, keys]


@dataclass(frozen=True)
class Segments:
    """Sequences packed into rows: for each token its position and the number of its sequence."""

    positions: Tensor  # [rows, tokens]
    numbers: Tensor  # [rows, tokens]


def packed_causal_mask(segments: Segments, kind: LayerKind, window: int) -> Tensor:
    """The causal mask of each sequence alone."""
    query, key = segments.positions[:, :, None], segments.positions[:, None]
    seen = (segments.numbers[:, :, None] == segments.numbers[:, None]) & (key <= query)
    if kind is LayerKind.SLIDING:
        seen &= key > query - window
    return seen[:, None]  # [rows, 1, tokens, keys]


def denoising_mask(context: AttentionContext, kind: LayerKind, window: int, canvas_len: int) -> Tensor:
    """The block-anchored mask: every canvas token sees the same context and the whole canvas."""
    past = context.positions(kind)
    seen_past = past >= 0
    if kind is LayerKind.SLIDING:
        seen_past &= past > context.lengths[:, None] - window
    seen_canvas = seen_past.new_ones(seen_past.shape[0], canvas_len)
    return torch.cat((seen_past, seen_canvas), dim=-1)[:, None, None]  # [rows, 1, 1, keys]


def attend_all_rows(mask: Tensor, *, explicit: bool = False) -> Attend:
    """All rows in one call with a mask."""
    attention = explicit_attention if explicit else grouped_query_attention

    def attend(query: Tensor, past_k: Tensor, past_v: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, torch.cat((past_k, key), 1), torch.cat((past_v, value), 1), mask)

    return attend


@dataclass(frozen=True)
class RowSpan:
    """The positions of one row's tokens in this forward."""

    length: int  # tokens already in the context
    first: int  # position of the first token computed now, padding included
    stop: int  # position after the last token that counts
    # Images whose tokens attend to each other in both directions: first position and the one after the last.
    # Each is computed now as a whole.
    images: tuple[tuple[int, int], ...] = ()

    def images_in(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Those with tokens at positions from `start` to `stop`."""
        return [image for image in self.images if image[0] < stop and start < image[1]]


def attend_causal_by_row(spans: tuple[RowSpan, ...], block: int, window: int | None) -> Attend:
    """Exact causal attention: each aligned block of each row alone, with its keys in position order.

    The shapes, and so the order of every sum, depend on the block's absolute position only: not on the
    batch, and not on how the prompt was split into chunks (chunked prefill).
    """

    def attend(query: Tensor, past_k: Tensor, past_v: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.zeros_like(query)
        for row, span in enumerate(spans):
            all_k = torch.cat((past_k[row], key[row]))
            all_v = torch.cat((past_v[row], value[row]))
            for start in range(span.first, span.stop, block):
                low = 0 if window is None else max(0, start - window + 1) // block * block
                places, mask = _keys_in_order(span, low, start, block, window, past_k.shape[1])
                at = slice(start - span.first, start - span.first + block)
                places = places.to(query.device)
                output[row, at] = grouped_query_attention(
                    query[row : row + 1, at],
                    all_k[places][None],
                    all_v[places][None],
                    mask.to(query.device),
                )[0]
        return output

    return attend


def _keys_in_order(
    span: RowSpan, low: int, start: int, block: int, window: int | None, slots: int
) -> tuple[Tensor, Tensor]:
    """Indices of the keys of positions [low, start + block), and the mask of the block over them."""
    position = torch.arange(low, start + block)
    in_past = position < span.length
    places = torch.where(in_past, position % max(slots, 1), slots + (position - span.first).clamp(min=0))
    return places, block_mask(position, start, block, window)


def block_mask(
    position: Tensor,
    start: int,
    block: int,
    window: int | None,
    images: Iterable[tuple[int, int]] = (),
) -> Tensor:
    """The mask of the block of tokens from `start` on over keys at `position` [1, 1, block, keys].

    The tokens of an image see all of it, whatever the window.
    """
    query = torch.arange(start, start + block)[:, None]
    seen = position <= query
    if window is not None:
        seen &= position > query - window
    for first, end in images:
        seen |= ((first <= query) & (query < end)) & ((first <= position) & (position < end))
    # Padding before the row's length only has to stay finite; its result is discarded.
    seen |= position == query
    return seen[None, None]


def attend_denoising_by_row(lengths: tuple[int, ...], window: int | None) -> Attend:
    """Exact denoising attention: each canvas alone with its own context, in position order."""

    def attend(query: Tensor, past_k: Tensor, past_v: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = []
        for row, length in enumerate(lengths):
            low = 0 if window is None else max(0, length - window + 1)
            places = torch.arange(low, length, device=query.device) % max(past_k.shape[1], 1)
            keys = torch.cat((past_k[row, places], key[row]))[None]
            values = torch.cat((past_v[row, places], value[row]))[None]
            output.append(grouped_query_attention(query[row : row + 1], keys, values, None))
        return torch.cat(output)

    return attend


def attend_ragged_causal(
    context: RaggedContext, kind: LayerKind, spans: Sequence[RowSpan], block: int, window: int | None
) -> Attend:
    """Causal attention of each row's chunk of its prompt, block by block: no mask is larger than a block's.

    The keys of a block depend on its absolute position only, as in `attend_causal_by_row`: same bits.
    """
    firsts = context.firsts[kind]

    def attend(
        query: Tensor, past_k: Sequence[Tensor], past_v: Sequence[Tensor], key: Tensor, value: Tensor
    ) -> Tensor:
        output = torch.zeros_like(query)
        for row, (span, first) in enumerate(zip(spans, firsts, strict=True)):
            last = span.first + query.shape[1]
            blocks = [(start, min(start + block, last)) for start in range(span.first, span.stop, block)]
            keys = [_keys_of(span, start, stop, block, window) for start, stop in blocks]
            base = min(first, *(low for low, _ in keys))
            # Keys that left the sliding window are masked: zeros take their place.
            left_window = key.new_zeros(first - base, *key.shape[2:])
            past, lead = span.length - first, span.length - span.first
            all_k = torch.cat((left_window, past_k[row][:past], key[row, lead:]))
            all_v = torch.cat((left_window, past_v[row][:past], value[row, lead:]))
            for (start, stop), (low, end) in zip(blocks, keys, strict=True):
                images = span.images_in(start, stop)
                mask = block_mask(torch.arange(low, end), start, stop - start, window, images)
                seen, at = slice(low - base, end - base), slice(start - span.first, stop - span.first)
                output[row, at] = grouped_query_attention(
                    query[row : row + 1, at], all_k[None, seen], all_v[None, seen], mask.to(query.device)
                )[0]
        for place, (row, canvas) in enumerate(context.canvas_pasts, len(spans)):
            first, span = canvas.firsts[kind], spans[row]
            begin = max(span.length, first)
            new, gap = (
                slice(begin - span.first, span.stop - span.first),
                slice(begin - first, span.stop - first),
            )
            past_k[place][gap] = key[row, new]
            past_v[place][gap] = value[row, new]
        return output

    return attend


def _keys_of(span: RowSpan, start: int, stop: int, block: int, window: int | None) -> tuple[int, int]:
    """The key positions of the block of tokens from `start` to `stop`.

    They begin with a whole block, and depend on the block's position and the images in it alone.
    """
    low, end = (0 if window is None else max(0, start - window + 1)), stop
    for first, after in span.images_in(start, stop):
        low, end = min(low, first), max(end, after)
    return low // block * block, end


def attend_ragged_denoising(context: RaggedContext, kind: LayerKind) -> Attend:
    """Denoising attention of each canvas with its own past, for a sliding-window layer the window."""
    pasts = [n - first for n, first in zip(context.host_lengths, context.firsts[kind], strict=True)]

    def attend(
        query: Tensor, past_k: Sequence[Tensor], past_v: Sequence[Tensor], key: Tensor, value: Tensor
    ) -> Tensor:
        output = []
        for row, past in enumerate(pasts):
            stop = past + key.shape[1]
            past_k[row][past:stop] = key[row]
            past_v[row][past:stop] = value[row]
            output.append(
                grouped_query_attention(
                    query[row : row + 1], past_k[row][None, :stop], past_v[row][None, :stop], None
                )
            )
        return torch.cat(output)

    return attend
