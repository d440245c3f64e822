"""Learning from a reward: policy gradients along the sampler's real paths.

A path is a chain of draws whose probabilities are known. Of each step only the accepted draws reach the next
canvas; the others are replaced by noise, which does not depend on the weights. So the log-probability of a
path is the sum over the accepted draws of all steps but the last, whose draws are not used. Which draws are
accepted, and the last argmax, follow from the logits without chance; no gradient goes through them.

The paths of one example are compared with each other (group-relative baseline, as in GRPO): a path is made
more likely by as much as its reward is above their mean, in standard deviations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dgemma.errors import InputError
from dgemma.language_model import LanguageModel
from dgemma.model.kv_cache import AttentionContext
from dgemma.model.transformer import Transformer
from dgemma.sampling.sampler import Sampler
from dgemma.sampling.vocab_scan import scale
from dgemma.training.data.canvases import TrainingBatch
from dgemma.training.named_object import load_named
from dgemma.training.objective import encode
from dgemma.training.rollout import Path, Visit, roll_out

# Shapes: rows = paths, those of an example side by side; canvas = positions of a canvas.

MIN_SPREAD = 1e-4  # rewards of a group that differ less are all the same
_SEED_STEP = 0x9E3779B97F4A7C15  # seeds of an example's paths


@dataclass(frozen=True, kw_only=True)
class RolloutAnswer:
    """What a reward function judges."""

    prompt: str
    text: str
    response: str  # of the data
    tokens: tuple[int, ...]  # of the whole canvas
    expected: tuple[int, ...]  # the canvas of the data
    steps: int
    settled: bool  # False: the steps ran out


Reward = Callable[[RolloutAnswer], float]


def load_reward(named: Any) -> Reward:
    """A function, or "module:name" or "file.py:name" of one."""
    found: Reward = named if callable(named) else load_named(str(named), field="rollout.reward")
    if not callable(found):
        raise InputError.about("rollout.reward", f"has {named!r}, which is not a function.")
    return found


@dataclass(frozen=True, kw_only=True)
class RewardedPaths:
    context: AttentionContext
    path: Path
    rewards: Tensor  # [rows] fp32
    advantages: Tensor  # [rows] fp32


@torch.no_grad()
def follow(
    stack: Transformer,
    batch: TrainingBatch,
    sampler: Sampler,
    judge: Callable[[Path], Sequence[float]],
    *,
    samples: int,
    num_steps: int,
) -> RewardedPaths:
    """Sample `samples` paths of each canvas of the batch, and judge them."""
    assert batch.seeds is not None
    _, context = encode(stack, batch)
    context = context.select(
        torch.arange(len(batch.clean), device=batch.clean.device).repeat_interleave(samples)
    )
    seeds = [
        (seed + number * _SEED_STEP) % (1 << 63) for seed in batch.seeds.tolist() for number in range(samples)
    ]
    path = roll_out(stack, context, sampler, seeds, canvas_len=batch.clean.shape[1], num_steps=num_steps)
    rewards = torch.tensor(list(judge(path)), dtype=torch.float32, device=batch.clean.device)
    return RewardedPaths(context=context, path=path, rewards=rewards, advantages=relative(rewards, samples))


def relative(rewards: Tensor, samples: int) -> Tensor:
    """Each reward less the mean of its group of `samples`, in standard deviations of the group."""
    groups = rewards.view(-1, samples)
    spread = groups.std(1, correction=0, keepdim=True)
    centred = groups - groups.mean(1, keepdim=True)
    return torch.where(spread > MIN_SPREAD, centred / spread.clamp(min=MIN_SPREAD), 0.0).flatten()


def backward(stack: Transformer, found: RewardedPaths, *, num_paths: int) -> None:
    """Add the gradient of -(advantage x log-probability of the path), over `num_paths`, visit by visit."""
    visits = found.path.visits
    for visit, following in itertools.pairwise(visits):
        rows = (following.is_open & (found.advantages != 0)).nonzero()[:, 0]
        if len(rows):
            log_probs = visit_log_probs(stack, found.context, visit, rows)
            (-(found.advantages[rows] * log_probs).sum() / num_paths).backward()


def visit_log_probs(stack: Transformer, context: AttentionContext, visit: Visit, rows: Tensor) -> Tensor:
    """The log-probability of the accepted draws of `rows` in one step [len(rows)]."""
    hidden = stack.denoise(
        visit.canvas[rows], context.select(rows), None if visit.soft is None else visit.soft[rows]
    )
    logits = scale(stack.head.logits(hidden), visit.temperature[rows])
    drawn = logits.log_softmax(-1).gather(-1, visit.drawn[rows][..., None])[..., 0]
    return (drawn * visit.accepted[rows]).sum(-1)


def rollout_answers(
    lm: LanguageModel, batch: TrainingBatch, path: Path, samples: int, num_steps: int
) -> list[RolloutAnswer]:
    """The answers of the paths, as text up to the first end token where the model has a tokenizer."""
    ends = frozenset(lm.generation_defaults.end_tokens)

    def text(tokens: Sequence[int]) -> str:
        kept = itertools.takewhile(lambda token: token not in ends, tokens)
        return lm.tokenizer.decode(kept) if lm.has_tokenizer else ""

    answers = []
    for row, (tokens, steps) in enumerate(
        zip(path.end.argmax.tolist(), path.end.steps.tolist(), strict=True)
    ):
        example = row // samples
        expected = batch.clean[example].tolist()
        prompt = batch.context_tokens(example)
        answers.append(
            RolloutAnswer(
                prompt=lm.tokenizer.decode(prompt) if lm.has_tokenizer else "",
                text=text(tokens),
                response=text(expected),
                tokens=tuple(tokens),
                expected=tuple(expected),
                steps=steps,
                settled=steps < num_steps,
            )
        )
    return answers
