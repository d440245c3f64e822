"""A Sudoku board while it settles: drawn in place on a terminal, in a pipe the finished cells alone."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from dgemma.events import Draft
from dgemma.sudoku.grid import EMPTY, Grid
from dgemma.sudoku.tokens import CELL_PLACES, UNKNOWN, answered_cells

if TYPE_CHECKING:
    from rich.text import Text

# By entropy in nats, as in the view of texts; ln 2 is a toss-up between two digits.
_STYLES = ((0.1, ""), (0.7, "green"), (2.0, "yellow"))


def open_board_view(puzzle: Grid, *, quiet: bool) -> LiveBoard | PlainBoard:
    """The view that stdout can show; none at all if `quiet`."""
    if quiet or not sys.stdout.isatty():
        return PlainBoard(quiet=quiet)
    return LiveBoard(puzzle)


class PlainBoard:
    """The answer as one line of 81 cells."""

    live = False

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, draft: Draft) -> None:
        """Nothing of a draft is final."""

    def finish(self, cells: str, verdict: str) -> None:
        if not self._quiet:
            print(cells)


class LiveBoard:
    """The board, redrawn at every step: clues bold, guesses by how sure they are."""

    live = True

    def __init__(self, puzzle: Grid) -> None:
        from rich.console import Console
        from rich.live import Live

        self._puzzle = puzzle
        self._opened = ExitStack()
        # Every step is worth seeing, however fast they come.
        self._screen = Live(console=Console(), auto_refresh=False, vertical_overflow="visible")

    def __enter__(self) -> Self:
        self._opened.enter_context(self._screen)
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def show(self, draft: Draft) -> None:
        cells = answered_cells(draft.text)
        entropy = [draft.entropy[at] if at < len(draft.entropy) else 9.0 for at in CELL_PLACES]
        styles = [next((style for most, style in _STYLES if value <= most), "dim") for value in entropy]
        settled = sum(value <= _STYLES[0][0] for value in entropy)
        self._draw(cells, styles, f"step {draft.step}, {settled} of 81 cells settled")

    def finish(self, cells: str, verdict: str) -> None:
        self._draw(cells, [""] * 81, verdict)

    def _draw(self, cells: str, styles: list[str], below: str) -> None:
        self._screen.update(board(self._puzzle, cells, styles, below), refresh=True)


def board(puzzle: Grid, cells: str, styles: list[str], below: str) -> Text:
    """The board as coloured text: the puzzle's clues bold, cells that contradict the rules red."""
    from rich.text import Text

    full = Grid(cells.replace(UNKNOWN, EMPTY))
    wrong = set(full.conflicts) | {
        at for at, clue in enumerate(puzzle.cells) if clue not in (EMPTY, cells[at])
    }
    text = Text()
    for row in range(9):
        if row in (3, 6):
            text.append("------+-------+------\n", "dim")
        for column in range(9):
            at = 9 * row + column
            style = "bold red" if at in wrong else "bold" if puzzle.cells[at] != EMPTY else styles[at]
            text.append(cells[at], style)
            text.append(" | " if column in (2, 5) else "\n" if column == 8 else " ", "dim")
    text.append(below)
    return text
