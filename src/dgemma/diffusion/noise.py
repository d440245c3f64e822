"""Where a generation's randomness comes from: a seed per row, and a place for every number."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma.diffusion.philox import philox, to_below, to_exponential

# Shapes: rows = canvases, canvas = positions of a canvas.


class Use(enum.IntEnum):
    """What a number is for; part of its counter, so that no two uses share one."""

    OPEN = 0
    RENOISE = 1
    CHUNK_RACE = 2
    WORD_RACE = 3
    CLASS_RACE = 4


# Room for more uses, without moving the numbers of those there are.
_USES = 16


@dataclass(frozen=True)
class Place:
    """Whose randomness this is, and at which moment; all [rows], int64."""

    seed: Tensor
    canvas: Tensor  # number of the canvas in its answer
    step: Tensor  # number of the step in its canvas

    def row(self, row: int) -> Place:
        """One row's own place."""
        only = slice(row, row + 1)
        return Place(self.seed[only], self.canvas[only], self.step[only])


def place_at(
    seeds: Sequence[int], canvases: Sequence[int], steps: Sequence[int], device: torch.device
) -> Place:
    def tensor(values: Sequence[int]) -> Tensor:
        # A seed of 64 bits is kept as the signed number of the same bits.
        return torch.tensor([(v + (1 << 63)) % (1 << 64) - (1 << 63) for v in values], device=device)

    return Place(tensor(seeds), tensor(canvases), tensor(steps))


def random_tokens(place: Place, use: Use, canvas_len: int, vocab_size: int) -> Tensor:
    """One uniform token per position [rows, canvas]."""
    positions = torch.arange(canvas_len, device=place.seed.device)
    words = _words(place, use, positions[None], torch.zeros_like(positions)[None])
    return to_below(words[0], vocab_size)


def race_times(place: Place, use: Use, index: Tensor, positions: Tensor | None = None) -> Tensor:
    """Log of a unit exponential for each `index` [rows, canvas, n]: a chunk's or a word's own number.

    positions: which ones of the canvas these are; None: all, from the first.
    """
    if positions is None:
        positions = torch.arange(index.shape[1], device=index.device)
    positions = positions[None, :, None]
    # Four neighbours share one call: word i takes output i % 4 of counter i // 4.
    quads = index[..., ::4] >> 2
    words = torch.stack(_words(place, use, positions, quads), dim=-1).flatten(-2)
    return to_exponential(words[..., : index.shape[-1]])


def _words(place: Place, use: Use, position: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = torch.broadcast_shapes(position.shape, index.shape)
    lead = (-1,) + (1,) * (len(shape) - 1)
    step, canvas, seed = (t.view(lead) for t in (place.step, place.canvas, place.seed))
    rows = (place.seed.shape[0], *shape[1:])
    counter = (index, position, step, canvas * _USES + use)
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    c0, c1, c2, c3 = (word.expand(rows) for word in counter)
    k0, k1 = (word.expand(rows) for word in key)
    return philox((c0, c1, c2, c3), (k0, k1))
