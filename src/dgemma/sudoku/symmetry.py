"""The 1.2e12 symmetries of Sudoku, and a canonical form that all grids of an orbit share.

Bands, rows inside a band, stacks and columns inside a stack can be reordered, the grid can be transposed,
and digits can be renamed. Two puzzles that differ only by a symmetry count as the same puzzle.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import permutations, product

import numpy as np
from numpy.typing import NDArray

# Shapes: grids are int8 [81] or [9, 9], 0 where a cell is empty.

Cells = NDArray[np.int8]
Places = NDArray[np.int64]

_PLACE_VALUES = 10 ** np.arange(8, -1, -1)


@dataclass(frozen=True)
class Symmetry:
    """`places[i]`: the old index of the cell at new index i. `digits[d]`: the new digit for d."""

    places: Places  # [81]
    digits: Cells  # [10], digits[0] = 0

    def apply(self, cells: Cells) -> Cells:
        return self.digits[cells[self.places]]


def cells_of_text(text: str) -> Cells:
    """81 numbers from 81 characters, 0 for `.`."""
    return np.array([0 if char == "." else int(char) for char in text], np.int8)


def random_symmetry(generator: np.random.Generator) -> Symmetry:
    rows, columns = _random_lines(generator), _random_lines(generator)
    places = (9 * rows[:, None] + columns[None, :]).astype(np.int64)
    if generator.integers(2):
        places = places.T
    digits = np.concatenate([np.zeros(1, np.int8), 1 + generator.permutation(9).astype(np.int8)])
    return Symmetry(places.reshape(81), digits)


def canonical(solution: Cells) -> bytes:
    """The canonical form of a full grid: the smallest grid of its orbit, compared row by row.

    The first row of the smallest is 1 to 9. So a candidate is determined by the line that becomes the first
    row and by one of 1,296 orders of the columns. The renaming of the digits follows from them, and the other
    rows are sorted: those of the first band, those inside each other band, and the two bands.
    """
    square = solution.reshape(9, 9)
    candidates = [(grid, *_second_rows(grid, first)) for grid in (square, square.T) for first in range(9)]
    smallest = min(int(keys.min()) for _, keys, _ in candidates)
    return min(
        _sorted_rows(grid[:, _column_orders()[index]], names[index])
        for grid, keys, names in candidates
        for index in np.flatnonzero(keys == smallest)
    )


def _second_rows(grid: Cells, first: int) -> tuple[Places, Cells]:
    """For each order of columns: the second row as a number, and the renaming of the digits [1296, 10]."""
    orders = _column_orders()
    names = np.zeros((len(orders), 10), np.int8)
    np.put_along_axis(names, grid[first][orders].astype(np.int64), np.arange(1, 10, dtype=np.int8)[None], 1)
    others = [row for row in range(9) if row // 3 == first // 3 and row != first]
    keys = [
        np.take_along_axis(names, grid[row][orders].astype(np.int64), 1) @ _PLACE_VALUES for row in others
    ]
    return np.minimum(*keys), names


def _sorted_rows(grid: Cells, names: Cells) -> bytes:
    """The candidate with its rows sorted."""
    bands = [sorted(names[row].tobytes() for row in grid[at : at + 3]) for at in (0, 3, 6)]
    return b"".join(row for band in sorted(bands) for row in band)


@cache
def _column_orders() -> Places:
    """All 1,296 orders of nine columns that keep the stacks of three together."""
    inside = list(permutations(range(3)))
    orders = [
        [3 * stack + offset for stack, offsets in zip(stacks, chosen, strict=True) for offset in offsets]
        for stacks in inside
        for chosen in product(inside, repeat=3)
    ]
    return np.array(orders)


def _random_lines(generator: np.random.Generator) -> Places:
    groups = generator.permutation(3)
    return np.concatenate([3 * group + generator.permutation(3) for group in groups])
