"""Training records from puzzles, each with a random symmetry and random added clues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dgemma.sudoku.grid_records import GridRecords
from dgemma.sudoku.puzzles import Puzzle
from dgemma.sudoku.symmetry import Cells, cells_of_text, random_symmetry


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """How many clues a record has.

    The number is drawn between `fewest` and `most`; smaller numbers are more frequent if `skew` is above 1.
    Clues are added up to this number; a puzzle that has as many already is unchanged. At the beginning the
    lower limit is `first_fewest`; it falls linearly to `fewest` over `ramp` records.
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


class Presentations(GridRecords):
    """Puzzles in random order. `curriculum`: None adds no clues."""

    def __init__(
        self, puzzles: Sequence[Puzzle], *, count: int, seed: int = 0, curriculum: Curriculum | None = None
    ) -> None:
        super().__init__(count=count, seed=seed)
        self._clues = np.stack([cells_of_text(puzzle.clues.cells) for puzzle in puzzles])
        self._solutions = np.stack([cells_of_text(puzzle.solution.cells) for puzzle in puzzles])
        self._curriculum = curriculum

    def grids(self, index: int, generator: np.random.Generator) -> tuple[Cells, Cells]:
        chosen = int(generator.integers(len(self._clues)))
        clues, solution = self._clues[chosen].copy(), self._solutions[chosen]
        if self._curriculum is not None:
            empty = np.flatnonzero(clues == 0)
            missing = self._curriculum.num_clues(index, generator) - (81 - len(empty))
            added = generator.permutation(empty)[: max(0, missing)]
            clues[added] = solution[added]
        symmetry = random_symmetry(generator)
        return symmetry.apply(clues), symmetry.apply(solution)
