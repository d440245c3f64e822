"""The text form of a grid: cells stand where rotary positions expect them, and broken answers are read."""

from __future__ import annotations

import pytest

from dgemma.sudoku.grid import Grid
from dgemma.sudoku.puzzles import held_out
from dgemma.sudoku.tokens import CELL_PLACES, GRID_LEN, VOCABULARY, answered_cells, solves, to_text

PUZZLE = held_out("hard")[0]


def test_a_grid_comes_back_from_its_text() -> None:
    text = to_text(PUZZLE.clues)
    assert len(text) == GRID_LEN
    assert answered_cells(text) == PUZZLE.clues.cells
    assert "".join(text[at] for at in CELL_PLACES) == PUZZLE.clues.cells
    assert set(text) <= set(VOCABULARY)


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("A123456789", "123456789"),
        ("A1234B", "1234?????"),
        ("A12B456789", "12???????"),
        ("", "?????????"),
        ("A1234567899", "123456789"),
        ("77A123456789", "123456789"),
    ],
)
def test_a_broken_answer_is_read_as_far_as_it_goes(text: str, row: str) -> None:
    assert answered_cells(text)[:9] == row


def test_only_a_full_grid_that_keeps_rules_and_clues_solves() -> None:
    solution = PUZZLE.solution.cells
    assert solves(solution, PUZZLE.clues)
    assert not solves("?" + solution[1:], PUZZLE.clues)
    assert not solves(PUZZLE.clues.cells, PUZZLE.clues)
    other = solution.translate(str.maketrans("12", "21"))
    assert Grid(other).is_solved
    assert not solves(other, PUZZLE.clues)
