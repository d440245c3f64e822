"""The engine's plain twin: one answer, through the two doors and a growing cache, in sixty lines."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dgemma.diffusion.noise import Place, Use, place_at, random_tokens
from dgemma.diffusion.reading import Reading
from dgemma.diffusion.step import Sampler, open_canvas, step
from dgemma.engine.looking import CAUSAL_STEP
from dgemma.events import Answer, Timings
from dgemma.generation.job import most_tokens
from dgemma.generation.parts import log_probs, read_vocabulary, sampler_for
from dgemma.generation.writer import AnswerWriter
from dgemma.params import GenerationParams
from dgemma.text.tokenizer import Tokenizer

Noise = Callable[[Place, Use, int, int], Tensor]
Read = Callable[[Any, Tensor, Tensor, Place | None, GenerationParams], Reading]


@torch.inference_mode()
def plain_answer(
    model: Any,
    prompt: tuple[int, ...],
    *,
    seed: int,
    params: GenerationParams,
    tokenizer: Tokenizer | None = None,
    sampler: Sampler | None = None,
    noise: Noise = random_tokens,
    read: Read = read_vocabulary,
) -> Answer:
    sampler = sampler or sampler_for(params)
    max_tokens = most_tokens(model.config, len(prompt), params.max_tokens)
    writer = AnswerWriter(row=0, seed=seed, max_tokens=max_tokens, params=params, tokenizer=tokenizer)
    cache = model.new_cache(1)
    hidden = model.encode(torch.tensor([prompt]), cache)
    while writer.reason is None:
        if params.decode == "causal":
            place = place_at([seed], [writer.canvas], [CAUSAL_STEP], model.device)
            heat = torch.tensor([params.temperature or 1.0])
            reading = read(model.stack, hidden[:, -1:], heat, place if params.temperature else None, params)
            tokens, steps = reading.drawn[0].tolist(), 0
        else:
            tokens, steps, reading = _refined(model, cache, writer, params, sampler, noise, read)
        likeliest = log_probs(reading)
        words = None
        if likeliest is not None:
            pairs = zip(likeliest.words[0].tolist(), likeliest.logits[0].tolist(), strict=True)
            # A truncation may leave fewer words than were asked for.
            words = [tuple(p for p in zip(*pair, strict=True) if p[1] > -math.inf) for pair in pairs]
        writer.commit(tokens, steps=steps, logprobs=words)
        if writer.reason is None:
            hidden = model.encode(torch.tensor([tokens]), cache)
    return writer.answer(decode=params.decode, timings=Timings(), prompt_tokens=len(prompt), cached_tokens=0)


def _refined(
    model: Any,
    cache: Any,
    writer: AnswerWriter,
    params: GenerationParams,
    sampler: Sampler,
    noise: Noise,
    read: Read,
) -> tuple[list[int], int, Reading]:
    size = (model.config.canvas_len, model.config.vocab_size)
    place = place_at([writer.seed], [writer.canvas], [0], model.device)
    state, soft, number = open_canvas(noise(place, Use.OPEN, *size)), None, 0
    while not state.settled:
        place = place_at([writer.seed], [writer.canvas], [number], model.device)
        left = (sampler.num_steps - state.steps).to(torch.int32)
        hidden = model.denoise(state.canvas, cache, soft)
        draws = place if params.temperature > 0 else None
        reading = read(model.stack, hidden, sampler.schedule(left, sampler.num_steps), draws, params)
        state = step(state, reading, noise(place, Use.RENOISE, *size), sampler)
        soft, number = reading.soft, number + 1
    return state.guess[0].tolist(), number, reading
