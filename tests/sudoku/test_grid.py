"""Grids: what is read as one, what contradicts itself, what is solved."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgemma.errors import InputError
from dgemma.sudoku.grid import UNITS, Grid, check_puzzle

PUZZLE = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
SOLUTION = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"


def test_every_cell_stands_in_one_row_one_column_and_one_box() -> None:
    assert len(UNITS) == 27
    assert all(len(set(unit)) == 9 for unit in UNITS)
    assert all(sum(cell in unit for unit in UNITS) == 3 for cell in range(81))
    assert set(UNITS[18]) == {0, 1, 2, 9, 10, 11, 18, 19, 20}


def test_a_solution_is_solved_and_keeps_the_clues() -> None:
    assert Grid(SOLUTION).is_solved
    assert not Grid(PUZZLE).is_solved
    assert Grid(SOLUTION).keeps(Grid(PUZZLE)) == Grid(PUZZLE).num_clues == 30
    assert Grid(PUZZLE).keeps(Grid(SOLUTION)) == 30


@given(st.integers(0, 80), st.sampled_from("123456789"))
def test_one_wrong_digit_is_always_a_conflict(cell: int, digit: str) -> None:
    changed = Grid(SOLUTION[:cell] + digit + SOLUTION[cell + 1 :])
    assert changed.is_solved == (digit == SOLUTION[cell])
    assert (cell in changed.conflicts) == (digit != SOLUTION[cell])


@pytest.mark.parametrize(
    "text",
    [
        PUZZLE,
        PUZZLE.replace(".", "0"),
        PUZZLE.replace(".", "x"),
        Grid(PUZZLE).board(),
        "\n".join(PUZZLE[row : row + 9] for row in range(0, 81, 9)) + "\n",
        "│".join(PUZZLE),
    ],
)
def test_a_grid_is_read_as_people_write_it(text: str) -> None:
    assert Grid.read(text).cells == PUZZLE


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PUZZLE[:-1], "80 cells"),
        (PUZZLE + ".", "82 cells"),
        ("", "0 cells"),
        ("a" + PUZZLE, "character 1 of the puzzle is 'a'"),
    ],
)
def test_what_is_no_grid_is_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Grid.read(text)


def test_a_grid_is_81_cells() -> None:
    with pytest.raises(InputError, match="80 characters"):
        Grid(PUZZLE[:-1])
    with pytest.raises(InputError, match="81 of"):
        Grid("0" * 81)


def test_a_puzzle_that_contradicts_itself_is_refused_with_the_cells() -> None:
    check_puzzle(Grid(PUZZLE))
    with pytest.raises(InputError, match="row 1 column 1, row 1 column 9"):
        check_puzzle(Grid(PUZZLE[:8] + "5" + PUZZLE[9:]))
