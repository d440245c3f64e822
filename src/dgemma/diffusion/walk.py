"""The vocabulary in one walk over tiles of words: a step's whole need, never [canvas, vocabulary].

Per canonical chunk of 1,024 words the walk keeps the sum of exponentials and their entropy part, relative
to the largest logit of the chunk's block, and of the two leading chunks (by likeliest word, and in the race)
the head's products. What is merged at the end does not depend on the tile size, so neither does the draw.
The soft embedding is summed block by block under a running maximum. A part of the walk over some of the
words can be joined with others: that is a vocabulary in shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from dgemma.diffusion.block import BLOCK, Block, Lead, Terms, logits_of, look_at, no_lead
from dgemma.diffusion.likeliest import RunningLikeliest
from dgemma.diffusion.noise import Place, Use, race_times
from dgemma.diffusion.reading import CHUNK, Reading, race_in_chunk

# Shapes: rows = canvases, canvas = positions, words = a tile or block, chunks = words / CHUNK.

Look = Callable[..., tuple[Block, Lead, Lead]]
Grow = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Vocabulary(Protocol):
    """What the walk asks of a model's head."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def logit_cap(self) -> float | None:
        """Logits are cap * tanh(products / cap); None: they are the products."""
        ...

    @property
    def embedding_scale(self) -> float:
        """What an embedding is multiplied by where it is an input."""
        ...

    def products(self, hidden: Tensor, words: slice) -> Tensor:
        """Bare products [rows, canvas, words] of a range of words."""
        ...

    def mix(self, shares: Tensor, words: slice) -> Tensor:
        """Their embeddings weighed by `shares` [rows, canvas, words] -> [rows, canvas, hidden]."""
        ...


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the walk shall do beside its daily work; each costs something."""

    bias: Tensor | None = None  # [rows, vocab], added to the scaled logits; -inf forbids a word
    floor: Tensor | None = None  # [rows, canvas]: words with a smaller scaled logit are forbidden
    num_likeliest: int = 0  # also return so many words with their log-probabilities
    with_soft: bool = True
    compiled: bool = False  # fuse the element-wise part; the first call takes seconds


NO_WISHES = Wishes()


def walk(
    hidden: Tensor,
    vocabulary: Vocabulary,
    temperature: Tensor,
    place: Place | None,
    wishes: Wishes = NO_WISHES,
    *,
    tile: int = BLOCK,
) -> Reading:
    """Read the vocabulary behind `hidden` [rows, canvas, hidden] at a temperature per row [rows].

    Without a place, or at temperature 0, the draw is the guess.
    """
    every = slice(0, vocabulary.vocab_size)
    return join([walk_part(hidden, vocabulary, temperature, place, wishes, words=every, tile=tile)])


@dataclass(frozen=True)
class Part:
    """A walk over some of the words, whole chunks of them."""

    table: Tensor  # [3, rows, canvas, chunks]: base, mass and moment of each chunk
    likeliest: Lead
    racing: Lead
    terms: Terms  # of all words
    place: Place | None
    vocab_size: int
    embedding_scale: float
    soft: RunningMean | None
    leaders: RunningLikeliest | None


def walk_part(
    hidden: Tensor,
    vocabulary: Vocabulary,
    temperature: Tensor,
    place: Place | None,
    wishes: Wishes = NO_WISHES,
    *,
    words: slice,
    tile: int = BLOCK,
) -> Part:
    """The walk over `words`, which begin at a block's border."""
    assert tile % BLOCK == 0, tile
    assert words.start % BLOCK == 0, words
    look = compiled_look() if wishes.compiled else look_at
    every = Terms(temperature, vocabulary.logit_cap, wishes.bias, wishes.floor)
    # Made before the walk: small results kept between large temporaries would leave holes in the heap
    # that add up to the logits themselves.
    table = hidden.new_empty(
        3, *hidden.shape[:2], -(-(words.stop - words.start) // CHUNK), dtype=torch.float32
    )
    numbers = torch.arange(words.start // CHUNK, -(-words.stop // CHUNK), device=hidden.device)
    clocks = None
    if place is not None:
        clocks = race_times(place, Use.CHUNK_RACE, numbers.expand(*hidden.shape[:2], -1))
    likeliest = racing = None
    soft = RunningMean(compiled_grow() if wishes.compiled else grow) if wishes.with_soft else None
    leaders = RunningLikeliest(wishes.num_likeliest) if wishes.num_likeliest else None
    for begin in range(words.start, words.stop, tile):
        products = vocabulary.products(hidden, slice(begin, min(begin + tile, words.stop)))
        for offset in range(0, products.shape[-1], BLOCK):
            part = products[..., offset : offset + BLOCK]
            here = slice(begin + offset, begin + offset + part.shape[-1])
            terms = every._replace(bias=None if every.bias is None else every.bias[:, here])
            at = slice((here.start - words.start) // CHUNK, -(-(here.stop - words.start) // CHUNK))
            likeliest = no_lead(part) if likeliest is None else likeliest
            racing = no_lead(part) if racing is None else racing
            ticks = None if clocks is None else clocks[..., at]
            block, likeliest, racing = look(part, terms, numbers[at.start], ticks, likeliest, racing)
            table[..., at] = torch.stack(
                (block.top[..., None].expand_as(block.mass), block.mass, block.moment)
            )
            if soft is not None:
                soft.add(vocabulary.mix(block.shares, here), block.top, block.mass.sum(-1))
            if leaders is not None:
                leaders.add(logits_of(part, terms), here)
    assert likeliest is not None
    assert racing is not None
    return Part(
        table, likeliest, racing, every, place, vocabulary.vocab_size, vocabulary.embedding_scale,
        soft, leaders,
    )  # fmt: skip


def join(parts: Sequence[Part]) -> Reading:
    """One reading from the parts of all words, in the order of the words."""
    first = parts[0]
    base, mass, moment = torch.cat([part.table for part in parts], dim=-1)
    top = base.amax(-1)
    lower = base - top[..., None]
    weight = lower.exp()
    total = (weight * mass).sum(-1)
    # Sum of p * (logit - top) over all words, chunk by chunk.
    moment = moment + torch.where(weight > 0, lower, 0.0) * mass
    entropy = total.log() - (weight * moment).sum(-1) / total
    log_mass = top + total.log()
    ahead = _ahead([part.likeliest for part in parts])
    guess = ahead.chunk * CHUNK + _logits_of_lead(ahead, first).argmax(-1)
    drawn = guess
    if first.place is not None:
        winner = _ahead([part.racing for part in parts])
        drawn = race_in_chunk(_logits_of_lead(winner, first), winner.chunk, first.place)
        drawn = torch.where((first.terms.temperature > 0)[:, None], drawn, guess)
    reading = Reading(guess, drawn, entropy.clamp(min=0.0), log_mass, top)
    means = [part.soft for part in parts if part.soft is not None]
    leaders = [part.leaders for part in parts if part.leaders is not None]
    return replace(
        reading,
        soft=(RunningMean.join(means) * first.embedding_scale).to(ahead.products.dtype) if means else None,
        likeliest=RunningLikeliest.join(leaders) if leaders else None,
    )


def grow(total: Tensor, old: Tensor, mixed: Tensor, new: Tensor) -> Tensor:
    """A sum and what is added to it [rows, canvas, hidden], each with its factor [rows, canvas]."""
    return torch.addcmul(mixed.float() * new[..., None], total, old[..., None])


@cache
def compiled_grow() -> Grow:
    return torch.compile(grow)


@cache
def compiled_look() -> Look:
    """`look_at` as one fused kernel; its plain form stays the twin."""
    # By default a second shape makes sizes variable: no kernel per batch size.
    return torch.compile(look_at)


def _ahead(leads: Sequence[Lead]) -> Lead:
    best = leads[0]
    for lead in leads[1:]:
        ahead = lead.score < best.score
        best = Lead(
            torch.where(ahead, lead.score, best.score),
            torch.where(ahead, lead.chunk, best.chunk),
            torch.where(ahead[..., None], lead.products, best.products),
        )
    return best


def _logits_of_lead(lead: Lead, part: Part) -> Tensor:
    """Scaled logits [rows, canvas, CHUNK] of the leading chunk's words, -inf past the last word."""
    width = lead.products.shape[-1]
    words = lead.chunk[..., None] * CHUNK + torch.arange(width, device=lead.chunk.device)
    scaled = logits_of(lead.products, part.terms._replace(bias=None, floor=None))
    inside = words < part.vocab_size
    if part.terms.bias is not None:
        bias = part.terms.bias[:, None].expand(*words.shape[:2], -1)
        scaled = scaled + bias.gather(-1, torch.where(inside, words, 0))
    if part.terms.floor is not None:
        inside = inside & (scaled >= part.terms.floor[..., None])
    return torch.where(inside, scaled, float("-inf"))


class RunningMean:
    """The soft embedding so far, relative to the largest logit so far."""

    top: Tensor | None  # [rows, canvas]; None before the first block
    total: Tensor  # [rows, canvas, hidden], fp32
    mass: Tensor  # [rows, canvas]

    def __init__(self, grow: Grow) -> None:
        self.top = None
        self._grow = grow

    def add(self, mixed: Tensor, top: Tensor, mass: Tensor) -> None:
        """Take a block's summed embeddings [rows, canvas, hidden], all relative to its `top`."""
        if self.top is None:
            self.top, self.total, self.mass = top, mixed.float(), mass
            return
        new_top = torch.maximum(self.top, top)
        finite = torch.where(new_top.isfinite(), new_top, 0.0)
        old, new = (self.top - finite).exp(), (top - finite).exp()
        self.total = self._grow(self.total, old, mixed, new)
        self.mass = self.mass * old + mass * new
        self.top = new_top

    @staticmethod
    def join(parts: Sequence[RunningMean]) -> Tensor:
        first = RunningMean(grow)
        for part in parts:
            assert part.top is not None
            first.add(part.total, part.top, part.mass)
        return first.total / first.mass[..., None]
