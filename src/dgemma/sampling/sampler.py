"""The sampler: temperature schedule, acceptance, renoise and stopping rule of one denoising step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from dgemma.params import GenerationParams
from dgemma.sampling.vocab_scan import VocabScan


class Schedule(Protocol):
    def __call__(self, steps_left: Tensor, num_steps: int) -> Tensor:
        """fp32 temperature for `steps_left` (num_steps at the first step, 1 at the last)."""
        ...


@dataclass(frozen=True, kw_only=True)
class LinearSchedule:
    """Falls from t_max at the first step towards t_min, which it never reaches."""

    t_min: float = 0.4
    t_max: float = 0.8

    def __call__(self, steps_left: Tensor, num_steps: int) -> Tensor:
        return self.t_min + (self.t_max - self.t_min) * (steps_left / num_steps)


class Score(Protocol):
    def __call__(self, scan: VocabScan) -> Tensor:
        """Uncertainty of each position [rows, canvas]: smaller is more certain."""
        ...


class Acceptance(Protocol):
    def __call__(self, uncertainty: Tensor, free: Tensor) -> Tensor:
        """True where the sampled token is kept [rows, canvas]; only free (not pinned) positions count."""
        ...


@dataclass(frozen=True)
class EntropyScore:
    def __call__(self, scan: VocabScan) -> Tensor:
        return scan.entropy


@dataclass(frozen=True)
class SurpriseScore:
    """Minus the log-probability of the argmax."""

    def __call__(self, scan: VocabScan) -> Tensor:
        return scan.log_mass - scan.top_logit


@dataclass(frozen=True)
class SampledSurpriseScore:
    """Minus the log-probability of the sampled token: confidence as masked diffusion models measure it."""

    def __call__(self, scan: VocabScan) -> Tensor:
        assert scan.sampled_logit is not None, "constrained scans have none; requests are checked before"
        return scan.log_mass - scan.sampled_logit


@dataclass(frozen=True, kw_only=True)
class EntropyBound:
    """The released rule: the most certain positions whose summed entropy, without the largest, is at most
    `bound`.

    That bounds their mutual information, so they may be sampled independently. At least one position.
    """

    bound: float = 0.1

    def __call__(self, uncertainty: Tensor, free: Tensor) -> Tensor:
        ordered, order = torch.where(free, uncertainty, float("inf")).sort(-1)
        kept = (ordered.cumsum(-1) - ordered) <= self.bound
        return torch.zeros_like(kept).scatter(-1, order, kept) & free


@dataclass(frozen=True, kw_only=True)
class ConfidenceThreshold:
    """Every position with at most this uncertainty, and always the most certain one."""

    at_most: float

    def __call__(self, uncertainty: Tensor, free: Tensor) -> Tensor:
        masked = torch.where(free, uncertainty, float("inf"))
        most_certain = torch.zeros_like(free).scatter(-1, masked.argmin(-1, keepdim=True), True)
        return ((masked <= self.at_most) | most_certain) & free


@dataclass(frozen=True, kw_only=True)
class FixedCount:
    """The `count` most certain positions."""

    count: int

    def __call__(self, uncertainty: Tensor, free: Tensor) -> Tensor:
        return _most_certain(uncertainty, free, self.count)


def _most_certain(uncertainty: Tensor, free: Tensor, count: int | Tensor) -> Tensor:
    """The `count` most certain of the free positions; of each row its own, if it is a tensor [rows, 1]."""
    order = torch.where(free, uncertainty, float("inf")).sort(-1).indices
    rank = torch.arange(uncertainty.shape[-1], device=uncertainty.device).expand_as(order)
    return torch.zeros_like(free).scatter(-1, order, rank < count) & free


class Stop(Protocol):
    def __call__(self, unchanged: Tensor, entropy: Tensor, free: Tensor) -> Tensor:
        """True [rows] where a canvas is settled.

        `unchanged` [rows]: for how many steps the argmax has stayed the same; `entropy` and `free`
        [rows, canvas]: only free positions count.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class StableAndConfident:
    """The argmax equals that of each of the last `stability` steps, and the mean entropy is low."""

    stability: int = 1
    confidence: float = 0.005

    def __call__(self, unchanged: Tensor, entropy: Tensor, free: Tensor) -> Tensor:
        mean = (entropy * free).sum(-1) / free.sum(-1).clamp(min=1)
        return (unchanged >= self.stability) & (mean < self.confidence)


# Shapes: rows = canvases, canvas = positions.


