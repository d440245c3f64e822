"""Training records of a pair of grids, clues and solution. The solution is supervised."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, overload

import numpy as np

from dgemma.sudoku.symmetry import Cells
from dgemma.sudoku.tokens import (
    ANSWER_LEN,
    BOS,
    CELL_PLACES,
    EOS,
    GRID_LEN,
    PROMPT_LEN,
    ROW_LETTERS,
    VOCABULARY,
)

EXAMPLE_LEN = PROMPT_LEN + ANSWER_LEN
_FIRST_CELL_ID = VOCABULARY.index(".")  # the digits follow in order
_LETTERS = np.array([VOCABULARY.index(letter) for letter in ROW_LETTERS])


class GridRecords(Sequence[dict[str, Any]], ABC):
    """Record n for any n: a function of (seed, n) alone, so that a run can resume from a record number."""

    def __init__(self, *, count: int, seed: int) -> None:
        self._count, self._seed = count, seed

    @abstractmethod
    def grids(self, index: int, generator: np.random.Generator) -> tuple[Cells, Cells]:
        """Clues and solution of record `index`."""

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Sequence[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._count))]
        if not 0 <= index < self._count:
            raise IndexError(index)
        clues, solution = self.grids(index, np.random.default_rng([self._seed, index]))
        tokens = [BOS, *_tokens(clues), *_tokens(solution), EOS]
        return {"tokens": tokens, "responses": [[PROMPT_LEN, EXAMPLE_LEN]]}


def _tokens(cells: Cells) -> list[int]:
    tokens = np.empty(GRID_LEN, np.int64)
    tokens[::10] = _LETTERS
    tokens[CELL_PLACES] = cells + _FIRST_CELL_ID
    found: list[int] = tokens.tolist()
    return found
