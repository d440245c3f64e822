"""Paths of the sampler: the states that a canvas really visits on its way from noise, with every draw.

Random corruption shows the model canvases that its own sampler never makes. Here the model of the run
samples, without gradients, from the same context and with the same rules as at inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma.model.kv_cache import AttentionContext
from dgemma.model.transformer import Transformer
from dgemma.sampling.rng import NoiseStream, noise_key, random_tokens
from dgemma.sampling.sampler import CanvasState, Sampler, open_canvas, step
from dgemma.sampling.vocab_scan import scan_vocab

# Shapes: rows = canvases, canvas = positions of a canvas.


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One step of canvases on their way: what the denoiser reads, and what is drawn from its answer."""

    canvas: Tensor  # [rows, canvas]
    soft: Tensor | None  # [rows, canvas, hidden]; None at the first step
    temperature: Tensor  # [rows]
    drawn: Tensor  # [rows, canvas]
    accepted: Tensor  # [rows, canvas] draws that the next canvas has; the others are forgotten
    is_open: Tensor  # [rows] the canvas had not settled before


@dataclass(frozen=True, kw_only=True)
class Path:
    visits: tuple[Visit, ...]
    end: CanvasState


@torch.no_grad()
def roll_out(
    stack: Transformer,
    context: AttentionContext,
    sampler: Sampler,
    seeds: Sequence[int],
    *,
    canvas_len: int,
    num_steps: int | None = None,
) -> Path:
    """Sample canvases after `context` from noise, until all settle or for `num_steps` steps.

    The draws of a row depend on its seed alone, and are those of `generate` with this seed.
    """
    device = context.lengths.device
    first = [0] * len(seeds)

    def noise(stream: NoiseStream, number: int) -> Tensor:
        key = noise_key(seeds, first, [number] * len(seeds), device)
        return random_tokens(key, stream, canvas_len, stack.config.vocab_size)

    state, soft = open_canvas(noise(NoiseStream.OPEN, 0)), None
    visits: list[Visit] = []
    for number in range(sampler.num_steps if num_steps is None else num_steps):
        if bool(state.settled.all()):
            break
        hidden = stack.denoise(state.canvas, context, soft)
        left = (sampler.num_steps - state.steps).to(torch.int32)
        temperature = sampler.schedule(left, sampler.num_steps)
        key = noise_key(seeds, first, [number] * len(seeds), device)
        scan = scan_vocab(hidden, stack.head, temperature, key)
        every = torch.ones_like(state.canvas, dtype=torch.bool)
        visits.append(
            Visit(
                canvas=state.canvas,
                soft=soft,
                temperature=temperature,
                drawn=scan.sampled,
                accepted=sampler.accept(sampler.score(scan), every),
                is_open=~state.settled,
            )
        )
        state = step(state, scan, noise(NoiseStream.RENOISE, number), sampler)
        soft = scan.soft
    return Path(visits=tuple(visits), end=state)


@torch.no_grad()
def visited_states(
    stack: Transformer, context: AttentionContext, sampler: Sampler, seeds: Sequence[int], visits: Tensor,
    *, canvas_len: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The canvas and soft embedding of each row before step `visits` [rows], counted from 0."""
    path = roll_out(stack, context, sampler, seeds, canvas_len=canvas_len, num_steps=int(visits.max()) + 1)
    canvas = path.visits[0].canvas
    soft = torch.zeros((*canvas.shape, stack.config.hidden_size), dtype=stack.embedding.dtype)
    soft = soft.to(canvas.device)
    for number, visit in enumerate(path.visits[1:], start=1):
        # A canvas that settles before its step stays at its last state.
        is_here = (visits >= number) & visit.is_open
        canvas = torch.where(is_here[:, None], visit.canvas, canvas)
        assert visit.soft is not None
        soft = torch.where(is_here[:, None, None], visit.soft, soft)
    return canvas, soft