class Renoise(Protocol):
    def __call__(self, sampled: Tensor, accepted: Tensor, noise: Tensor) -> Tensor:
        """The next canvas [rows, canvas]."""
        ...


@dataclass(frozen=True)
class UniformRenoise:
    """Fresh noise wherever the sampled token was not accepted: nothing is frozen before the commit."""

    def __call__(self, sampled: Tensor, accepted: Tensor, noise: Tensor) -> Tensor:
        return torch.where(accepted, sampled, noise)


@dataclass(frozen=True, kw_only=True)
class Unmask:
    """Masked diffusion: a position holds the mask token until it is sampled, and then keeps its token.

    A step samples positions of the first block that has a mask: those that the sampler's `accept` keeps, and
    at least so many that all blocks take the same number of steps and the last step fills the canvas
    (LLaDA's schedule). `renoise` and `stop` are not asked: a canvas without a mask is settled.
    """

    block_len: int | None = None
    """Blocks of this many positions are filled one after the other; None: the canvas is one block."""

    def problem(self, canvas_len: int, num_steps: int) -> str | None:
        """Why a canvas cannot be filled so."""
        length = canvas_len if self.block_len is None else self.block_len
        if not 1 <= length <= canvas_len or canvas_len % length:
            return f"block_len is {length}; it must divide the canvas of {canvas_len} positions."
        count = canvas_len // length
        if num_steps < 1 or num_steps % count:
            return f"num_steps is {num_steps}; it must be a multiple of the {count} blocks of a canvas."
        return None


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """The five replaceable rules of a step, and the maximum number of steps per canvas.

    With `unmask`, canvases are of masks instead of random tokens. That needs a model that was trained so,
    whose config.json names its `mask_token_id`; DiffusionGemma's does not.
    """

    num_steps: int = 48
    schedule: Schedule = field(default_factory=LinearSchedule)
    score: Score = field(default_factory=EntropyScore)
    accept: Acceptance = field(default_factory=EntropyBound)
    renoise: Renoise = field(default_factory=UniformRenoise)
    stop: Stop = field(default_factory=StableAndConfident)
    unmask: Unmask | None = None


def masked_sampler(
    *,
    num_steps: int,
    block_len: int | None = None,
    min_confidence: float | None = None,
    temperature: float = 1.0,
) -> Sampler:
    """LLaDA's sampler: each step unmasks equally many positions, those whose sampled tokens are likeliest.

    min_confidence: also unmask all whose sampled token has at least this probability, in fewer steps (the
    dynamic rule of SDAR and LLaDA 2). Confidence is measured at `temperature`.
    """
    surprise = 0.0 if min_confidence is None else -math.log(max(min_confidence, 1e-30))
    return Sampler(
        num_steps=num_steps,
        schedule=LinearSchedule(t_min=temperature, t_max=temperature),
        score=SampledSurpriseScore(),
        accept=FixedCount(count=1) if min_confidence is None else ConfidenceThreshold(at_most=surprise),
        unmask=Unmask(block_len=block_len),
    )


def make_sampler(params: GenerationParams) -> Sampler:
    """The sampler that `params` describe.

    At temperature 0 the sample is the argmax, while entropies and soft embeddings keep the checkpoint's own
    schedule: a temperature of 0 would make every position certain.
    """
    heat = params.temperature or 1.0
    surprise = -math.log(max(params.min_confidence, 1e-30))
    rules: dict[str, tuple[Acceptance, Score]] = {
        "entropy_bound": (EntropyBound(bound=params.entropy_bound), EntropyScore()),
        "confidence": (ConfidenceThreshold(at_most=surprise), SurpriseScore()),
        "fixed": (FixedCount(count=params.accept_per_step), EntropyScore()),
    }
    accept, score = rules[params.acceptance]
    return Sampler(
        num_steps=params.max_denoising_steps,
        schedule=LinearSchedule(t_min=params.t_min * heat, t_max=params.t_max * heat),
        score=score,
        accept=accept,
        stop=StableAndConfident(stability=params.stability_threshold, confidence=params.confidence_threshold),
    )


@dataclass(frozen=True)
class CanvasState:
    """Canvases between two steps."""

    canvas: Tensor  # [rows, canvas] input of the next forward
    accepted: Tensor  # [rows, canvas] drawn at the last step; the rest of the canvas is noise, or pinned
    argmax: Tensor  # [rows, canvas] of the last step: what a commit would write
    unchanged: Tensor  # [rows] steps for which the argmax has stayed the same
    steps: Tensor  # [rows] steps taken
    settled: Tensor  # [rows]


