"""Training records without end: puzzles, each time turned by another symmetry and with other clues added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from dgemma.sudoku.puzzles import Puzzle
from dgemma.sudoku.symmetry import Cells, cells_of_text, random_symmetry
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


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """How many clues a record has.

    A number is drawn between `fewest` and `most`, the likelier the smaller if `skew` is above 1; clues are
    added up to it, and a puzzle that has as many already stays as it is. At the beginning the fewest are
    `first_fewest`, falling in a straight line over `ramp` records.
    """

    fewest: int = 20
    most: int = 50
    skew: float = 1.0
    first_fewest: int = 40
    ramp: int = 1

    def num_clues(self, record: int, generator: np.random.Generator) -> int:
        left = max(0.0, 1 - record / self.ramp)
        low = self.fewest + (self.first_fewest - self.fewest) * left
        share: float = float(generator.random()) ** self.skew
        return round(low + (self.most - low) * share)


EXAMPLE_LEN = PROMPT_LEN + ANSWER_LEN


class Presentations(Sequence[dict[str, Any]]):
    """Record n of a run for any n: a function of (seed, n) alone, so that a run can go on from a number.

    curriculum: None leaves every puzzle the clues it has.
    """

    def __init__(
        self, puzzles: Sequence[Puzzle], *, count: int, seed: int = 0, curriculum: Curriculum | None = None
    ) -> None:
        self._clues = np.stack([cells_of_text(puzzle.clues.cells) for puzzle in puzzles])
        self._solutions = np.stack([cells_of_text(puzzle.solution.cells) for puzzle in puzzles])
        self._count = count
        self._seed = seed
        self._curriculum = curriculum

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
        generator = np.random.default_rng([self._seed, index])
        chosen = int(generator.integers(len(self._clues)))
        clues, solution = self._clues[chosen].copy(), self._solutions[chosen]
        if self._curriculum is not None:
            empty = np.flatnonzero(clues == 0)
            missing = self._curriculum.num_clues(index, generator) - (81 - len(empty))
            added = generator.permutation(empty)[: max(0, missing)]
            clues[added] = solution[added]
        symmetry = random_symmetry(generator)
        return grid_record(symmetry.apply(clues), symmetry.apply(solution))


_FIRST_CELL_ID = VOCABULARY.index(".")  # the digits follow in order
_LETTERS = np.array([VOCABULARY.index(letter) for letter in ROW_LETTERS])


def grid_record(clues: Cells, solution: Cells) -> dict[str, Any]:
    """A record of training data: two grids in one format, of which the second is learned."""
    tokens = [BOS, *_tokens(clues), *_tokens(solution), EOS]
    return {"tokens": tokens, "responses": [[PROMPT_LEN, EXAMPLE_LEN]]}


def _tokens(cells: Cells) -> list[int]:
    tokens = np.empty(GRID_LEN, np.int64)
    tokens[::10] = _LETTERS
    tokens[CELL_PLACES] = cells + _FIRST_CELL_ID
    found: list[int] = tokens.tolist()
    return found
