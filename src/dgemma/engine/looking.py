"""From hidden states to what is known of each answer: one look at the vocabulary for those alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dgemma.diffusion.noise import Place, place_at
from dgemma.diffusion.pins import CanvasPins, watched_log_probs
from dgemma.diffusion.reading import Likeliest
from dgemma.engine.answering import Answering, Look
from dgemma.engine.slots import Slots
from dgemma.events import LogProbs
from dgemma.generation.parts import log_probs, read_vocabulary, refine
from dgemma.model.stack import Stack

# Shapes: rows = answers, canvas = positions of a canvas.

# The step of a causal draw in its random counter: no canvas takes so many.
CAUSAL_STEP = (1 << 32) - 1

# Positions whose logits are held at once when a text is scored.
_SCORE_BLOCK = 64


def look_at_canvases(
    stack: Stack, slots: Slots, places: Sequence[int], answers: Sequence[Answering], hidden: Tensor
) -> list[Look]:
    """A step of canvases, which stand in `places` of `slots`, behind `hidden` [rows, canvas, hidden]."""
    state, _ = slots.read(places)
    place = _place(answers, [one.steps for one in answers], hidden.device)
    first = answers[0]
    state, reading = refine(
        stack,
        state,
        hidden,
        place,
        first.sampler,
        first.request.params,
        _bias(stack, answers, hidden.device),
        [one.pins for one in answers],
        None if first.following is None else [one.strings for one in answers if one.strings is not None],
    )
    slots.write(places, state, reading.soft)
    # The one thing read back in a step.
    settled = state.settled.tolist()
    likeliest = _rows(log_probs(reading), len(answers))
    watched = [
        _watched(stack, one.pins, hidden[row]) if settled[row] else () for row, one in enumerate(answers)
    ]
    return list(map(Look, state.guess, reading.entropy, likeliest, settled, watched))


def look_at_tokens(stack: Stack, answers: Sequence[Answering], hidden: Tensor) -> list[Look]:
    """The next token of answers written left to right, behind `hidden` [rows, 1, hidden]."""
    params = answers[0].request.params
    heat = torch.tensor([one.request.params.temperature or 1.0 for one in answers], device=hidden.device)
    place = _place(answers, [CAUSAL_STEP] * len(answers), hidden.device) if params.temperature > 0 else None
    bias = _only_allowed(stack, answers, _bias(stack, answers, hidden.device), hidden.device)
    reading = read_vocabulary(stack, hidden, heat, place, params, bias)
    likeliest = _rows(log_probs(reading), len(answers))
    return [Look(*row, settled=True) for row in zip(reading.drawn, reading.entropy, likeliest, strict=True)]


def score_tokens(stack: Stack, hidden: Tensor, followers: Sequence[int], begin: int) -> list[float]:
    """Log-probability of what follows each token of `hidden` [tokens, hidden]; `begin`: where they begin.

    In blocks at fixed places, so that the bits do not depend on where a piece of text began.
    """
    found: list[float] = []
    while len(found) < len(followers):
        at = begin + len(found)
        count = min(_SCORE_BLOCK - at % _SCORE_BLOCK, len(followers) - len(found))
        rows = slice(at % _SCORE_BLOCK, at % _SCORE_BLOCK + count)
        block = hidden.new_zeros(1, _SCORE_BLOCK, hidden.shape[1])
        block[0, rows] = hidden[len(found) : len(found) + count]
        logits = stack.head.logits(block)[0, rows]
        target = torch.tensor(followers[len(found) : len(found) + count], device=hidden.device)
        found += (logits.gather(-1, target[:, None])[:, 0] - logits.logsumexp(-1)).tolist()
    return found


def _watched(stack: Stack, pins: CanvasPins | None, hidden: Tensor) -> tuple[tuple[int, LogProbs], ...]:
    if pins is None or pins.watched is None:
        return ()
    found = watched_log_probs(hidden, stack.head, pins.watched, pins.limited)
    positions, words = pins.watched.positions.tolist(), pins.watched.words
    return tuple(
        (position, tuple(zip(own.tolist(), values.tolist(), strict=True)))
        for position, own, values in zip(positions, words, found, strict=True)
    )


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


def _only_allowed(
    stack: Stack, answers: Sequence[Answering], bias: Tensor | None, device: torch.device
) -> Tensor | None:
    """`bias` with the words forbidden that no text of an answer's language has next."""
    if answers[0].following is None:
        return bias
    bias = torch.zeros(len(answers), stack.config.vocab_size, device=device) if bias is None else bias
    for row, one in enumerate(answers):
        assert one.following is not None
        allowed = torch.from_numpy(one.following.allowed_words(len(one.writer.tokens))).to(device)
        bias[row].masked_fill_(~allowed, float("-inf"))
    return bias