def open_canvas(noise: Tensor) -> CanvasState:
    """Canvases of pure noise [rows, canvas]."""
    rows = noise.shape[0]
    count = torch.zeros(rows, dtype=torch.int64, device=noise.device)
    return CanvasState(
        canvas=noise,
        accepted=torch.zeros_like(noise, dtype=torch.bool),
        argmax=noise,
        unchanged=count,
        steps=count,
        settled=torch.zeros(rows, dtype=torch.bool, device=noise.device),
    )


@dataclass(frozen=True)
class LeftOut:
    """Positions that canvases are shorter by, because they hold end tokens for certain."""

    counts: Sequence[int]  # of each row
    canvas_len: int  # a whole canvas: sums run over as many positions, so that no batch changes their bits

    def add(self, entropy: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
        """`entropy` and `free` [rows, canvas], with these positions at the end: free, and without entropy."""
        more = (entropy.shape[0], self.canvas_len - entropy.shape[1])
        count = torch.tensor(self.counts, device=entropy.device)
        certain = torch.arange(more[1], device=entropy.device) < count[:, None]
        return torch.cat((entropy, entropy.new_zeros(more)), 1), torch.cat((free, certain), 1)


def step(
    state: CanvasState,
    scan: VocabScan,
    noise: Tensor,
    sampler: Sampler,
    free: Tensor | None = None,
    left_out: LeftOut | None = None,
) -> CanvasState:
    """Accept, renoise and test for the end. A settled canvas does not change, whatever shares its batch.

    `noise` [rows, canvas]: fresh random tokens, or the mask token everywhere if the sampler unmasks.
    `left_out` counts when the canvas is tested for its end, as it would on a whole canvas.
    """
    free = torch.ones_like(state.canvas, dtype=torch.bool) if free is None else free
    if sampler.unmask is not None:
        canvas, argmax, accepted = _unmask(state.canvas, scan, noise, sampler, sampler.unmask, free)
    else:
        accepted = sampler.accept(sampler.score(scan), free) & free
        canvas = torch.where(free, sampler.renoise(scan.sampled, accepted, noise), state.canvas)
        argmax = torch.where(free, scan.argmax, state.canvas)
    # Before the first step there is no argmax to compare with, even if the noise happens to equal this one.
    same = (argmax == state.argmax).all(-1) & (state.steps > 0)
    unchanged = torch.where(same, state.unchanged + 1, 0)
    steps = state.steps + 1
    if sampler.unmask is not None:
        settled = (accepted | ~free).all(-1)
    else:
        entropy, counted = (scan.entropy, free) if left_out is None else left_out.add(scan.entropy, free)
        settled = sampler.stop(unchanged, entropy, counted)
    settled = settled | (steps >= sampler.num_steps)
    kept = state.settled
    return CanvasState(
        canvas=torch.where(kept[:, None], state.canvas, canvas),
        accepted=torch.where(kept[:, None], state.accepted, accepted),
        argmax=torch.where(kept[:, None], state.argmax, argmax),
        unchanged=torch.where(kept, state.unchanged, unchanged),
        steps=torch.where(kept, state.steps, steps),
        settled=kept | settled,
    )


def _unmask(
    canvas: Tensor, scan: VocabScan, masks: Tensor, sampler: Sampler, rule: Unmask, free: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """-> the next canvas, the same with guesses in place of masks, and where it holds sampled tokens."""
    masked = (canvas == masks) & free
    canvas_len = canvas.shape[-1]
    block_len = rule.block_len or canvas_len
    block = torch.arange(canvas_len, device=canvas.device) // block_len
    in_block = block == block[masked.int().argmax(-1)][:, None]  # the first block with a mask
    candidates = masked & in_block
    # n positions in s steps: n // s each, and one more in the first n % s steps. How many are done tells
    # which step of the block this is.
    count = (free & in_block).sum(-1, keepdim=True)
    done = count - candidates.sum(-1, keepdim=True)
    num_steps = sampler.num_steps // (canvas_len // block_len)
    each, more = count // num_steps, count % num_steps
    least = each + (done < more * (each + 1))
    uncertainty = sampler.score(scan)
    chosen = sampler.accept(uncertainty, candidates) | _most_certain(uncertainty, candidates, least)
    chosen = chosen & candidates
    canvas = torch.where(chosen, scan.sampled, canvas)
    masked = masked & ~chosen
    return canvas, torch.where(masked, scan.argmax, canvas), free & ~masked
