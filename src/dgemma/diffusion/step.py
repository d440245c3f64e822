"""One refinement step: from a canvas and a look at the vocabulary to the next canvas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from dgemma.diffusion.acceptance import Acceptance, EntropyBound, EntropyScore, Score
from dgemma.diffusion.reading import Reading
from dgemma.diffusion.schedule import LinearSchedule, Schedule
from dgemma.diffusion.stopping import StableAndConfident, Stop

# Shapes: rows = canvases, canvas = positions.


class Renoise(Protocol):
    def __call__(self, drawn: Tensor, accepted: Tensor, noise: Tensor) -> Tensor:
        """The next canvas [rows, canvas]."""
        ...


@dataclass(frozen=True)
class UniformRenoise:
    """Fresh noise wherever the draw was not accepted: nothing is frozen before the commit."""

    def __call__(self, drawn: Tensor, accepted: Tensor, noise: Tensor) -> Tensor:
        return torch.where(accepted, drawn, noise)


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """The five replaceable parts of a step, and the most steps a canvas may take."""

    num_steps: int = 48
    schedule: Schedule = field(default_factory=LinearSchedule)
    score: Score = field(default_factory=EntropyScore)
    accept: Acceptance = field(default_factory=EntropyBound)
    renoise: Renoise = field(default_factory=UniformRenoise)
    stop: Stop = field(default_factory=StableAndConfident)


@dataclass(frozen=True)
class CanvasState:
    """Canvases between two steps."""

    canvas: Tensor  # [rows, canvas] what the next forward reads
    guess: Tensor  # [rows, canvas] the last argmax: what a commit would write
    unchanged: Tensor  # [rows] steps for which the guess has stayed the same
    steps: Tensor  # [rows] steps taken
    settled: Tensor  # [rows]


def open_canvas(noise: Tensor) -> CanvasState:
    """Canvases of pure noise [rows, canvas]."""
    rows = noise.shape[0]
    count = torch.zeros(rows, dtype=torch.int64, device=noise.device)
    return CanvasState(
        canvas=noise,
        guess=noise,
        unchanged=count,
        steps=count,
        settled=torch.zeros(rows, dtype=torch.bool, device=noise.device),
    )


def step(
    state: CanvasState,
    reading: Reading,
    noise: Tensor,
    sampler: Sampler,
    free: Tensor | None = None,
) -> CanvasState:
    """Accept, renoise and judge. A settled canvas stays as it is, whatever shares its batch."""
    free = torch.ones_like(state.canvas, dtype=torch.bool) if free is None else free
    accepted = sampler.accept(sampler.score(reading), free)
    canvas = sampler.renoise(reading.drawn, accepted, noise)
    canvas = torch.where(free, canvas, state.canvas)
    guess = torch.where(free, reading.guess, state.canvas)
    # Before the first step nothing was guessed yet, even if the noise happens to equal the guess.
    same = (guess == state.guess).all(-1) & (state.steps > 0)
    unchanged = torch.where(same, state.unchanged + 1, 0)
    steps = state.steps + 1
    settled = sampler.stop(unchanged, reading.entropy, free) | (steps >= sampler.num_steps)
    kept = state.settled
    return CanvasState(
        canvas=torch.where(kept[:, None], state.canvas, canvas),
        guess=torch.where(kept[:, None], state.guess, guess),
        unchanged=torch.where(kept, state.unchanged, unchanged),
        steps=torch.where(kept, state.steps, steps),
        settled=kept | settled,
    )
