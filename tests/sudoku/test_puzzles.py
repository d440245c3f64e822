"""The held-out puzzles are what they are said to be, and files of puzzles are read as they were written."""

from __future__ import annotations

import lzma
from collections import Counter
from pathlib import Path

import pytest

from dgemma.errors import InputError
from dgemma.sudoku.grid import EMPTY, UNITS, Grid
from dgemma.sudoku.puzzles import BANDS, Puzzle, held_out, read_puzzles, write_puzzles
from dgemma.sudoku.symmetry import canonical, cells_of_text


def num_solutions(grid: Grid, limit: int = 2) -> int:
    """By plain search: the cell with the fewest choices first."""
    peers = [{other for unit in UNITS if cell in unit for other in unit} - {cell} for cell in range(81)]

    def search(cells: list[str]) -> int:
        choices = {
            cell: set("123456789") - {cells[peer] for peer in peers[cell]}
            for cell in range(81)
            if cells[cell] == EMPTY
        }
        if not choices:
            return 1
        cell = min(choices, key=lambda each: len(choices[each]))
        found = 0
        for digit in choices[cell]:
            found += search([*cells[:cell], digit, *cells[cell + 1 :]])
            if found >= limit:
                break
        return found

    return search(list(grid.cells))


def test_a_thousand_puzzles_per_band_by_their_number_of_clues() -> None:
    assert Counter(puzzle.band for puzzle in held_out()) == dict.fromkeys(BANDS, 1000)
    counts = {band: {puzzle.clues.num_clues for puzzle in held_out(band)} for band in BANDS}
    assert min(counts["easy"]) == 40
    assert (min(counts["medium"]), max(counts["medium"])) == (30, 39)
    assert max(counts["hard"]) < 30


def test_every_held_out_puzzle_is_solved_by_its_solution_and_no_two_are_the_same() -> None:
    puzzles = held_out()
    assert all(puzzle.solution.is_solved for puzzle in puzzles)
    assert all(puzzle.solution.keeps(puzzle.clues) == puzzle.clues.num_clues for puzzle in puzzles)
    assert len({puzzle.solution for puzzle in puzzles}) == 3000
    some = [canonical(cells_of_text(puzzle.solution.cells)) for puzzle in puzzles[::30]]
    assert len(set(some)) == len(some)


@pytest.mark.parametrize("band", BANDS)
def test_held_out_puzzles_have_one_solution(band: str) -> None:
    for puzzle in held_out(band)[:6]:  # type: ignore[arg-type]
        assert num_solutions(puzzle.clues) == 1


def test_taking_clues_away_leaves_more_than_one_solution() -> None:
    """The search of the test before sees a second solution where there is one."""
    assert num_solutions(Grid(held_out("easy")[0].solution.cells[:40] + EMPTY * 41)) == 2


def test_an_unknown_band_is_refused_with_a_guess() -> None:
    with pytest.raises(InputError, match="did you mean 'hard'"):
        held_out("hrad")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["some.csv", "some.csv.xz", "new/some.csv.xz"])
def test_a_file_of_puzzles_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    puzzles = held_out("hard")[:7]
    write_puzzles(tmp_path / name, puzzles)
    assert read_puzzles(tmp_path / name) == puzzles


def test_a_line_whose_grids_do_not_belong_together_is_refused_by_number(tmp_path: Path) -> None:
    first, second = held_out("hard")[:2]
    write_puzzles(tmp_path / "bad.csv", [first, Puzzle(second.clues, first.solution)])
    with pytest.raises(InputError, match=r"bad.csv, line 2: the second grid does not solve"):
        read_puzzles(tmp_path / "bad.csv")
    (tmp_path / "short.csv").write_text("53..7\n")
    with pytest.raises(InputError, match="line 1"):
        read_puzzles(tmp_path / "short.csv")
    with pytest.raises(InputError, match="does not exist"):
        read_puzzles(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv.xz", b"no archive", "is no file of puzzles: Input format not supported"),
        ("cut.csv.xz", lzma.compress(b"x" * 100)[:-20], "is no file of puzzles: Compressed file ended"),
        ("a.csv", b"\xff\xfe", "is no file of puzzles: 'utf-8' codec"),
        ("large.csv", b"x" * 1001, "is larger than 1000 bytes"),
        ("large.csv.xz", lzma.compress(b"x" * 1001), "is larger than 1000 bytes"),
    ],
    ids=["no archive", "cut archive", "no text", "large", "large in an archive"],
)
def test_a_file_that_holds_no_puzzles_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dgemma.sudoku.puzzles._MAX_FILE_BYTES", 1000)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=said):
        read_puzzles(tmp_path / name)
