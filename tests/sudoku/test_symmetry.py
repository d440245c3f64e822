"""The symmetries of Sudoku: they keep the rules, and one form tells whether two grids share an orbit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.sudoku.grid import Grid
from dgemma.sudoku.puzzles import held_out
from dgemma.sudoku.symmetry import Cells, Symmetry, canonical, cells_of_text, random_symmetry

SOLUTIONS = [cells_of_text(puzzle.solution.cells) for puzzle in held_out("easy")[:20]]


def grid_of(cells: Cells) -> Grid:
    return Grid("".join("." if cell == 0 else str(cell) for cell in cells))


@given(st.integers(0, 1 << 32), st.integers(0, 19))
@settings(max_examples=40, deadline=None)
def test_a_symmetry_keeps_the_rules_and_the_canonical_form(seed: int, which: int) -> None:
    symmetry = random_symmetry(np.random.default_rng(seed))
    turned = symmetry.apply(SOLUTIONS[which])
    assert grid_of(turned).is_solved
    assert canonical(turned) == canonical(SOLUTIONS[which])


def test_the_canonical_form_is_of_the_same_orbit_and_its_smallest() -> None:
    """Its own form is itself, it keeps the rules, and no random symmetry gives a smaller grid."""
    generator = np.random.default_rng(0)
    for solution in SOLUTIONS[:5]:
        form = canonical(solution)
        cells = np.frombuffer(form, np.int8)
        assert grid_of(cells).is_solved
        assert canonical(cells) == form
        assert all(random_symmetry(generator).apply(solution).tobytes() >= form for _ in range(2000))


def test_grids_of_different_orbits_have_different_forms() -> None:
    assert len({canonical(solution) for solution in SOLUTIONS}) == len(SOLUTIONS)


def test_swapping_two_rows_of_different_bands_is_no_symmetry() -> None:
    places = np.arange(81).reshape(9, 9)[[3, 1, 2, 0, 4, 5, 6, 7, 8]].reshape(81)
    changed = Symmetry(places, np.arange(10, dtype=np.int8)).apply(SOLUTIONS[0])
    assert not grid_of(changed).is_solved


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_empty_cells_stay_empty(share: float) -> None:
    cells = np.where(np.arange(81) < 81 * share, SOLUTIONS[0], 0).astype(np.int8)
    turned = random_symmetry(np.random.default_rng(1)).apply(cells)
    assert (turned == 0).sum() == (cells == 0).sum()
