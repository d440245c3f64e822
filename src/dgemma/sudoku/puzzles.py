"""Puzzles with their solutions: reading and writing files, and the held-out puzzles of the package."""

from __future__ import annotations

import csv
import lzma
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal, get_args

from dgemma.errors import InputError, suggestion
from dgemma.sudoku.grid import Grid

Band = Literal["easy", "medium", "hard"]
BANDS: tuple[Band, ...] = get_args(Band)
_MAX_FILE_BYTES = 64 << 20


@dataclass(frozen=True)
class Puzzle:
    """Clues and their unique solution."""

    clues: Grid
    solution: Grid

    @property
    def band(self) -> Band:
        count = self.clues.num_clues
        return "easy" if count >= 40 else "medium" if count >= 30 else "hard"


def held_out(band: Band | None = None) -> list[Puzzle]:
    """The 3,000 puzzles that no bundled model was trained on, or the 1,000 of one band."""
    if band is not None and band not in BANDS:
        raise InputError.about(
            "band", f"is {band!r}{suggestion(str(band), BANDS)} Bands: {', '.join(BANDS)}."
        )
    compressed = (resources.files("dgemma") / "data" / "sudoku" / "held_out.csv.xz").read_bytes()
    puzzles = _parse(lzma.decompress(compressed).decode().splitlines(), "held_out.csv.xz")
    return [puzzle for puzzle in puzzles if band in (None, puzzle.band)]


def read_puzzles(path: str | Path) -> list[Puzzle]:
    """The puzzles of a file with lines `puzzle,solution`, which may be compressed (`.xz`)."""
    file = Path(path)
    if not file.is_file():
        raise InputError(f"{file} does not exist; docs/sudoku.md shows how to make puzzles.", field="path")
    try:
        with lzma.open(file) if file.suffix == ".xz" else file.open("rb") as opened:
            raw = opened.read(_MAX_FILE_BYTES + 1)
        if len(raw) > _MAX_FILE_BYTES:
            raise InputError(f"{file} is larger than {_MAX_FILE_BYTES} bytes; divide it.", field="path")
        text = raw.decode()
    except (lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is no file of puzzles: {error}.", field="path") from None
    return _parse(text.splitlines(), str(file))


def write_puzzles(path: str | Path, puzzles: Sequence[Puzzle]) -> None:
    """Write a file that `read_puzzles` can read."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{puzzle.clues.cells},{puzzle.solution.cells}\n" for puzzle in puzzles).encode()
    file.write_bytes(lzma.compress(text, preset=9) if file.suffix == ".xz" else text)


def _parse(lines: Iterable[str], name: str) -> list[Puzzle]:
    puzzles = []
    for number, row in enumerate(csv.reader(lines), start=1):
        try:
            clues, solution = map(Grid, row)
            if not solution.is_solved or solution.keeps(clues) != clues.num_clues:
                raise InputError("the second grid does not solve the first.")
        except (InputError, ValueError) as error:
            raise InputError(f"{name}, line {number}: {error} A line is puzzle,solution.") from None
        puzzles.append(Puzzle(clues, solution))
    return puzzles
