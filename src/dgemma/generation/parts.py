"""The parts of a generation, each of use alone: the sampler, reading the vocabulary, a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

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
from dgemma.diffusion.language import Strings
from dgemma.diffusion.likeliest import NUCLEUS, truncation_floor
from dgemma.diffusion.noise import Place, Use, place_at, random_tokens
from dgemma.diffusion.pins import CanvasPins, Limited, fix, limit
from dgemma.diffusion.reading import Likeliest, Reading, read_dense, scale, scaled_logits
from dgemma.diffusion.schedule import LinearSchedule
from dgemma.diffusion.step import CanvasState, Sampler, step
from dgemma.diffusion.stopping import StableAndConfident
from dgemma.diffusion.walk import Vocabulary, Wishes, walk
from dgemma.diffusion.within import read_within
from dgemma.given import Given, Words
from dgemma.model.stack import Stack
from dgemma.params import GenerationParams

# Shapes: rows = prompts or canvases of a batch, canvas = positions of a canvas.


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


def read_vocabulary(
    stack: Stack,
    hidden: Tensor,
    temperature: Tensor,
    place: Place | None,
    params: GenerationParams,
    bias: Tensor | None = None,
) -> Reading:
    """One look at the vocabulary behind `hidden` [rows, canvas, hidden] at a temperature per row.

    `bias` [rows, vocabulary] is added to the logits. In the exact way each row walks alone, so that its bits
    do not depend on its company.
    """
    read = _read if hidden.shape[1] > 1 else _read_token
    if bias is not None:
        bias = scale(bias[:, None], temperature)[:, 0]
    if not stack.execution.exact:
        return read(stack, hidden, temperature, place, params, bias)
    readings = []
    for row in range(hidden.shape[0]):
        only = slice(row, row + 1)
        here = None if place is None else place.row(row)
        own = None if bias is None else bias[only]
        readings.append(read(stack, hidden[only], temperature[only], here, params, own))
    return _stack_rows(readings)


def refine(
    stack: Stack,
    state: CanvasState,
    hidden: Tensor,
    place: Place,
    sampler: Sampler,
    params: GenerationParams,
    bias: Tensor | None = None,
    pins: Sequence[CanvasPins | None] | None = None,
    strings: Sequence[Strings] | None = None,
) -> tuple[CanvasState, Reading]:
    """From a forward's hidden states to the next canvases: look at the vocabulary, accept and renoise.

    `pins`: what is given of each canvas. `strings`: what each may hold, if they keep to languages. Without
    languages, reads nothing back from the device.
    """
    # int32, as the reference counts: the temperature's last bit depends on it.
    left = (sampler.num_steps - state.steps).to(torch.int32)
    temperature = sampler.schedule(left, sampler.num_steps)
    draws = place if params.temperature > 0 else None
    if strings is None:
        reading = read_vocabulary(stack, hidden, temperature, draws, params, bias)
    else:
        reading = read_strings(stack, hidden, temperature, draws, params, bias, pins, strings)
    free = None
    if pins is not None and any(pins):
        free = torch.stack(
            [torch.ones_like(state.canvas[0], dtype=torch.bool) if p is None else p.free for p in pins]
        )
        reading = fix(reading, state.canvas, free, stack.embed(state.canvas))
        for row, one in enumerate(pins):
            if one is not None and one.limited is not None and strings is None:
                only = slice(row, row + 1)
                own = None if bias is None else scale(bias[only, None], temperature[only])[:, 0]
                reading = limit(
                    reading, row, hidden[row], stack.head, temperature[only], draws, one.limited, own
                )
    noise = random_tokens(place, Use.RENOISE, state.canvas.shape[1], stack.config.vocab_size)
    return step(state, reading, noise, sampler, free), reading


def pins_of(given: Given | None, canvas: int, canvas_len: int, device: torch.device) -> CanvasPins | None:
    """What is given of the canvas of this number; None: nothing."""
    here = range(canvas * canvas_len, (canvas + 1) * canvas_len)

    def some(positions: Mapping[int, Words]) -> Limited | None:
        inside = sorted(position for position in positions if position in here)
        if not inside:
            return None
        words = tuple(torch.tensor(positions[position], device=device) for position in inside)
        return Limited(torch.tensor([p - here.start for p in inside], device=device), words)

    if given is None:
        return None
    tokens = torch.zeros(canvas_len, dtype=torch.int64)
    begins = torch.zeros(canvas_len, dtype=torch.bool)
    free = torch.ones(canvas_len, dtype=torch.bool)
    for position in here:
        token = given.fixed.get(position, given.begin.get(position))
        if token is not None:
            tokens[position - here.start], begins[position - here.start] = token, True
        free[position - here.start] = position not in given.fixed
    return CanvasPins(
        tokens.to(device), begins.to(device), free.to(device), some(given.among), some(given.watch)
    )


def log_probs(reading: Reading) -> Likeliest | None:
    """The likeliest words with their log-probabilities, where they were asked for."""
    if reading.likeliest is None:
        return None
    return Likeliest(reading.likeliest.words, reading.likeliest.logits - reading.log_mass[..., None])


@torch.inference_mode()
def compile_ahead(stack: Stack) -> None:
    """Let the fused kernel of one canvas be made now, not in the first step of a request."""
    config, device = stack.config, stack.norm.weight.device
    shape = (1, config.canvas_len, config.hidden_size)
    hidden = torch.zeros(shape, dtype=stack.embedding.dtype, device=device)
    place = place_at([0], [0], [0], device)
    read_vocabulary(stack, hidden, torch.ones(1, device=device), place, GenerationParams())


def read_strings(
    stack: Stack,
    hidden: Tensor,
    temperature: Tensor,
    place: Place | None,
    params: GenerationParams,
    bias: Tensor | None,
    pins: Sequence[CanvasPins | None] | None,
    strings: Sequence[Strings],
) -> Reading:
    """As `read_vocabulary`, of canvases each of which keeps to its language; each row alone."""
    if bias is not None:
        bias = scale(bias[:, None], temperature)[:, 0]
    readings = []
    for row, own in enumerate(strings):
        only = slice(row, row + 1)
        own_bias = None if bias is None else bias[only]
        floor = _floor(stack.head, hidden[only], temperature[only], params, own_bias)
        readings.append(
            read_within(
                hidden[only],
                stack.head,
                temperature[only],
                None if place is None else place.row(row),
                own,
                pins=None if pins is None else pins[row],
                bias=own_bias,
                floor=floor,
                num_likeliest=params.logprobs or 0,
            )
        )
    return _stack_rows(readings)


def _read(
    stack: Stack,
    hidden: Tensor,
    temperature: Tensor,
    place: Place | None,
    params: GenerationParams,
    bias: Tensor | None,
) -> Reading:
    head = stack.head
    compiled = stack.execution.fused_vocabulary
    wishes = Wishes(bias=bias, num_likeliest=params.logprobs or 0, compiled=compiled)
    floor = _floor(head, hidden, temperature, params, bias)
    return walk(hidden, head, temperature, place, replace(wishes, floor=floor))


def _floor(
    head: Vocabulary, hidden: Tensor, temperature: Tensor, params: GenerationParams, bias: Tensor | None
) -> Tensor | None:
    """Below which logit words are left out [rows, canvas], if few are wished: known when all were seen."""
    if params.top_k is None and params.top_p is None:
        return None
    count = NUCLEUS if params.top_p is not None else params.top_k
    first_wishes = Wishes(bias=bias, num_likeliest=count or 0, with_soft=False)
    first = walk(hidden, head, temperature, None, first_wishes)
    assert first.likeliest is not None
    return truncation_floor(first.likeliest, first.log_mass, params.top_k, params.top_p)


def _read_token(
    stack: Stack,
    hidden: Tensor,
    temperature: Tensor,
    place: Place | None,
    params: GenerationParams,
    bias: Tensor | None,
) -> Reading:
    """One position per row [rows, 1, hidden], read causally: all its logits at once are a small thing."""
    head = stack.head
    scaled = scaled_logits(head.products(hidden), head.logit_cap, temperature)
    if bias is not None:
        scaled = scaled + bias[:, None]
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
