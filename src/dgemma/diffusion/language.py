"""A language over a vocabulary, laid out for a step: words by class, and the machine that reads classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dgemma.diffusion.block import BLOCK
from dgemma.diffusion.paths import Bools, Machine, machine_of

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
    """Class 0 holds the words that no state takes: they are never looked at."""

    machine: Machine
    words: Tensor  # [live], the words of a class next to each other, ascending
    class_of_column: Tensor  # [live]
    bounds: tuple[int, ...]  # [classes + 1]: where each class begins among the live words
    blocks: tuple[Columns, ...]  # those with a live word

    @property
    def num_live(self) -> int:
        return self.words.shape[0]

    def classes(self) -> Iterator[tuple[int, int, int]]:
        """Class, begin, end; of those that have words."""
        for number, (begin, end) in enumerate(pairwise(self.bounds)):
            if begin < end:
                yield number, begin, end

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
    order = np.argsort(class_of_word, kind="stable")
    order = order[np.searchsorted(class_of_word[order], 1) :]
    classes = class_of_word[order]
    bounds = np.searchsorted(classes, np.arange(len(maps) + 1))
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
        machine_of(maps),
        torch.from_numpy(order.astype(np.int64)).to(device),
        torch.from_numpy(classes.astype(np.int64)).to(device),
        tuple(bounds.tolist()),
        tuple(blocks),
    )
