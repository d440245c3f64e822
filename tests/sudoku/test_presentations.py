"""Training records: each a puzzle of its own with its solution, by number alone."""

from __future__ import annotations

import numpy as np
import pytest

from dgemma.sudoku.grid import Grid
from dgemma.sudoku.presentations import Curriculum, Presentations
from dgemma.sudoku.puzzles import held_out
from dgemma.sudoku.symmetry import canonical, cells_of_text
from dgemma.sudoku.tokens import ANSWER_LEN, BOS, EOS, PROMPT_LEN, VOCABULARY, answered_cells, solves, to_text

PUZZLES = held_out("hard")[:50]


def grids_of(record: dict[str, list[int]]) -> tuple[Grid, Grid]:
    text = "".join(VOCABULARY[token] for token in record["tokens"][1:-1])
    return Grid(answered_cells(text[:90])), Grid(answered_cells(text[90:]))


def test_a_record_is_a_puzzle_and_its_solution_in_one_format() -> None:
    records = Presentations(PUZZLES, count=1000)
    for number in (0, 1, 500, 999):
        record = records[number]
        assert record["tokens"][0] == BOS
        assert record["tokens"][-1] == EOS
        assert record["responses"] == [[PROMPT_LEN, PROMPT_LEN + ANSWER_LEN]]
        clues, solution = grids_of(record)
        assert solves(solution.cells, clues)
        text = "".join(VOCABULARY[token] for token in record["tokens"][1:-1])
        assert text == to_text(clues) + to_text(solution)


def test_a_record_depends_on_seed_and_number_alone() -> None:
    records, again, other = (Presentations(PUZZLES, count=100, seed=seed) for seed in (0, 0, 1))
    assert records[7] == again[7]
    assert records[7] != other[7]
    assert records[7] != records[8]
    assert records[5:8] == [records[5], records[6], records[7]]


def test_every_record_is_a_symmetry_of_one_of_the_puzzles() -> None:
    known = {canonical(cells_of_text(puzzle.solution.cells)) for puzzle in PUZZLES}
    records = Presentations(PUZZLES, count=1 << 40)
    found = [
        canonical(cells_of_text(grids_of(records[number])[1].cells)) for number in range(0, 1 << 40, 1 << 36)
    ]
    assert set(found) <= known
    assert len(set(found)) > 1


def test_the_curriculum_goes_from_many_clues_to_few() -> None:
    curriculum = Curriculum(first_fewest=40, fewest=20, most=50, ramp=1000)
    records = Presentations(PUZZLES, count=100_000, curriculum=curriculum)
    early = [grids_of(records[number])[0].num_clues for number in range(20)]
    late = [grids_of(records[number])[0].num_clues for number in range(2000, 2200)]
    assert min(early) >= 39
    assert min(late) < 30
    assert max(late) > 45


def test_a_skew_prefers_few_clues() -> None:
    generator = np.random.default_rng(0)
    means = [
        np.mean([Curriculum(skew=skew).num_clues(10, generator) for _ in range(500)]) for skew in (1.0, 3.0)
    ]
    assert means[1] < means[0] - 3


def test_there_is_no_record_after_the_last() -> None:
    with pytest.raises(IndexError):
        Presentations(PUZZLES, count=10)[10]
