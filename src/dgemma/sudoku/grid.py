"""A Sudoku grid: 81 cells row by row, each a digit or empty."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter

from dgemma.errors import InputError

EMPTY = "."
DIGITS = "123456789"
# Characters that boards are drawn with; they are ignored.
_FRAME = frozenset(" \t\r\n|+-=_,;:*┃│┆╎║━─═┄╍┏┳┓┣╋┫┗┻┛┌┬┐├┼┤└┴┘╔╦╗╠╬╣╚╩╝╟╫╢╤╧╪╞╡")
_EMPTY_CHARS = frozenset(".0?xX")

# Cells that must differ from each other: nine rows, nine columns, nine boxes.
UNITS = (
    *(tuple(range(9 * row, 9 * row + 9)) for row in range(9)),
    *(tuple(range(column, 81, 9)) for column in range(9)),
    *(
        tuple(9 * (3 * (box // 3) + cell // 3) + 3 * (box % 3) + cell % 3 for cell in range(9))
        for box in range(9)
    ),
)
_UNIT_CELLS = [itemgetter(*unit) for unit in UNITS]


@dataclass(frozen=True)
class Grid:
    """81 characters, `.` for an empty cell."""

    cells: str

    def __post_init__(self) -> None:
        wrong = next((cell for cell in self.cells if cell not in EMPTY + DIGITS), None)
        if len(self.cells) != 81 or wrong is not None:
            found = f"{len(self.cells)} characters" if wrong is None else repr(wrong)
            raise InputError(f"a grid is 81 of {EMPTY}{DIGITS}; this one has {found}.", field="cells")

    @classmethod
    def read(cls, text: str) -> Grid:
        """Parse a grid: `.`, `0`, `?` or `x` for empty cells; frames and spaces are ignored."""
        cells = []
        for place, char in enumerate(text):
            if char in _EMPTY_CHARS:
                cells.append(EMPTY)
            elif char in DIGITS:
                cells.append(char)
            elif char not in _FRAME:
                raise InputError(
                    f"character {place + 1} of the puzzle is {char!r}; cells are digits, and . or 0 where "
                    "they are empty.",
                    field="puzzle",
                )
        if len(cells) != 81:
            raise InputError(
                f"the puzzle has {len(cells)} cells; a Sudoku has 81, nine rows of nine.", field="puzzle"
            )
        return cls("".join(cells))

    @property
    def num_clues(self) -> int:
        return 81 - self.cells.count(EMPTY)

    @property
    def conflicts(self) -> tuple[int, ...]:
        """Cells whose digit occurs twice in a row, column or box."""
        found: set[int] = set()
        for unit in UNITS:
            seen: dict[str, int] = {}
            for cell in unit:
                digit = self.cells[cell]
                if digit != EMPTY and digit in seen:
                    found |= {cell, seen[digit]}
                seen[digit] = cell
        return tuple(sorted(found))

    @property
    def is_solved(self) -> bool:
        """Full, and every row, column and box has each digit once."""
        return EMPTY not in self.cells and all(len(set(unit(self.cells))) == 9 for unit in _UNIT_CELLS)

    def keeps(self, puzzle: Grid) -> int:
        """The number of the puzzle's clues that this grid keeps."""
        return sum(a == b != EMPTY for a, b in zip(puzzle.cells, self.cells, strict=True))

    def board(self) -> str:
        """The grid drawn as text."""
        rows = [self.cells[start : start + 9] for start in range(0, 81, 9)]
        lines = [" | ".join(" ".join(row[at : at + 3]) for at in (0, 3, 6)) for row in rows]
        rule = "------+-------+------"
        return "\n".join([*lines[:3], rule, *lines[3:6], rule, *lines[6:]])


def check_puzzle(puzzle: Grid) -> None:
    """Refuse a puzzle whose clues contradict each other."""
    if puzzle.conflicts:
        raise InputError(
            f"the puzzle contradicts itself: {_places(puzzle.conflicts)} hold a digit twice in one row, "
            "column or box.",
            field="puzzle",
        )


def _places(cells: Iterable[int]) -> str:
    return ", ".join(f"row {cell // 9 + 1} column {cell % 9 + 1}" for cell in cells)
