"""Latin squares in the grid format: rows and columns as in Sudoku, and no boxes.

A base model learns from them what a grid is, but not Sudoku; `docs/sudoku.md` tells what for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dgemma.sudoku.grid_records import GridRecords
from dgemma.sudoku.symmetry import Cells


class LatinSquares(GridRecords):
    """Random Latin squares with clues from `fewest` to `most`."""

    def __init__(self, *, count: int, seed: int = 0, fewest: int = 30, most: int = 60) -> None:
        super().__init__(count=count, seed=seed)
        self._fewest, self._most = fewest, most

    def grids(self, index: int, generator: np.random.Generator) -> tuple[Cells, Cells]:
        square = random_latin_square(generator)
        num_clues = int(generator.integers(self._fewest, self._most + 1))
        clues = square.copy()
        clues[generator.permutation(81)[num_clues:]] = 0
        return clues, square


def random_latin_square(generator: np.random.Generator) -> Cells:
    """Row after row, each a random way to give every column a digit it has not had; there always is one."""
    left = [set(range(1, 10)) for _ in range(9)]  # digits a column has not had
    rows = []
    for _ in range(9):
        orders = [generator.permutation(9) + 1 for _ in range(9)]
        column_of: dict[int, int] = {}
        for column in generator.permutation(9).tolist():
            _assign(column, left, orders, column_of, set())
        row = np.zeros(9, np.int8)
        for digit, column in column_of.items():
            row[column] = digit
            left[column].remove(digit)
        rows.append(row)
    return np.concatenate(rows)


def _assign(
    column: int,
    left: list[set[int]],
    orders: list[Any],
    column_of: dict[int, int],
    tried: set[int],
) -> bool:
    """Give `column` a digit, moving others to other digits where that is needed (Kuhn's matching)."""
    for digit in orders[column].tolist():
        if digit not in left[column] or digit in tried:
            continue
        tried.add(digit)
        if digit not in column_of or _assign(column_of[digit], left, orders, column_of, tried):
            column_of[digit] = column
            return True
    return False
