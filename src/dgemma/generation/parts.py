"""The parts of a generation, each of use alone: sampler, prefill, reading the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dgemma.diffusion.acceptance import (
    Acceptance,
    ConfidenceThreshold,
    EntropyBound,
    EntropyScore,
    FixedCount,
    Score,
    SurpriseScore,
)
from dgemma.diffusion.likeliest import NUCLEUS, truncation_floor
from dgemma.diffusion.noise import Place, place_at
from dgemma.diffusion.reading import Likeliest, Reading, read_dense, scaled_logits
from dgemma.diffusion.schedule import LinearSchedule
from dgemma.diffusion.step import Sampler
from dgemma.diffusion.stopping import StableAndConfident
from dgemma.diffusion.walk import Wishes, walk
from dgemma.model.cache import KVCache
from dgemma.model.config import ModelConfig
from dgemma.model.stack import Stack
from dgemma.params import GenerationParams

# Shapes: rows = prompts or canvases of a batch, canvas = positions of a canvas.

# The prompt is read in pieces of so many tokens, so that a deadline can fall between two.
PREFILL_PIECE = 1024


class Model(Protocol):
    """What a generation asks of a model."""

    stack: Stack

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device: ...

    def new_cache(self, batch: int = 1, capacity: int | None = None) -> KVCache: ...

    def encode(self, tokens: Tensor, cache: KVCache, lengths: Sequence[int] | None = None) -> Tensor: ...

    def denoise(self, canvas: Tensor, cache: KVCache, soft: Tensor | None = None) -> Tensor: ...


def sampler_for(params: GenerationParams) -> Sampler:
    """The sampler that `params` describe.

    At temperature 0 the draw is the likeliest word, while entropies and mean embeddings stay those of
    the checkpoint's own schedule: at no temperature at all every position would look certain.
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


def prefill(
    model: Model, prompts: Sequence[Sequence[int]], cache: KVCache, is_late: Callable[[], bool]
) -> Tensor | None:
    """Read the prompts into `cache`; -> the hidden state of each one's last token [rows, 1, hidden].

    None if it got late before the end.
    """
    longest = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    last: list[Tensor | None] = [None] * len(prompts)
    for begin in range(0, longest, PREFILL_PIECE):
        if is_late():
            return None
        piece = tokens[:, begin : begin + PREFILL_PIECE]
        lengths = [min(max(len(prompt) - begin, 0), piece.shape[1]) for prompt in prompts]
        hidden = model.encode(piece, cache, lengths=lengths)
        for row, length in enumerate(lengths):
            if length:
                last[row] = hidden[row, length - 1]
    return torch.stack([state for state in last if state is not None])[:, None]


def read_vocabulary(
    model: Model, hidden: Tensor, temperature: Tensor, place: Place | None, params: GenerationParams
) -> Reading:
    """One look at the vocabulary behind `hidden` [rows, canvas, hidden] at a temperature per row.

    In the exact way each row walks alone, so that its bits do not depend on its company.
    """
    read = _read if hidden.shape[1] > 1 else _read_token
    if not model.stack.execution.exact:
        return read(model.stack, hidden, temperature, place, params)
    readings = [
        read(
            model.stack,
            hidden[row : row + 1],
            temperature[row : row + 1],
            None if place is None else place.row(row),
            params,
        )
        for row in range(hidden.shape[0])
    ]
    return _stack_rows(readings)


@torch.inference_mode()
def compile_ahead(model: Model) -> None:
    """Let the fused kernel of one canvas be made now, not in the first step of a request."""
    config = model.config
    hidden = torch.zeros(
        1, config.canvas_len, config.hidden_size, dtype=model.stack.embedding.dtype, device=model.device
    )
    place = place_at([0], [0], [0], model.device)
    read_vocabulary(model, hidden, torch.ones(1, device=model.device), place, GenerationParams())


def _read(
    stack: Stack, hidden: Tensor, temperature: Tensor, place: Place | None, params: GenerationParams
) -> Reading:
    head = stack.head
    wishes = Wishes(num_likeliest=params.logprobs or 0, compiled=stack.execution.fused_vocabulary)
    if params.top_k is not None or params.top_p is not None:
        # The floor is only known when all words were seen: hence a second walk.
        count = NUCLEUS if params.top_p is not None else params.top_k
        first = walk(hidden, head, temperature, None, Wishes(num_likeliest=count or 0, with_soft=False))
        assert first.likeliest is not None
        floor = truncation_floor(first.likeliest, first.log_mass, params.top_k, params.top_p)
        wishes = replace(wishes, floor=floor)
    return walk(hidden, head, temperature, place, wishes)


def _read_token(
    stack: Stack, hidden: Tensor, temperature: Tensor, place: Place | None, params: GenerationParams
) -> Reading:
    """One position per row [rows, 1, hidden], read causally: all its logits at once are a small thing."""
    head = stack.head
    scaled = scaled_logits(head.products(hidden), head.logit_cap, temperature)
    if params.top_k is not None or params.top_p is not None:
        top = scaled.topk(min(NUCLEUS, scaled.shape[-1]))
        likeliest = Likeliest(top.indices, top.values)
        floor = truncation_floor(likeliest, scaled.logsumexp(-1), params.top_k, params.top_p)
        scaled = torch.where(scaled < floor[..., None], float("-inf"), scaled)
    reading = read_dense(scaled, place)
    if params.logprobs:
        top = scaled.topk(params.logprobs)
        reading = replace(reading, likeliest=Likeliest(top.indices, top.values))
    return reading


def _stack_rows(readings: Sequence[Reading]) -> Reading:
    if len(readings) == 1:
        return readings[0]
    joined: dict[str, Any] = {}
    for field in fields(Reading):
        values = [getattr(reading, field.name) for reading in readings]
        if isinstance(values[0], Likeliest):
            joined[field.name] = Likeliest(*(torch.cat(part) for part in zip(*values, strict=True)))
        else:
            joined[field.name] = None if values[0] is None else torch.cat(values)
    return Reading(**joined)
