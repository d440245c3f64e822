"""The held-out Sudoku puzzles, as a task: `sudoku`, or `sudoku:hard` for one band."""

from __future__ import annotations

from typing import Any, cast

from dgemma.events import Answer
from dgemma.sudoku.grid import EMPTY, Grid
from dgemma.sudoku.puzzles import Band, Puzzle, held_out
from dgemma.sudoku.tokens import ANSWER_LEN, UNKNOWN, answered_cells, to_text


class SudokuTask:
    """The held-out puzzles and their scores.

    exact: all cells equal the solution. valid: a full grid that satisfies the rules, regardless of the clues.
    cells: the share of empty cells that are right. clues: the share of clues that are kept.
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
        hits = [written == right for clue, right, written in triples if clue == EMPTY]
        kept = [written == right for clue, right, written in triples if clue != EMPTY]
        return {
            "exact": float(cells == example.solution.cells),
            "valid": float(UNKNOWN not in cells and Grid(cells).is_solved),
            "cells": sum(hits) / max(1, len(hits)),
            "clues": sum(kept) / max(1, len(kept)),
        }
