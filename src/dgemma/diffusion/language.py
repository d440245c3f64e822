"""A language over a vocabulary, laid out for a step: words by class, and the machine that reads classes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dgemma.diffusion.block import BLOCK
from dgemma.diffusion.paths import Bools, Machine, machine_of
from dgemma.diffusion.reading import CHUNK

# Shapes: live = words that some state takes, classes, states.


@dataclass(frozen=True)
class Columns:
    """The live words of one block of the vocabulary."""

    words: slice  # the block
    inside: Tensor  # [some]: where in the block they stand
    columns: Tensor  # [some]: where among the live words

    @property
    def is_full(self) -> bool:
        """Whether all words of the block are live."""
        return bool(len(self.inside) == self.words.stop - self.words.start)


@dataclass(frozen=True, eq=False)
class Language:
    """Class 0 holds the words that no state takes: they are never looked at.

    Words of a class stand next to each other, ascending; first those of small classes, which are summed up
    together, then those of large ones, of more than a chunk.
    """

    machine: Machine
    words: Tensor  # [live]
    order: tuple[int, ...]  # classes that have words, as these stand
    bounds: tuple[tuple[int, int], ...]  # [classes]: where a class begins and ends among the live words
    small: Tensor  # [live words of small classes]: which class of `order` each is of
    blocks: tuple[Columns, ...]  # those with a live word

    @property
    def num_live(self) -> int:
        return self.words.shape[0]

    def columns_of(self, words: Tensor) -> Tensor:
        """Where those of `words` that are live stand."""
        return torch.isin(self.words, words).nonzero()[:, 0]


@dataclass(frozen=True)
class Strings:
    """Which strings of a language one canvas may hold."""

    language: Language
    first: int  # state before the first position
    last: Bools  # [states]: where it may be behind the last one
    span: slice  # positions that are of the language; all others are fixed


def language_of(
    class_of_word: NDArray[np.integer], maps: NDArray[np.integer], device: torch.device
) -> Language:
    """From the class of each word [vocabulary] and the next state of each class [classes, states]."""
    sizes = np.bincount(class_of_word, minlength=len(maps))
    by_size = sorted(np.flatnonzero(sizes[1:]) + 1, key=lambda number: (sizes[number] > CHUNK, number))
    rank = np.full(len(maps), len(maps))
    rank[by_size] = np.arange(len(by_size))
    order = np.argsort(rank[class_of_word], kind="stable")[: int(sizes[1:].sum())]
    ends = np.cumsum(sizes[by_size])
    bounds = [(0, 0)] * len(maps)
    for number, end in zip(by_size, ends.tolist(), strict=True):
        bounds[number] = (end - int(sizes[number]), end)
    num_small = int((sizes[by_size] <= CHUNK).sum())
    column = np.full(len(class_of_word), -1)
    column[order] = np.arange(len(order))
    blocks = []
    for begin in range(0, len(class_of_word), BLOCK):
        here = column[begin : begin + BLOCK]
        inside = np.flatnonzero(here >= 0)
        if len(inside):
            words = slice(begin, begin + len(here))
            blocks.append(
                Columns(
                    words,
                    torch.from_numpy(inside).to(device),
                    torch.from_numpy(here[inside]).to(device),
                )
            )
    return Language(
        machine=machine_of(maps),
        words=torch.from_numpy(order.astype(np.int64)).to(device),
        order=tuple(int(number) for number in by_size),
        bounds=tuple(bounds),
        small=torch.from_numpy(np.repeat(np.arange(num_small), sizes[by_size[:num_small]])).to(device),
        blocks=tuple(blocks),
    )
