"""What a step needs of the vocabulary, per position, and its plain dense form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dgemma.diffusion.noise import Place, Use, race_times

# Shapes: rows = canvases, canvas = positions, vocab = words.

# Words race inside canonical chunks of this many, chunks race with their masses. Every tile is a
# multiple of it, so that a draw does not depend on the tile size.
CHUNK = 1024


@dataclass(frozen=True)
class Reading:
    """One look at the vocabulary under the scaled logits; all [rows, canvas] but `soft`."""

    guess: Tensor  # the most likely word
    drawn: Tensor  # one word drawn from the distribution
    entropy: Tensor  # nats
    log_mass: Tensor  # log-sum-exp of the scaled logits
    top_logit: Tensor  # scaled logit of the guess
    soft: Tensor | None = None  # mean embedding [rows, canvas, hidden], where the walk made it
    likeliest: Likeliest | None = None  # on request


class Likeliest(NamedTuple):
    """The n likeliest words, likeliest first; both [rows, canvas, n]."""

    words: Tensor
    logits: Tensor  # scaled; less the log mass they are log-probabilities


def scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """`logits` [rows, canvas, vocab] over a temperature per row [rows]. Zero: nearly infinite logits."""
    tiny = torch.finfo(torch.float32).tiny ** 0.25
    return logits / temperature.clamp(min=tiny).view(-1, 1, 1).to(logits.dtype)


def scaled_logits(products: Tensor, cap: float | None, temperature: Tensor) -> Tensor:
    """fp32 logits over temperature from the head's bare products, the soft-cap folded in."""
    if cap is None:
        return scale(products.float(), temperature)
    gain = scale(torch.full((1, 1, 1), cap, device=temperature.device), temperature)
    return torch.tanh(products.float() / cap) * gain


def read_dense(scaled: Tensor, place: Place | None, positions: Tensor | None = None) -> Reading:
    """The plain twin: holds [rows, canvas, vocab]. Without a place, the draw is the guess.

    positions: which ones of the canvas these are; None: all, from the first.
    """
    log_mass = scaled.logsumexp(-1)
    normed = scaled - log_mass[..., None]
    lowest = torch.finfo(normed.dtype).min
    entropy = -(normed.clamp(min=lowest) * normed.softmax(-1)).sum(-1)
    top_logit, _ = scaled.max(-1)
    guess = scaled.argmax(-1)
    drawn = guess if place is None else draw_dense(scaled, place, positions)
    return Reading(guess, drawn, entropy, log_mass, top_logit)


def draw_dense(scaled: Tensor, place: Place, positions: Tensor | None = None) -> Tensor:
    """A two-level exponential race: the chunk that finishes first, then its first word."""
    vocab = scaled.shape[-1]
    padded = torch.nn.functional.pad(scaled, (0, -vocab % CHUNK), value=float("-inf"))
    chunks = padded.unflatten(-1, (-1, CHUNK))  # [rows, canvas, chunks, CHUNK]
    numbers = torch.arange(chunks.shape[-2], device=scaled.device).expand(chunks.shape[:3])
    finish = race_times(place, Use.CHUNK_RACE, numbers, positions) - chunks.logsumexp(-1)
    winner = finish.argmin(-1)
    index = winner[..., None, None].expand(*winner.shape, 1, CHUNK)
    return race_in_chunk(chunks.gather(-2, index).squeeze(-2), winner, place, positions)


def race_in_chunk(scaled: Tensor, chunk: Tensor, place: Place, positions: Tensor | None = None) -> Tensor:
    """The word that wins inside `chunk` [rows, canvas]; its logits are [rows, canvas, up to CHUNK]."""
    words = chunk[..., None] * CHUNK + torch.arange(scaled.shape[-1], device=scaled.device)
    finish = race_times(place, Use.WORD_RACE, words, positions) - scaled
    return chunk * CHUNK + finish.argmin(-1)
