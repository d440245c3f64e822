"""Latin squares in the grid format: the rules of rows and columns as in Sudoku, without boxes.

A base model learns grids from them, but not Sudoku; `docs/sudoku.md` explains its use.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dgemma.sudoku.grid_records import GridRecords
from dgemma.sudoku.symmetry import Cells


class LatinSquares(GridRecords):
    """Random Latin squares with `fewest` to `most` clues."""

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
    """A random Latin square, row by row. Each row is a random matching of columns to unused digits."""
    left = [set(range(1, 10)) for _ in range(9)]  # unused digits of each column
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
    """Assign a digit to `column`, reassigning other columns if needed (Kuhn's matching)."""
    for digit in orders[column].tolist():
        if digit not in left[column] or digit in tried:
            continue
        tried.add(digit)
        if digit not in column_of or _assign(column_of[digit], left, orders, column_of, tried):
            column_of[digit] = column
            return True
    return False
