"""The vocabulary in one walk over tiles of words: a step's whole need, never [canvas, vocabulary].

Per canonical chunk of 1,024 words the walk keeps the largest scaled logit, the sum of exponentials and
their entropy part, all relative to the chunk's own maximum, and of the chunk that leads the race its
logits. What is merged at the end does not depend on the tile size, so neither does the draw. The soft
embedding is summed per block of 2,048 words under a running maximum.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

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
    race = None if place is None else _Race(hidden.shape[:2], vocabulary.vocab_size, place)
    soft = _RunningMean() if with_soft else None
    table = _empty_table(hidden, vocabulary.vocab_size)
    for start in range(0, vocabulary.vocab_size, tile):
        words = slice(start, min(start + tile, vocabulary.vocab_size))
        scaled = scale(vocabulary.logits(hidden, words), temperature)
        if bias is not None:
            scaled = scaled + bias[:, None, words]
        scaled = torch.nn.functional.pad(scaled, (0, -scaled.shape[-1] % CHUNK), value=float("-inf"))
        scaled = scaled.unflatten(-1, (-1, CHUNK))
        chunks, shares = _look_at(scaled)
        for column, values in zip(table, chunks, strict=True):
            column[..., start // CHUNK : start // CHUNK + values.shape[-1]] = values
        if race is not None:
            race.run(scaled, chunks, start // CHUNK)
        if soft is not None:
            soft.add(shares, chunks.top, words, vocabulary)
    reading = _merge(table)
    if race is not None:
        drawn = torch.where((temperature > 0)[:, None], race.drawn(), reading.guess)
        reading = replace(reading, drawn=drawn)
    if soft is not None:
        reading = replace(reading, soft=soft.mean().to(hidden.dtype))
    return reading


class _Chunks(NamedTuple):
    """What is kept of each chunk [rows, canvas, chunks], relative to its own largest logit."""

    top: Tensor  # the largest scaled logit
    best: Tensor  # its word, counted from the chunk's first
    mass: Tensor  # sum of exp(logit - top)
    moment: Tensor  # sum of exp(logit - top) * (logit - top)


def _empty_table(hidden: Tensor, vocab_size: int) -> _Chunks:
    """Room for all chunks, made before the walk: small results kept between large temporaries would
    leave holes in the heap that add up to the logits themselves."""
    numbers = hidden.new_empty(3, *hidden.shape[:2], -(-vocab_size // CHUNK), dtype=torch.float32)
    top, mass, moment = numbers.unbind()
    return _Chunks(top, torch.empty_like(top, dtype=torch.int64), mass, moment)


def _look_at(scaled: Tensor) -> tuple[_Chunks, Tensor]:
    """Statistics of `scaled` [rows, canvas, chunks, CHUNK], and exp(logit - top) of the same shape."""
    top, best = scaled.max(-1)
    # A chunk of forbidden words has no finite top; measured from zero its shares are all zero.
    below = scaled - torch.where(top.isfinite(), top, 0.0)[..., None]
    shares = below.exp()
    # Where a share is zero its logit may be -inf: the product is zero there.
    moment = (shares * below.clamp(min=-1e4)).sum(-1)
    return _Chunks(top, best, shares.sum(-1), moment), shares


def _merge(chunks: _Chunks) -> Reading:
    """One reading from all chunks; the order of the sums depends on the vocabulary alone."""
    top, leader = chunks.top.max(-1)
    guess = leader * CHUNK + chunks.best.gather(-1, leader[..., None]).squeeze(-1)
    lower = chunks.top - top[..., None]
    weight = lower.exp()
    mass = (weight * chunks.mass).sum(-1)
    # Sum of p * (logit - top) over all words, chunk by chunk.
    moment = chunks.moment + torch.where(weight > 0, lower, 0.0) * chunks.mass
    entropy = mass.log() - (weight * moment).sum(-1) / mass
    return Reading(guess, guess, entropy.clamp(min=0.0), top + mass.log(), top)


class _Race:
    """The chunk that leads so far, and its logits: its words race when the walk is over."""

    time: Tensor | None  # [rows, canvas] when the leader finishes; None before the first tile
    chunk: Tensor  # [rows, canvas] its number
    logits: Tensor  # [rows, canvas, CHUNK]

    def __init__(self, positions: torch.Size, vocab_size: int, place: Place) -> None:
        num_chunks = -(-vocab_size // CHUNK)
        numbers = torch.arange(num_chunks, device=place.seed.device).expand(*positions, num_chunks)
        self.place = place
        self.clocks = race_times(place, Use.CHUNK_RACE, numbers)
        self.time = None

    def run(self, scaled: Tensor, chunks: _Chunks, first: int) -> None:
        here = slice(first, first + scaled.shape[-2])
        time, chunk = (self.clocks[..., here] - (chunks.top + chunks.mass.log())).min(-1)
        index = chunk[..., None, None].expand(*chunk.shape, 1, CHUNK)
        logits = scaled.gather(-2, index).squeeze(-2)
        chunk = chunk + first
        if self.time is not None:
            leads = time < self.time
            time = torch.where(leads, time, self.time)
            chunk = torch.where(leads, chunk, self.chunk)
            logits = torch.where(leads[..., None], logits, self.logits)
        self.time, self.chunk, self.logits = time, chunk, logits

    def drawn(self) -> Tensor:
        return race_in_chunk(self.logits, self.chunk, self.place)


class _RunningMean:
    """The soft embedding so far, relative to the largest logit so far."""

    top: Tensor | None  # [rows, canvas]; None before the first tile
    total: Tensor  # [rows, canvas, hidden], fp32
    mass: Tensor  # [rows, canvas]

    def __init__(self) -> None:
        self.top = None

    def add(self, shares: Tensor, tops: Tensor, words: slice, vocabulary: Vocabulary) -> None:
        """Take a tile's shares [rows, canvas, chunks, CHUNK] and its chunks' tops, block by block."""
        per_block = BLOCK // CHUNK
        for number in range(0, shares.shape[-2], per_block):
            block = shares[..., number : number + per_block, :]
            block_tops = tops[..., number : number + per_block]
            begin = words.start + number * CHUNK
            part = slice(begin, min(begin + BLOCK, words.stop))
            highest = block_tops.amax(-1)
            top = highest if self.top is None else torch.maximum(self.top, highest)
            finite = torch.where(top.isfinite(), top, 0.0)
            weighed = (block * (block_tops - finite[..., None]).exp()[..., None]).flatten(-2)
            mixed = vocabulary.mix(weighed[..., : part.stop - part.start], part).float()
            mass = weighed.sum(-1)
            if self.top is not None:
                shrink = (self.top - finite).exp()
                mixed = self.total * shrink[..., None] + mixed
                mass = self.mass * shrink + mass
            self.top, self.total, self.mass = top, mixed, mass

    def mean(self) -> Tensor:
        return self.total / self.mass[..., None]
