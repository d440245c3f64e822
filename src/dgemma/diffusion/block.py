"""One block of words, looked at once: the inner part of the walk, where its time goes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dgemma.diffusion.reading import CHUNK, scaled_logits

# Shapes: rows = canvases, canvas = positions, words = a block, chunks = its chunks.

BLOCK = 2 * CHUNK
"""Words whose numbers are held relative to one maximum, and whose embeddings are mixed in one product."""


class Terms(NamedTuple):
    """How products become logits."""

    temperature: Tensor  # [rows]
    cap: float | None
    bias: Tensor | None  # [rows, words], added to the scaled logits; -inf forbids
    floor: Tensor | None  # [rows, canvas]: words below it are forbidden


class Lead(NamedTuple):
    """The chunk that is ahead so far, and its products: its words are compared when the walk is over."""

    score: Tensor  # [rows, canvas], smaller is ahead
    chunk: Tensor  # [rows, canvas], its number
    products: Tensor  # [rows, canvas, CHUNK], fewer where the whole vocabulary has fewer


class Block(NamedTuple):
    """A block's numbers, relative to its largest logit."""

    top: Tensor  # [rows, canvas]
    mass: Tensor  # [rows, canvas, chunks], sum of exp(logit - top)
    moment: Tensor  # [rows, canvas, chunks], sum of exp(logit - top) * (logit - top)
    shares: Tensor  # [rows, canvas, words], exp(logit - top) in the model's dtype


def no_lead(products: Tensor) -> Lead:
    positions = products.shape[:2]
    return Lead(
        torch.full(positions, float("inf"), device=products.device),
        torch.zeros(positions, dtype=torch.int64, device=products.device),
        products.new_zeros(*positions, min(CHUNK, products.shape[-1])),
    )


def logits_of(products: Tensor, terms: Terms) -> Tensor:
    """Scaled logits [rows, canvas, words], -inf where a word is forbidden."""
    scaled = scaled_logits(products, terms.cap, terms.temperature)
    if terms.bias is not None:
        scaled = scaled + terms.bias[:, None]
    if terms.floor is not None:
        scaled = torch.where(scaled < terms.floor[..., None], float("-inf"), scaled)
    return scaled


def look_at(
    products: Tensor,
    terms: Terms,
    first_chunk: Tensor,
    clocks: Tensor | None,
    likeliest: Lead,
    racing: Lead,
) -> tuple[Block, Lead, Lead]:
    """Read a block of `products` [rows, canvas, words]; who leads by its likeliest word, who the race.

    `clocks` [rows, canvas, chunks]: log of each chunk's exponential clock, None where nothing is drawn.
    """
    words = products.shape[-1]
    width = likeliest.products.shape[-1]
    missing = -words % width
    scaled = F.pad(logits_of(products, terms), (0, missing), value=float("-inf"))
    chunks = scaled.unflatten(-1, (-1, width))
    tops = chunks.amax(-1)
    top = tops.amax(-1)
    # A block of forbidden words has no finite top; measured from zero its shares are all zero.
    below = chunks - torch.where(top.isfinite(), top, 0.0)[..., None, None]
    shares = below.exp()
    if missing or terms.bias is not None or terms.floor is not None:
        below = below.clamp(min=-1e4)  # a forbidden word's zero share times its -inf is to be zero
    mass = shares.sum(-1)
    moment = (shares * below).sum(-1)
    raw = F.pad(products, (0, missing)).unflatten(-1, (-1, width))
    likeliest = _overtake(likeliest, -tops, raw, first_chunk)
    if clocks is not None:
        racing = _overtake(racing, clocks - (top[..., None] + mass.log()), raw, first_chunk)
    block = Block(top, mass, moment, shares.flatten(-2)[..., :words].to(products.dtype))
    return block, likeliest, racing


def _overtake(lead: Lead, scores: Tensor, chunks: Tensor, first_chunk: Tensor) -> Lead:
    score, chunk = scores.min(-1)
    index = chunk[..., None, None].expand(*chunk.shape, 1, chunks.shape[-1])
    ahead = score < lead.score
    return Lead(
        torch.where(ahead, score, lead.score),
        torch.where(ahead, chunk + first_chunk, lead.chunk),
        torch.where(ahead[..., None], chunks.gather(-2, index).squeeze(-2), lead.products),
    )
