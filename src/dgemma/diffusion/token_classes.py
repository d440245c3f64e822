"""Token classes: a map over the vocabulary, and what a walk reads of each class.

The hook for constraints: words that act alike share a class, and per position each class has a mass, a
likeliest word and one drawn word. Every word has an exponential clock of its own, so that a class's draw
depends on its words alone. That is a clock per position and word: dear, and only paid when asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma.diffusion.noise import Place, Use, race_times
from dgemma.diffusion.reading import ClassReading

# Shapes: rows = canvases, canvas = positions, words = a block, classes = number of classes.


@dataclass(frozen=True)
class TokenClasses:
    """Which class each word belongs to."""

    of_word: Tensor  # [vocab], int64, each below `count`
    count: int


class RunningClasses:
    """The classes' masses, best and drawn words over the blocks given so far."""

    def __init__(self, classes: TokenClasses, place: Place | None) -> None:
        self.classes = classes
        self.place = place
        self.top: Tensor | None = None  # [rows, canvas, classes]; None before the first block
        self.mass: Tensor
        self.best: Tensor
        self.time: Tensor  # when the drawn word finished; the smallest wins
        self.drawn: Tensor

    def add(self, scaled: Tensor, words: slice) -> None:
        index = self.classes.of_word[words].expand_as(scaled)
        numbers = torch.arange(words.start, words.stop, device=scaled.device).expand_as(scaled)
        shape = (*scaled.shape[:2], self.classes.count)

        def reduce(values: Tensor, how: str, start: float | int) -> Tensor:
            empty = torch.full(shape, start, dtype=values.dtype, device=values.device)
            return empty.scatter_reduce(-1, index, values, how)

        top = reduce(scaled, "amax", float("-inf"))
        finite = torch.where(top.isfinite(), top, 0.0)
        mass = reduce((scaled - finite.gather(-1, index)).exp(), "sum", 0.0)
        last = self.classes.of_word.shape[0]
        best = reduce(torch.where(scaled == top.gather(-1, index), numbers, last), "amin", last)
        if self.place is None:
            time, drawn = -top, best
        else:
            finish = race_times(self.place, Use.CLASS_RACE, numbers) - scaled
            time = reduce(finish, "amin", float("inf"))
            drawn = reduce(torch.where(finish == time.gather(-1, index), numbers, last), "amin", last)
        self._take(top, mass, best, time, drawn)

    def _take(self, top: Tensor, mass: Tensor, best: Tensor, time: Tensor, drawn: Tensor) -> None:
        if self.top is None:
            self.top, self.mass, self.best, self.time, self.drawn = top, mass, best, time, drawn
            return
        new_top = torch.maximum(self.top, top)
        finite = torch.where(new_top.isfinite(), new_top, 0.0)
        self.mass = self.mass * (self.top - finite).exp() + mass * (top - finite).exp()
        self.best = torch.where(top > self.top, best, self.best)
        self.drawn = torch.where(time < self.time, drawn, self.drawn)
        self.time = torch.minimum(time, self.time)
        self.top = new_top

    @staticmethod
    def join(parts: Sequence[RunningClasses]) -> ClassReading:
        first = parts[0]
        for part in parts[1:]:
            assert part.top is not None
            first._take(part.top, part.mass, part.best, part.time, part.drawn)
        assert first.top is not None
        vocab = first.classes.of_word.shape[0]
        # A class without words names word 0, at mass 0.
        best, drawn = (torch.where(words < vocab, words, 0) for words in (first.best, first.drawn))
        return ClassReading(first.top + first.mass.log(), best, drawn)
