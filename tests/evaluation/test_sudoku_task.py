"""The Sudoku task scores what it says: the solution, the rules, cells, clues."""

from __future__ import annotations

import pytest

import dgemma
from dgemma.errors import InputError
from dgemma.evaluation.runner import evaluate
from dgemma.evaluation.tasks.registry import open_task
from dgemma.evaluation.tasks.sudoku import SudokuTask
from dgemma.events import Answer, FinishReason
from dgemma.sudoku.grid import EMPTY, Grid
from dgemma.sudoku.tokens import to_text
from sizes import cases

FEW = cases(20, 8)


def answer(text: str) -> Answer:
    return Answer(text=text, tokens=(), finish_reason=FinishReason.STOP, seed=0, decode="diffuse")


def test_right_wrong_and_broken_answers() -> None:
    task = SudokuTask("medium")
    puzzle = task.examples()[0]
    cells = puzzle.solution.cells
    right = task.score(puzzle, answer(to_text(puzzle.solution)))
    assert right == {"exact": 1, "valid": 1, "cells": 1, "clues": 1}
    other = Grid(cells.translate(str.maketrans("123456789", "234567891")))
    assert task.score(puzzle, answer(to_text(other))) == {"exact": 0, "valid": 1, "cells": 0, "clues": 0}
    empty = puzzle.clues.cells.index(EMPTY)
    wrong = Grid(cells[:empty] + ("1" if cells[empty] != "1" else "2") + cells[empty + 1 :])
    scores = task.score(puzzle, answer(to_text(wrong)))
    assert (scores["exact"], scores["valid"], scores["clues"]) == (0, 0, 1)
    assert scores["cells"] == pytest.approx(1 - 1 / puzzle.clues.cells.count(EMPTY))
    assert task.score(puzzle, answer("")) == {"exact": 0, "valid": 0, "cells": 0, "clues": 0}


def test_bands_are_groups_and_details_of_the_name() -> None:
    assert {example.band for example in open_task("sudoku:hard").examples()} == {"hard"}
    task = open_task("sudoku")
    examples = list(task.examples())
    assert len(examples) == 3000
    assert SudokuTask().groups(examples[0]) == ["easy", f"{examples[0].clues.num_clues} clues"]
    with pytest.raises(InputError, match="Bands: easy, medium, hard"):
        open_task("sudoku:evil")


def test_the_bundled_model_solves_easy_puzzles_and_its_causal_pass_does_not() -> None:
    """A floor far below the measured figures: it falls if the shipped weights or a numeric path break."""
    lm = dgemma.load("bundled:sudoku")
    report = evaluate(lm, SudokuTask("easy"), limit=FEW, batch=20, seed=0)
    assert report.scores["exact"].mean >= 0.9
    assert report.steps_mean is not None
    assert report.steps_mean < 12
    causal = evaluate(
        lm,
        SudokuTask("medium"),
        limit=FEW,
        batch=20,
        seed=0,
        options={"decode": "causal", "temperature": 0.0},
    )
    assert causal.scores["exact"].mean <= 0.5
