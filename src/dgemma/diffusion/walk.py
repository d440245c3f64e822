"""The vocabulary in one walk over tiles of words: a step's whole need, never [canvas, vocabulary].

Per canonical chunk of 1,024 words the walk keeps the largest scaled logit, the sum of exponentials and
their entropy part, all relative to the chunk's own maximum, and of the chunk that leads the race its
logits. What is merged at the end does not depend on the tile size, so neither does the draw. The soft
embedding is summed per block of 2,048 words under a running maximum.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dgemma.diffusion.noise import Place, Use, race_times
from dgemma.diffusion.reading import CHUNK, Reading, race_in_chunk, scale

# Shapes: rows = canvases, canvas = positions, words = a tile, chunks = tile / CHUNK.

BLOCK = 2 * CHUNK
"""Words whose embeddings are mixed in one product; every tile is a multiple of it."""


class Vocabulary(Protocol):
    """What the walk asks of a model's head."""

    @property
    def vocab_size(self) -> int: ...

    def logits(self, hidden: Tensor, words: slice) -> Tensor:
        """fp32 logits [rows, canvas, words] of a range of words."""
        ...

    def mix(self, shares: Tensor, words: slice) -> Tensor:
        """Their embeddings weighed by `shares` [rows, canvas, words] -> [rows, canvas, hidden]."""
        ...


