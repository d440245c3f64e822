"""Paths of the sampler: the states that a canvas really visits on its way from noise, with every draw.

Random corruption shows the model canvases that its own sampler never makes. Here the model of the run
samples, without gradients, from the same context and with the same rules as at inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dgemma.model.kv_cache import AttentionContext
from dgemma.model.transformer import Transformer
from dgemma.sampling.rng import NoiseKey, NoiseStream, noise_key, random_tokens
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


class _Sampling:
    """The sampler's steps of canvases after a context. A row's draws are those of `generate` by its seed."""

    def __init__(
        self,
        stack: Transformer,
        context: AttentionContext,
        sampler: Sampler,
        seeds: Sequence[int],
        length: int,
    ) -> None:
        self._stack, self._context, self._sampler, self._length = stack, context, sampler, length
        self._seeds = list(seeds)
        self.state = open_canvas(self._noise(NoiseStream.OPEN, 0))
        self.soft: Tensor | None = None

    def keep(self, rows: Tensor) -> None:
        """Leave out all other rows."""
        self._context = self._context.select(rows)
        self._seeds = [self._seeds[row] for row in rows.tolist()]
        parts = {part.name: getattr(self.state, part.name)[rows] for part in fields(CanvasState)}
        self.state = CanvasState(**parts)
        self.soft = None if self.soft is None else self.soft[rows]

    def advance(self, number: int) -> Visit:
        """Step `number` of all rows."""
        sampler, state, soft = self._sampler, self.state, self.soft
        hidden = self._stack.denoise(state.canvas, self._context, soft)
        left = (sampler.num_steps - state.steps).to(torch.int32)
        temperature = sampler.schedule(left, sampler.num_steps)
        scan = scan_vocab(hidden, self._stack.head, temperature, self._key(number))
        self.state = step(state, scan, self._noise(NoiseStream.RENOISE, number), sampler)
        self.soft = scan.soft
        return Visit(
            canvas=state.canvas,
            soft=soft,
            temperature=temperature,
            drawn=scan.sampled,
            accepted=self.state.accepted,
            is_open=~state.settled,
        )

    def _noise(self, stream: NoiseStream, number: int) -> Tensor:
        return random_tokens(self._key(number), stream, self._length, self._stack.config.vocab_size)

    def _key(self, number: int) -> NoiseKey:
        count = len(self._seeds)
        return noise_key(self._seeds, [0] * count, [number] * count, self._context.lengths.device)


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
    """Sample canvases after `context` from noise, until all settle or for `num_steps` steps."""
    sampling = _Sampling(stack, context, sampler, seeds, canvas_len)
    visits: list[Visit] = []
    for number in range(sampler.num_steps if num_steps is None else num_steps):
        if bool(sampling.state.settled.all()):
            break
        visits.append(sampling.advance(number))
    return Path(visits=tuple(visits), end=sampling.state)


@torch.no_grad()
def visited_states(
    stack: Transformer,
    context: AttentionContext,
    sampler: Sampler,
    seeds: Sequence[int],
    picks: Tensor,
    *,
    canvas_len: int,
    num_steps: int,
) -> tuple[Tensor, Tensor]:
    """States of each row before its steps, of which there are at most `num_steps`: canvas and soft embedding.

    picks [rows, states] in [0, 1) choose them: 0 is the first of the states that the row has, 0.99 the last.
    The result has the states of a row side by side [rows * states, canvas].
    """
    sampling = _Sampling(stack, context, sampler, seeds, canvas_len)
    rows = torch.arange(len(picks), device=picks.device)
    counts = torch.zeros_like(rows)
    visited: list[tuple[Tensor, Tensor, Tensor | None]] = []  # rows, canvas, soft embedding
    for number in range(num_steps):
        visited.append((rows, sampling.state.canvas, sampling.soft))
        counts[rows] += 1
        if number == num_steps - 1:
            break
        sampling.advance(number)
        is_open = (~sampling.state.settled).nonzero()[:, 0]
        if len(is_open) == 0:
            break
        if len(is_open) < len(rows):
            sampling.keep(is_open)
            rows = rows[is_open]
    chosen = (picks * counts[:, None]).long()
    canvas = torch.empty(*picks.shape, canvas_len, dtype=torch.int64, device=picks.device)
    soft = torch.zeros(
        *canvas.shape, stack.config.hidden_size, dtype=stack.embedding.dtype, device=picks.device
    )
    for number, (some, own_canvas, own_soft) in enumerate(visited):
        at, state = (chosen[some] == number).nonzero(as_tuple=True)
        canvas[some[at], state] = own_canvas[at]
        if own_soft is not None:
            soft[some[at], state] = own_soft[at]
    return canvas.flatten(0, 1), soft.flatten(0, 1)
