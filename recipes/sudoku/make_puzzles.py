"""Puzzles to learn from, and the held-out ones, from qqwing (Debian's package of that name).

    python -m recipes.sudoku.make_puzzles --count 50000                      # data/sudoku/train.csv.xz
    python -m recipes.sudoku.make_puzzles --count 50000 --new-held-out      # and other held-out puzzles

qqwing has no seed: every run makes other puzzles. No puzzle is written whose solution can be turned into the
solution of a held-out one by a symmetry of Sudoku, and no two with the same solution in that sense.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from dgemma.sudoku.grid import EMPTY, Grid
from dgemma.sudoku.puzzles import BANDS, Band, Puzzle, held_out, read_puzzles, write_puzzles
from dgemma.sudoku.symmetry import canonical, cells_of_text

OUT = Path("data/sudoku/train.csv.xz")
HELD_OUT = Path("src/dgemma/data/sudoku/held_out.csv.xz")
PER_BAND = 1000
# Clues of a held-out puzzle; those of the hard band stay as qqwing makes them, 21 to 29.
CLUES: dict[Band, range] = {"easy": range(40, 51), "medium": range(30, 40)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=50_000, help="puzzles to make (default: 50,000)")
    parser.add_argument("--from", dest="source", type=Path, help="qqwing's own CSV, instead of running it")
    parser.add_argument("--out", type=Path, default=OUT, help=f"(default: {OUT})")
    parser.add_argument("--new-held-out", action="store_true", help=f"also write {HELD_OUT} anew")
    args = parser.parse_args()
    made = list(_read(args.source.open()) if args.source else _make(args.count))
    print(f"{len(made):,} puzzles", flush=True)
    puzzles = _distinct(made, () if args.new_held_out else held_out())
    print(f"{len(puzzles):,} with solutions that differ under all symmetries", flush=True)
    if args.new_held_out:
        kept, puzzles = _hold_out(puzzles[: 3 * PER_BAND]), puzzles[3 * PER_BAND :]
        write_puzzles(HELD_OUT, kept)
        print(f"{HELD_OUT}: {len(kept):,} puzzles, {HELD_OUT.stat().st_size:,} bytes")
    write_puzzles(args.out, puzzles)
    print(f"{args.out}: {len(puzzles):,} puzzles, {args.out.stat().st_size:,} bytes")
    assert len(read_puzzles(args.out)) == len(puzzles)


def _make(count: int) -> Iterator[Puzzle]:
    program = shutil.which("qqwing")
    if program is None:
        sys.exit("qqwing is not installed; on Debian: apt install qqwing")
    # One process: qqwing seeds itself by the clock, and two that start in one second make the same puzzles.
    call = [program, "--generate", str(count), "--csv", "--puzzle", "--solution"]
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from _read(process.stdout)
    if process.returncode:
        sys.exit(f"qqwing ended with {process.returncode}")


def _read(lines: Iterable[str]) -> Iterator[Puzzle]:
    for row in csv.DictReader(lines):
        if row["Solution"] and len(row["Solution"]) == 81:  # the last line may be cut off
            yield Puzzle(Grid(row["Puzzle"]), Grid(row["Solution"]))


def _distinct(puzzles: Sequence[Puzzle], taken: Sequence[Puzzle]) -> list[Puzzle]:
    """The puzzles whose solutions differ from those of `taken` and from each other."""
    with ProcessPoolExecutor() as pool:
        seen = set(pool.map(_form, taken, chunksize=64))
        kept = []
        for number, (puzzle, form) in enumerate(
            zip(puzzles, pool.map(_form, puzzles, chunksize=64), strict=True), start=1
        ):
            if form not in seen:
                kept.append(puzzle)
            seen.add(form)
            if number % 5000 == 0:
                print(f"compared {number:,} of {len(puzzles):,}", flush=True)
    return kept


def _form(puzzle: Puzzle) -> bytes:
    return canonical(cells_of_text(puzzle.solution.cells))


def _hold_out(puzzles: Sequence[Puzzle]) -> list[Puzzle]:
    """A thousand per band: the hard ones as they are, the others with clues added up to a drawn number."""
    generator = np.random.default_rng(0)
    kept = []
    for number, band in enumerate(BANDS):
        for puzzle in puzzles[number * PER_BAND : (number + 1) * PER_BAND]:
            if band in CLUES:
                puzzle = _with_clues(puzzle, int(generator.choice(CLUES[band])), generator)
            assert puzzle.band == band
            kept.append(puzzle)
    return kept


def _with_clues(puzzle: Puzzle, count: int, generator: np.random.Generator) -> Puzzle:
    cells = list(puzzle.clues.cells)
    empty = [place for place, cell in enumerate(cells) if cell == EMPTY]
    for place in generator.permutation(empty)[: count - puzzle.clues.num_clues]:
        cells[place] = puzzle.solution.cells[place]
    return Puzzle(Grid("".join(cells)), puzzle.solution)


if __name__ == "__main__":
    main()