def walk(
    hidden: Tensor,
    vocabulary: Vocabulary,
    temperature: Tensor,
    place: Place | None,
    *,
    bias: Tensor | None = None,
    tile: int = BLOCK,
    with_soft: bool = True,
) -> Reading:
    """Read the vocabulary behind `hidden` [rows, canvas, hidden] at a temperature per row [rows].

    `bias` [rows, vocab] is added to the scaled logits; -inf forbids a word. Without a place, or at
    temperature 0, the draw is the guess.
    """
    assert tile % BLOCK == 0, tile
    chunks = _ChunkStatistics(hidden, vocabulary.vocab_size, place)
    soft = _RunningMean() if with_soft else None
    for start in range(0, vocabulary.vocab_size, tile):
        words = slice(start, min(start + tile, vocabulary.vocab_size))
        scaled = scale(vocabulary.logits(hidden, words), temperature)
        if bias is not None:
            scaled = scaled + bias[:, None, words]
        shares = chunks.add(scaled, start // CHUNK)
        if soft is not None:
            soft.add(shares, chunks.tops, start, words.stop, vocabulary)
    reading = chunks.reading(temperature, place)
    if soft is None:
        return reading
    mean = (soft.total / soft.mass[..., None]).to(hidden.dtype)
    return Reading(
        guess=reading.guess,
        drawn=reading.drawn,
        entropy=reading.entropy,
        log_mass=reading.log_mass,
        top_logit=reading.top_logit,
        soft=mean,
    )


class _ChunkStatistics:
    """Per chunk, relative to its own maximum: what the end of the walk merges."""

    def __init__(self, hidden: Tensor, vocab_size: int, place: Place | None) -> None:
        self.positions = hidden.shape[:2]
        self.num_chunks = -(-vocab_size // CHUNK)
        per_chunk = (*self.positions, self.num_chunks)
        wide = hidden.new_zeros(per_chunk, dtype=torch.float32)
        self.tops = wide.fill_(float("-inf"))  # largest scaled logit
        self.sums = torch.zeros_like(wide)  # of exp(logit - top)
        self.products = torch.zeros_like(wide)  # of exp(logit - top) * (logit - top)
        self.bests = torch.zeros_like(wide, dtype=torch.int64)  # the top's word in its chunk
        self.times: Tensor | None = None
        if place is not None:
            numbers = torch.arange(self.num_chunks, device=hidden.device).expand(per_chunk)
            self.times = race_times(place, Use.CHUNK_RACE, numbers)
            self.lead = wide.new_full(self.positions, float("inf"))
            self.leader = self.bests.new_zeros(self.positions)
            self.leader_logits = wide.new_zeros(*self.positions, CHUNK)

    def add(self, scaled: Tensor, first: int) -> Tensor:
        """Take a tile's logits; give back exp(logit - top of its chunk) [rows, canvas, chunks, CHUNK]."""
        padding = -scaled.shape[-1] % CHUNK
        if padding:
            scaled = torch.nn.functional.pad(scaled, (0, padding), value=float("-inf"))
        scaled = scaled.unflatten(-1, (-1, CHUNK))
        here = slice(first, first + scaled.shape[-2])
        top, best = scaled.max(-1)
        # A chunk of forbidden words has no finite top; measured from zero its shares are all zero.
        below = scaled - torch.where(top.isfinite(), top, 0.0)[..., None]
        shares = below.exp()
        self.tops[..., here] = top
        self.bests[..., here] = best
        self.sums[..., here] = shares.sum(-1)
        # Where a share is zero its logit may be -inf: the product is zero there.
        self.products[..., here] = (shares * below.clamp(min=-1e4)).sum(-1)
        if self.times is not None:
            self._race(scaled, here)
        return shares

    def _race(self, scaled: Tensor, here: slice) -> None:
        assert self.times is not None
        finish = self.times[..., here] - (self.tops[..., here] + self.sums[..., here].log())
        time, winner = finish.min(-1)
        leads = time < self.lead
        index = winner[..., None, None].expand(*winner.shape, 1, CHUNK)
        logits = scaled.gather(-2, index).squeeze(-2)
        self.lead = torch.where(leads, time, self.lead)
        self.leader = torch.where(leads, winner + here.start, self.leader)
        self.leader_logits = torch.where(leads[..., None], logits, self.leader_logits)

    def reading(self, temperature: Tensor, place: Place | None) -> Reading:
        top_logit, chunk = self.tops.max(-1)
        guess = chunk * CHUNK + self.bests.gather(-1, chunk[..., None]).squeeze(-1)
        lower = self.tops - top_logit[..., None]
        weight = lower.exp()
        mass = (weight * self.sums).sum(-1)
        # Sum of p * (logit - top) over all words, chunk by chunk.
        moved = self.products + torch.where(weight > 0, lower, 0.0) * self.sums
        entropy = mass.log() - (weight * moved).sum(-1) / mass
        drawn = guess
        if place is not None:
            drawn = race_in_chunk(self.leader_logits, self.leader, place)
            drawn = torch.where((temperature > 0)[:, None], drawn, guess)
        return Reading(guess, drawn, entropy.clamp(min=0.0), top_logit + mass.log(), top_logit)


class _RunningMean:
    """The soft embedding so far, relative to the largest logit so far."""

    def __init__(self) -> None:
        self.total = torch.zeros(())  # [rows, canvas, hidden], fp32
        self.mass = torch.zeros(())  # [rows, canvas]
        self.top: Tensor | None = None  # [rows, canvas]

    def add(self, shares: Tensor, tops: Tensor, start: int, stop: int, vocabulary: Vocabulary) -> None:
        for begin in range(start, stop, BLOCK):
            words = slice(begin, min(begin + BLOCK, stop))
            block = shares[..., (begin - start) // CHUNK : (begin - start + BLOCK) // CHUNK, :]
            first = begin // CHUNK
            block_tops = tops[..., first : first + block.shape[-2]]
            highest = block_tops.amax(-1)
            top = highest if self.top is None else torch.maximum(self.top, highest)
            finite = torch.where(top.isfinite(), top, 0.0)
            weighed = (block * (block_tops - finite[..., None]).exp()[..., None]).flatten(-2)
            mixed = vocabulary.mix(weighed[..., : words.stop - words.start], words).float()
            mass = weighed.sum(-1)
            if self.top is None:
                self.total, self.mass = mixed, mass
            else:
                shrink = (self.top - finite).exp()
                self.total = self.total * shrink[..., None] + mixed
                self.mass = self.mass * shrink + mass
            self.top = top
