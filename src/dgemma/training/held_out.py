"""Evaluation of the losses on held-out data: always the same examples, canvases and noise."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from dgemma.model.ranks import Ranks
from dgemma.model.transformer import Transformer
from dgemma.training.data.canvases import CanvasSettings, TrainingBatch, make_batch
from dgemma.training.data.records import TrainingExample
from dgemma.training.objective import TokenLosses, token_losses
from dgemma.training.report import NOISE_BINS, HeldOutReport, noise_bin

# Noise that differs from training's, even for an example that is in both data sets.
_SEED_CHANGE = 0x68656C64


@dataclass
class LossSums:
    """Sums of losses over batches, for means over supervised tokens."""

    diffusion: float = 0.0
    num_diffusion: float = 0.0
    encoder: float = 0.0
    num_encoder: float = 0.0

    def __post_init__(self) -> None:
        self.by_noise = [(0.0, 0.0)] * NOISE_BINS
        self.rewards: list[float] = []
        self.steps: list[int] = []

    def add_paths(self, rewards: Tensor, steps: Tensor) -> None:
        self.rewards += rewards.tolist()
        self.steps += steps.tolist()

    @property
    def reward(self) -> float | None:
        """The mean reward; None where there is none."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    @property
    def path_steps(self) -> float | None:
        return sum(self.steps) / len(self.steps) if self.steps else None

    def add(self, losses: TokenLosses, batch: TrainingBatch) -> None:
        rows = (losses.diffusion.detach() * batch.weights).sum(1).tolist()
        counts = batch.weights.sum(1).tolist()
        self.diffusion += sum(rows)
        self.num_diffusion += sum(counts)
        self.encoder += float((losses.encoder.detach() * batch.encoder_weights).sum())
        self.num_encoder += float(batch.encoder_weights.sum())
        for loss, count, level in zip(rows, counts, batch.noise.tolist(), strict=True):
            at = noise_bin(level)
            self.by_noise[at] = (self.by_noise[at][0] + loss, self.by_noise[at][1] + count)

    def of_all(self, ranks: Ranks) -> LossSums:
        """With the sums of every rank."""
        total = LossSums()
        for part in ranks.exchange(self):
            total.diffusion += part.diffusion
            total.num_diffusion += part.num_diffusion
            total.encoder += part.encoder
            total.num_encoder += part.num_encoder
            total.by_noise = [
                (loss + more, count + further)
                for (loss, count), (more, further) in zip(total.by_noise, part.by_noise, strict=True)
            ]
            total.rewards += part.rewards
            total.steps += part.steps
        return total

    @property
    def means(self) -> tuple[float, float]:
        """Diffusion and encoder loss per supervised token; 0 where the encoder is not supervised."""
        return self.diffusion / max(self.num_diffusion, 1.0), self.encoder / max(self.num_encoder, 1.0)

    @property
    def noise_means(self) -> tuple[float | None, ...]:
        return tuple(loss / count if count else None for loss, count in self.by_noise)


class Examples(Protocol):
    """Examples by their presentation, as an `ExampleStream` has them."""

    def take(self, first: int, count: int, /) -> Sequence[TrainingExample]: ...


@torch.no_grad()
def evaluate_held_out(
    stack: Transformer,
    stream: Examples,
    settings: CanvasSettings,
    *,
    step: int,
    num_examples: int,
    batch_len: int,
) -> HeldOutReport:
    """Both losses over the first `num_examples` presentations of `stream`, `batch_len` at a time."""
    started = time.monotonic()
    fixed = replace(
        settings,
        seed=settings.seed ^ _SEED_CHANGE,
        pad_to=1,
        pack_to=0,
        pad_chosen_to=1,
        encode_answers=True,
        # Fixed, so that all runs are comparable.
        per_example=1,
        guesses=1,
        pad_guessed_to=1,
        noise_power=1.0,
        shifted=0.0,
        runs=0.0,
        visits=0,
    )
    sums = LossSums()
    # Not compiled: other shapes and no gradients would need graphs of their own for a few forwards.
    with torch.compiler.set_stance("force_eager"):
        for first in range(0, num_examples, batch_len):
            count = min(batch_len, num_examples - first)
            batch = make_batch(stream.take(first, count), range(first, first + count), fixed)
            batch = batch.to(stack.norm.weight.device)
            sums.add(token_losses(stack, batch), batch)
    diffusion, encoder = sums.means
    return HeldOutReport(
        step=step,
        diffusion=diffusion,
        encoder=encoder,
        diffusion_by_noise=sums.noise_means,
        examples=num_examples,
        seconds=time.monotonic() - started,
    )
