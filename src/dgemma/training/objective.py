"""The objective: what a block-diffusion model is trained on, computed with the doors inference uses.

The clean example is encoded causally, once. A corrupted canvas of it is denoised behind the clean tokens that
stand strictly before it, through the same block-anchored windows as at inference; gradients flow from the
denoiser into the encoder's keys and values. Only supervised positions reach the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dgemma.model.context import Context, Fresh, context_of_fresh
from dgemma.model.stack import Stack
from dgemma.training.canvases import Batch
from dgemma.training.cross_entropy import block_rows, cross_entropy, soft_embedding

# Shapes: examples, rows = canvases (as many of each example), length = tokens of an example, canvas = tokens
# of a canvas, chosen = tokens the encoder is supervised on.


@dataclass(frozen=True)
class TokenLosses:
    """Cross-entropy of every token, unweighed: `Batch` has the weights."""

    diffusion: Tensor  # [rows, canvas] fp32
    encoder: Tensor  # [chosen] fp32


def token_losses(stack: Stack, batch: Batch, *, rows_at_once: int | None = None) -> TokenLosses:
    """Both losses of a batch. `rows_at_once`: positions whose logits are held at once."""
    head = stack.head
    block = rows_at_once or block_rows(head)
    encoded, denoised = hidden_states(stack, batch, block)
    chosen = encoded.flatten(0, 1).index_select(0, batch.encoder_places)
    diffusion = cross_entropy(head, denoised.flatten(0, 1), batch.clean.flatten(), block)
    encoder = cross_entropy(head, chosen, batch.encoder_targets, block)
    return TokenLosses(diffusion.view_as(batch.clean), encoder)


def hidden_states(stack: Stack, batch: Batch, rows_at_once: int) -> tuple[Tensor, Tensor]:
    """The training forward: encoder [examples, length, hidden] and denoiser [rows, canvas, hidden]."""
    encoded, fresh = stack.encode(batch.tokens, empty_context(stack, len(batch.tokens)))
    context = context_before(stack, fresh, batch.starts)
    soft = guess(stack, batch, context, rows_at_once)
    return encoded, stack.denoise(batch.noisy, context, soft)


@torch.no_grad()
def guess(stack: Stack, batch: Batch, context: Context, rows_at_once: int) -> Tensor:
    """What self-conditioning sees [rows, canvas, hidden]: passes without gradients, or zeros.

    Zeros are what inference has at a canvas's first step: their term is exactly zero.
    """
    shape = (*batch.noisy.shape, stack.config.hidden_size)
    soft = torch.zeros(shape, dtype=stack.embedding.dtype, device=batch.noisy.device)
    for number, rows in enumerate(batch.guessed):
        before = soft[rows] if number else None
        hidden = stack.denoise(batch.noisy[rows], _of_rows(context, rows), before)
        made = soft_embedding(stack.head, hidden.flatten(0, 1), rows_at_once).view_as(hidden)
        soft = soft.index_copy(0, rows, made)
    return soft


def context_before(stack: Stack, fresh: Fresh, starts: Tensor) -> Context:
    """What each canvas may read of its own example: the tokens strictly before its first position."""
    canvases = len(starts) // len(fresh.keys[0])
    if canvases > 1:
        fresh = Fresh(_repeated(fresh.keys, canvases), _repeated(fresh.values, canvases))
    return context_of_fresh(fresh, stack.config.kinds, starts)


def _of_rows(context: Context, rows: Tensor) -> Context:
    return replace(
        context,
        keys=tuple(part[rows] for part in context.keys),
        values=tuple(part[rows] for part in context.values),
        lengths=context.lengths[rows],
    )


def _repeated(layers: tuple[Tensor, ...], times: int) -> tuple[Tensor, ...]:
    """Each example's once per canvas, side by side."""
    return tuple(part[:, None].expand(-1, times, -1, -1, -1).flatten(0, 1) for part in layers)


def empty_context(stack: Stack, rows: int) -> Context:
    device, dtype = stack.norm.weight.device, stack.embedding.dtype
    empty = tuple(
        torch.zeros(rows, 0, shape.num_kv_heads, shape.head_dim, dtype=dtype, device=device)
        for shape in stack.config.layers
    )
    return Context(
        keys=empty,
        values=empty,
        slots=dict.fromkeys(stack.config.kinds, 0),
        lengths=torch.zeros(rows, dtype=torch.int64, device=device),
        host_lengths=(0,) * rows,
    )
