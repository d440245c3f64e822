"""How the bundled model reads a grid: one token per cell, and a letter in front of each row.

    <bos>A53..7....B6..195...C.98....6.D8...6...3E4..8.3..1F7...2...6G.6....28.H...419..5I....8..79

The answer is written in the same way and ends with `<eos>`, so that a cell of the answer stands exactly
`GRID_LEN` tokens behind the same cell of the puzzle: rotary positions tell such a pair by its distance alone.
The letters tell the model where a row begins; from there a cell knows its column.
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
# Where the 81 cells stand in a grid's tokens.
CELL_PLACES = [10 * (cell // 9) + 1 + cell % 9 for cell in range(81)]

UNKNOWN = "?"

_CELLS = frozenset(EMPTY + DIGITS)


def to_text(grid: Grid) -> str:
    """The grid with its row letters."""
    return "".join(letter + grid.cells[9 * row : 9 * row + 9] for row, letter in enumerate(ROW_LETTERS))


def pins(puzzle: Grid) -> dict[int, int | tuple[int, ...]]:
    """What is known of an answer before it is written: letters, clues, its end; other cells are digits."""
    digits = tuple(VOCABULARY.index(digit) for digit in DIGITS)
    found: dict[int, int | tuple[int, ...]] = {GRID_LEN: EOS}
    for row, letter in enumerate(ROW_LETTERS):
        found[10 * row] = VOCABULARY.index(letter)
    for place, cell in zip(CELL_PLACES, puzzle.cells, strict=True):
        found[place] = digits if cell == EMPTY else VOCABULARY.index(cell)
    return found


def answered_cells(text: str) -> str:
    """81 characters from an answer's text, row by row behind the row's letter; `?` where there is none."""
    rows = []
    for letter in ROW_LETTERS:
        behind = text.partition(letter)[2]
        cells = "".join(takewhile(_CELLS.__contains__, behind[:9]))
        rows.append(cells.ljust(9, UNKNOWN))
    return "".join(rows)


def solves(cells: str, puzzle: Grid) -> bool:
    """Whether answered cells keep the rules and every clue."""
    if UNKNOWN in cells:
        return False
    grid = Grid(cells)
    return grid.is_solved and grid.keeps(puzzle) == puzzle.num_clues
