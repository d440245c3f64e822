"""The engine's plain twin: one answer, through the two doors and a growing cache, in sixty lines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from dgemma.engine.causal_sampling import CAUSAL_STEP
from dgemma.engine.model_runner import log_probs, scan_rows, scan_tokens
from dgemma.engine.output import OutputBuilder
from dgemma.engine.request import canvas_unit, resolve_canvas_len, resolve_max_tokens
from dgemma.events import Answer, Timings
from dgemma.params import GenerationParams
from dgemma.sampling.rng import NoiseKey, NoiseStream, noise_key, random_tokens
from dgemma.sampling.sampler import CanvasState, LeftOut, Sampler, make_sampler, open_canvas, step
from dgemma.sampling.vocab_scan import VocabScan
from dgemma.text.tokenizer import Tokenizer

Noise = Callable[[NoiseKey, NoiseStream, int, int], Tensor]
Read = Callable[[Any, Tensor, Tensor, NoiseKey | None, GenerationParams], VocabScan]


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
    read: Read = scan_rows,
    read_token: Read = scan_tokens,
) -> Answer:
    sampler = sampler or make_sampler(params)
    unit, max_positions = canvas_unit(model.config.canvas_len, params.canvas_len), model.config.max_positions
    max_tokens = resolve_max_tokens(max_positions, unit, len(prompt), params.max_tokens)
    writer = OutputBuilder(row=0, seed=seed, max_tokens=max_tokens, params=params, tokenizer=tokenizer)
    cache = model.new_cache(1)
    hidden = model.encode(torch.tensor([prompt]), cache)
    while writer.reason is None:
        if params.decode == "causal":
            place = noise_key([seed], [writer.canvas], [CAUSAL_STEP], model.device)
            heat = torch.tensor([params.temperature or 1.0])
            scan = read_token(
                model.transformer, hidden[:, -1:], heat, place if params.temperature else None, params
            )
            tokens, steps = scan.sampled[0].tolist(), 0
        else:
            room = max_positions - len(prompt) - len(writer.tokens)
            tokens, steps, scan = _refined(model, cache, writer, params, room, sampler, noise, read)
        top_k = log_probs(scan)
        words = None
        if top_k is not None:
            pairs = zip(top_k.tokens[0].tolist(), top_k.logits[0].tolist(), strict=True)
            # A truncation may leave fewer words than were asked for.
            words = [tuple(p for p in zip(*pair, strict=True) if p[1] > -math.inf) for pair in pairs]
        writer.commit(tokens, steps=steps, logprobs=words)
        if writer.reason is None:
            hidden = model.encode(torch.tensor([tokens]), cache)
    return writer.answer(decode=params.decode, timings=Timings(), prompt_tokens=len(prompt), cached_tokens=0)


def _refined(
    model: Any,
    cache: Any,
    writer: OutputBuilder,
    params: GenerationParams,
    room: int,
    sampler: Sampler,
    noise: Noise,
    read: Read,
) -> tuple[list[int], int, VocabScan]:
    whole, sizes_canvas = model.config.canvas_len, params.canvas_len == "auto"
    length, left_out = resolve_canvas_len(whole, params.canvas_len), 0
    if sizes_canvas:
        length = min(whole, room, -(-(writer.max_tokens - len(writer.tokens)) // 8) * 8)
    size = (length, model.config.vocab_size)
    place = noise_key([writer.seed], [writer.canvas], [0], model.device)
    state, soft, number = open_canvas(noise(place, NoiseStream.OPEN, *size)), None, 0
    while not state.settled:
        place = noise_key([writer.seed], [writer.canvas], [number], model.device)
        left = (sampler.num_steps - state.steps).to(torch.int32)
        hidden = model.denoise(state.canvas, cache, soft)
        draws = place if params.temperature > 0 else None
        scan = read(model.transformer, hidden, sampler.schedule(left, sampler.num_steps), draws, params)
        known = LeftOut([left_out], whole) if sizes_canvas else None
        state = step(state, scan, noise(place, NoiseStream.RENOISE, *size), sampler, left_out=known)
        soft, number = scan.soft, number + 1
        if sizes_canvas and not state.settled and not params.ignore_end:
            is_end = torch.isin(state.argmax[0], torch.tensor(params.end_tokens)) & state.accepted[0]
            end = max([at + 1 for at, sure in enumerate(is_end.tolist()) if not sure], default=0)
            length = min(size[0], -(-(end + 1) // 8) * 8)
            left_out, size = left_out + size[0] - length, (length, size[1])
            parts = (state.canvas, state.accepted, state.argmax)
            state = CanvasState(*(part[:, :length] for part in parts), *astuple(state)[3:])
            soft = soft[:, :length]
    return state.argmax[0].tolist(), number, scan
