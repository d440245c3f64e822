"""The held-out Sudoku puzzles, as a task: `sudoku`, or `sudoku:hard` for one band."""

from __future__ import annotations

from typing import Any, cast

from dgemma.events import Answer
from dgemma.sudoku.grid import EMPTY, Grid
from dgemma.sudoku.puzzles import Band, Puzzle, held_out
from dgemma.sudoku.tokens import ANSWER_LEN, UNKNOWN, answered_cells, to_text


class SudokuTask:
    """exact: the solution, cell by cell. valid: a full grid that keeps the rules, whatever the clues were.
    cells: the share of empty cells filled right. clues: the share of clues that were kept.
    """

    raw = True

    def __init__(self, band: str = "") -> None:
        self._puzzles = held_out(cast(Band, band) if band else None)
        self.name = f"sudoku:{band}" if band else "sudoku"

    def options(self) -> dict[str, Any]:
        return {"max_tokens": ANSWER_LEN}

    def examples(self) -> list[Puzzle]:
        return self._puzzles

    def groups(self, example: Puzzle) -> list[str]:
        return [example.band, f"{example.clues.num_clues} clues"]

    def prompt(self, example: Puzzle) -> str:
        return to_text(example.clues)

    def score(self, example: Puzzle, answer: Answer) -> dict[str, float]:
        cells = answered_cells(answer.text)
        triples = list(zip(example.clues.cells, example.solution.cells, cells, strict=True))
        asked = [written == right for clue, right, written in triples if clue == EMPTY]
        given = [written == right for clue, right, written in triples if clue != EMPTY]
        return {
            "exact": float(cells == example.solution.cells),
            "valid": float(UNKNOWN not in cells and Grid(cells).is_solved),
            "cells": sum(asked) / max(1, len(asked)),
            "clues": sum(given) / max(1, len(given)),
        }
