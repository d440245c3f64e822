"""From hidden states to what is known of each answer: one look at the vocabulary for those alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dgemma.diffusion.noise import Place, place_at
from dgemma.diffusion.reading import Likeliest
from dgemma.engine.answering import Answering, Look
from dgemma.engine.slots import Slots
from dgemma.generation.parts import log_probs, read_vocabulary, refine
from dgemma.model.stack import Stack

# Shapes: rows = answers, canvas = positions of a canvas.

# The step of a causal draw in its random counter: no canvas takes so many.
CAUSAL_STEP = (1 << 32) - 1


def look_at_canvases(
    stack: Stack, slots: Slots, places: Sequence[int], answers: Sequence[Answering], hidden: Tensor
) -> list[Look]:
    """A step of canvases, which stand in `places` of `slots`, behind `hidden` [rows, canvas, hidden]."""
    state, _ = slots.read(places)
    place = _place(answers, [one.steps for one in answers], hidden.device)
    first = answers[0]
    state, reading = refine(
        stack, state, hidden, place, first.sampler, first.request.params, _bias(stack, answers, hidden.device)
    )
    slots.write(places, state, reading.soft)
    # The one thing read back in a step.
    settled = state.settled.tolist()
    likeliest = _rows(log_probs(reading), len(answers))
    return list(map(Look, state.guess, reading.entropy, likeliest, settled))


def look_at_tokens(stack: Stack, answers: Sequence[Answering], hidden: Tensor) -> list[Look]:
    """The next token of answers written left to right, behind `hidden` [rows, 1, hidden]."""
    params = answers[0].request.params
    heat = torch.tensor([one.request.params.temperature or 1.0 for one in answers], device=hidden.device)
    place = _place(answers, [CAUSAL_STEP] * len(answers), hidden.device) if params.temperature > 0 else None
    reading = read_vocabulary(stack, hidden, heat, place, params, _bias(stack, answers, hidden.device))
    likeliest = _rows(log_probs(reading), len(answers))
    return [Look(*row, settled=True) for row in zip(reading.drawn, reading.entropy, likeliest, strict=True)]


def _place(answers: Sequence[Answering], steps: Sequence[int], device: torch.device) -> Place:
    writers = [one.writer for one in answers]
    return place_at([writer.seed for writer in writers], [writer.canvas for writer in writers], steps, device)


def _rows(likeliest: Likeliest | None, count: int) -> list[Likeliest | None]:
    if likeliest is None:
        return [None] * count
    return [Likeliest(likeliest.words[row], likeliest.logits[row]) for row in range(count)]


def _bias(stack: Stack, answers: Sequence[Answering], device: torch.device) -> Tensor | None:
    """What is added to each word's logit [rows, vocabulary]; answers with biases meet only such."""
    if not answers[0].request.logit_bias:
        return None
    bias = torch.zeros(len(answers), stack.config.vocab_size, device=device)
    for row, one in enumerate(answers):
        words, values = zip(*one.request.logit_bias, strict=True)
        bias[row, list(words)] = torch.tensor(values, device=device)
    return bias
