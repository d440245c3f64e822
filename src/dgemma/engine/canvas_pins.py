"""Which positions of a request's next canvas are fixed: by the request, or after its last token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from dgemma.engine.request import PinnedTokens, TokenIds
from dgemma.engine.sequence import SequenceState
from dgemma.events import LogProbs
from dgemma.sampling.pinned import AllowedTokens, CanvasPins


def pin_canvas(sequence: SequenceState, device: torch.device) -> None:
    """Pins and constraint of the next canvas."""
    canvas_len, pinned = sequence.canvas_len, sequence.request.pinned
    begin = len(sequence.output.tokens)
    if sequence.constraint_state is not None:
        sequence.canvas_constraint = sequence.constraint_state.canvas_constraint(begin, canvas_len, device)
        # Positions after max_tokens are pinned to an end token, as in training.
        beyond = range(sequence.output.max_tokens, begin + canvas_len)
        if beyond and sequence.constraint_state.constraint.end_tokens:
            pinned = pinned or PinnedTokens()
            end = sequence.constraint_state.constraint.end_tokens[0]
            pinned = replace(pinned, fixed={**pinned.fixed, **dict.fromkeys(beyond, end)})
    sequence.pins, sequence.refines = canvas_pins(pinned, begin, canvas_len, device), True


def pinned_tokens(sequence: SequenceState) -> list[int]:
    """The tokens of a canvas whose positions up to max_tokens are all fixed."""
    begin = len(sequence.output.tokens)
    assert sequence.request.pinned is not None
    fixed = sequence.request.pinned.fixed
    return [fixed.get(position, 0) for position in range(begin, begin + sequence.canvas_len)]


def pinned_log_probs(sequence: SequenceState) -> tuple[tuple[int, LogProbs], ...]:
    """The log-probabilities of watched positions of a canvas whose positions are all fixed."""
    begin, pinned = len(sequence.output.tokens), sequence.request.pinned
    if pinned is None:
        return ()
    return tuple(
        (at - begin, tuple((token, 0.0 if token == pinned.fixed[at] else -math.inf) for token in tokens))
        for at, tokens in sorted(pinned.watch.items())
        if begin <= at < begin + sequence.canvas_len and at in pinned.fixed
    )


def canvas_pins(
    pinned: PinnedTokens | None, begin: int, canvas_len: int, device: torch.device
) -> CanvasPins | None:
    """The pinned positions of the canvas from position `begin` on; None: the answer has none."""
    here = range(begin, begin + canvas_len)

    def allowed_tokens(positions: Mapping[int, TokenIds]) -> AllowedTokens | None:
        inside = sorted(position for position in positions if position in here)
        if not inside:
            return None
        tokens = tuple(torch.tensor(positions[position], device=device) for position in inside)
        return AllowedTokens(torch.tensor([p - here.start for p in inside], device=device), tokens)

    if pinned is None:
        return None
    tokens = torch.zeros(canvas_len, dtype=torch.int64)
    begins = torch.zeros(canvas_len, dtype=torch.bool)
    free = torch.ones(canvas_len, dtype=torch.bool)
    for position in here:
        token = pinned.fixed.get(position, pinned.begin.get(position))
        if token is not None:
            tokens[position - here.start], begins[position - here.start] = token, True
        free[position - here.start] = position not in pinned.fixed
    return CanvasPins(
        tokens.to(device),
        begins.to(device),
        free.to(device),
        allowed_tokens(pinned.among),
        allowed_tokens(pinned.watch),
        frozenset(p - here.start for p in (*pinned.fixed, *pinned.among) if p in here),
    )
