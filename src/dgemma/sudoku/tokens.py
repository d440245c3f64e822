"""The token format of the bundled Sudoku model: one token per cell, and a letter before each row.

    <bos>A53..7....B6..195...C.98....6.D8...6...3E4..8.3..1F7...2...6G.6....28.H...419..5I....8..79

The answer has the same format and ends with `<eos>`. So each cell of the answer is exactly `GRID_LEN` tokens
after the same cell of the puzzle, and RoPE identifies such a pair by its distance alone. The letters mark the
begin of each row, from which the column of a cell follows.
"""

from __future__ import annotations

from itertools import takewhile

from dgemma.sudoku.grid import DIGITS, EMPTY, Grid

ROW_LETTERS = "ABCDEFGHI"
PAD, EOS, BOS = 0, 1, 2
SPECIALS = ("<pad>", "<eos>", "<bos>")
VOCABULARY = (*SPECIALS, EMPTY, *DIGITS, *ROW_LETTERS)
GRID_LEN = 90
PROMPT_LEN = 1 + GRID_LEN
ANSWER_LEN = GRID_LEN + 1
# The indices of the 81 cells in the tokens of a grid.
CELL_PLACES = [10 * (cell // 9) + 1 + cell % 9 for cell in range(81)]

UNKNOWN = "?"

_CELLS = frozenset(EMPTY + DIGITS)


def to_text(grid: Grid) -> str:
    """The grid with its row letters."""
    return "".join(letter + grid.cells[9 * row : 9 * row + 9] for row, letter in enumerate(ROW_LETTERS))


def pins(puzzle: Grid) -> dict[int, int | tuple[int, ...]]:
    """The pinned tokens of an answer: letters, clues and its end. Other cells are restricted to digits."""
    digits = tuple(VOCABULARY.index(digit) for digit in DIGITS)
    found: dict[int, int | tuple[int, ...]] = {GRID_LEN: EOS}
    for row, letter in enumerate(ROW_LETTERS):
        found[10 * row] = VOCABULARY.index(letter)
    for place, cell in zip(CELL_PLACES, puzzle.cells, strict=True):
        found[place] = digits if cell == EMPTY else VOCABULARY.index(cell)
    return found


def answered_cells(text: str) -> str:
    """The 81 cells of an answer's text: nine after each row letter; `?` for a missing cell."""
    rows = []
    for letter in ROW_LETTERS:
        rest = text.partition(letter)[2]
        cells = "".join(takewhile(_CELLS.__contains__, rest[:9]))
        rows.append(cells.ljust(9, UNKNOWN))
    return "".join(rows)


def solves(cells: str, puzzle: Grid) -> bool:
    """Whether the cells of an answer satisfy the rules and keep every clue."""
    if UNKNOWN in cells:
        return False
    grid = Grid(cells)
    return grid.is_solved and grid.keeps(puzzle) == puzzle.num_clues
