"""The training objective of block diffusion: cross-entropy of a denoised canvas and of the next token.

The encoder reads the clean example causally, once. The denoiser reads a corrupted canvas bidirectionally,
with the clean tokens strictly before the canvas as context, through the same block-anchored attention windows
as at inference. Gradients flow from the denoiser into the encoder's keys and values. Logits are computed for
supervised positions only, one block of positions at a time, so that [all positions, vocabulary] is never
held.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dgemma.model.attention import Segments
from dgemma.model.kv_cache import AttentionContext, NewKeysValues, context_from_new_kv
from dgemma.model.transformer import Head, Transformer
from dgemma.sampling.sampler import Sampler
from dgemma.training.data.canvases import TrainingBatch
from dgemma.training.rollout import roll_out, visited_states

# Shapes: examples, rows = canvases (as many of each example), length = tokens of an example, canvas = tokens
# of a canvas, chosen = tokens the encoder is supervised on, n = positions.

# Numbers in one block of logits. 6 M are 25 MB in fp32, which the allocator keeps between blocks. Larger
# blocks return to the system each time, and their memory is cleared anew (3.5 times as slow,
# docs/lab-notes.md).
USUAL_LOGITS = 6 << 20
MAX_LOGITS = 32 << 20
MIN_ROWS = 128  # fewer rows would read a large vocabulary's weights too often


@dataclass(frozen=True)
class TokenLosses:
    """Cross-entropy of every token, not weighted: `TrainingBatch` has the weights."""

    diffusion: Tensor  # [rows, canvas] fp32
    encoder: Tensor  # [chosen] fp32


def token_losses(
    stack: Transformer,
    batch: TrainingBatch,
    *,
    sampler: Sampler | None = None,
    rows_at_once: int | None = None,
) -> TokenLosses:
    """Both losses of a batch.

    sampler: makes the canvases, in place of noise. rows_at_once: positions whose logits are held at once.
    """
    head = stack.head
    block = rows_at_once or block_rows(head)
    encoded, denoised = hidden_states(stack, batch, block, sampler)
    chosen = encoded.flatten(0, 1).index_select(0, batch.encoder_places)
    states = len(denoised) // len(batch.clean)  # of each canvas
    clean = batch.clean.repeat_interleave(states, 0)
    diffusion = cross_entropy(head, denoised.flatten(0, 1), clean.flatten(), block)
    encoder = cross_entropy(head, chosen, batch.encoder_targets, block)
    return TokenLosses(diffusion.view(-1, states, clean.shape[1]).mean(1), encoder)


def hidden_states(
    stack: Transformer, batch: TrainingBatch, rows_at_once: int, sampler: Sampler | None = None
) -> tuple[Tensor, Tensor]:
    """The training forward: encoder [examples, length, hidden] and denoiser [rows, canvas, hidden].

    With a sampler the denoiser has several states of each canvas [rows * states, canvas, hidden].
    """
    encoded, context = encode(stack, batch)
    if sampler is None:
        return encoded, stack.denoise(batch.noisy, context, guess(stack, batch, context, rows_at_once))
    assert batch.picks is not None
    assert batch.seeds is not None
    canvas, soft = visited_states(
        stack,
        context,
        sampler,
        batch.seeds.tolist(),
        batch.picks,
        canvas_len=batch.clean.shape[1],
        num_steps=batch.visits,
    )
    rows, states = batch.picks.shape
    if states > 1:
        context = context.select(torch.arange(rows, device=canvas.device).repeat_interleave(states))
    return encoded, stack.denoise(canvas, context, soft)


def encode(stack: Transformer, batch: TrainingBatch) -> tuple[Tensor, AttentionContext]:
    """The causal pass of the examples, and the context of each canvas."""
    packing = batch.packing
    segments = None if packing is None else Segments(packing.positions, packing.segments)
    nothing = empty_context(stack, len(batch.tokens))
    encoded, fresh = stack.encode(batch.tokens, nothing, segments=segments)
    if packing is not None:
        fresh = _gathered(fresh, packing.context_places)
    return encoded, context_before(stack, fresh, batch.starts)


def with_settled_targets(teacher: Transformer, batch: TrainingBatch, sampler: Sampler) -> TrainingBatch:
    """The batch, with the canvases that `teacher` settles on in place of the responses."""
    assert batch.seeds is not None
    with torch.no_grad():
        _, context = encode(teacher, batch)
    path = roll_out(teacher, context, sampler, batch.seeds.tolist(), canvas_len=batch.clean.shape[1])
    return replace(batch, clean=path.end.argmax)


@torch.no_grad()
def guess(stack: Transformer, batch: TrainingBatch, context: AttentionContext, rows_at_once: int) -> Tensor:
    """Soft embeddings for self-conditioning [rows, canvas, hidden]: from passes without gradients, or zeros.

    Zeros stand for the first step of a canvas at inference: their term is exactly zero.
    """
    shape = (*batch.noisy.shape, stack.config.hidden_size)
    soft = torch.zeros(shape, dtype=stack.embedding.dtype, device=batch.noisy.device)
    for number, rows in enumerate(batch.guessed):
        if not len(rows):  # a pass of other processes, with which this one keeps step
            stack.denoise(batch.noisy[:1], context.select(torch.zeros_like(batch.starts[:1])))
            continue
        previous = soft[rows] if number else None
        hidden = stack.denoise(batch.noisy[rows], context.select(rows), previous)
        guessed = soft_embedding(stack.head, hidden.flatten(0, 1), rows_at_once).view_as(hidden)
        soft = soft.index_copy(0, rows, guessed)
    return soft


def context_before(stack: Transformer, fresh: NewKeysValues, starts: Tensor) -> AttentionContext:
    """The context of each canvas: the tokens of its example strictly before its first position."""
    canvases = len(starts) // len(fresh.keys[0])
    if canvases > 1:
        fresh = NewKeysValues(_repeated(fresh.keys, canvases), _repeated(fresh.values, canvases))
    return context_from_new_kv(fresh, stack.config.kinds, starts)


def _gathered(fresh: NewKeysValues, places: Tensor) -> NewKeysValues:
    """The keys and values at `places` [rows, context] of the flattened tokens."""

    def gather(part: Tensor) -> Tensor:
        return part.flatten(0, 1).index_select(0, places.flatten()).view(*places.shape, *part.shape[2:])

    return NewKeysValues(tuple(map(gather, fresh.keys)), tuple(map(gather, fresh.values)))


def _repeated(layers: tuple[Tensor, ...], times: int) -> tuple[Tensor, ...]:
    """Repeat the rows of each example once per canvas, adjacent to each other."""
    return tuple(part[:, None].expand(-1, times, -1, -1, -1).flatten(0, 1) for part in layers)


def empty_context(stack: Transformer, rows: int) -> AttentionContext:
    device, dtype = stack.norm.weight.device, stack.embedding.dtype
    empty = tuple(
        torch.zeros(rows, 0, shape.num_kv_heads, shape.head_dim, dtype=dtype, device=device)
        for shape in stack.config.layers
    )
    return AttentionContext(
        keys=empty,
        values=empty,
        slots=dict.fromkeys(stack.config.kinds, 0),
        lengths=torch.zeros(rows, dtype=torch.int64, device=device),
        host_lengths=(0,) * rows,
    )


def block_rows(head: Head) -> int:
    """Positions whose logits are held at once."""
    usual, most = (size // head.vocab_size for size in (USUAL_LOGITS, MAX_LOGITS))
    return max(1, usual, min(MIN_ROWS, most))


def cross_entropy(head: Head, hidden: Tensor, targets: Tensor, rows: int) -> Tensor:
    """-log p(target) per position [n] for `hidden` [n, hidden], `rows` positions at a time.

    The backward pass computes the logits of a block again instead of keeping them. If all positions fit
    into one block, they are kept: computing them twice would save nothing.
    """
    if hidden.shape[0] <= rows:
        return _cross_entropy_block(head, hidden, targets)
    losses = [
        checkpoint(_cross_entropy_block, head, part, target, use_reentrant=False, preserve_rng_state=False)
        for part, target in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    return torch.cat(losses)


def _cross_entropy_block(head: Head, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(head.logits(hidden), targets, reduction="none")


@torch.no_grad()
def soft_embedding(head: Head, hidden: Tensor, rows: int) -> Tensor:
    """The mean embedding [n, hidden] under the plain soft-capped logits, `rows` positions at a time."""
    dtype = head.embedding.dtype
    parts = [
        # The cast to the weights' dtype before the softmax is as in the reference implementation.
        head.mix(head.logits(part).to(dtype).softmax(-1, torch.float32))
        for part in hidden.split(rows)
    ]
    return torch.cat(parts) * head.embedding_scale
