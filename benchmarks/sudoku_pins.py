"""What pins gain in Sudoku: the clues fixed on the canvas, and empty cells limited to digits.

    python -m benchmarks.sudoku_pins [--limit N]

The first N held-out puzzles of each band, one try each with the same seeds: the answer free, as it was
trained; clues, row letters and the end pinned; and with empty cells limited to digits besides.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from benchmarks import record
from dgemma import LanguageModel, load
from dgemma.engine.request import PinnedTokens
from dgemma.events import Answer
from dgemma.sudoku.grid import Grid
from dgemma.sudoku.puzzles import BANDS, held_out
from dgemma.sudoku.tokens import ANSWER_LEN, answered_cells, pins, solves, to_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="bundled:sudoku")
    parser.add_argument("--limit", type=int, default=100, help="puzzles per band (default: 100)")
    parser.add_argument("--batch", type=int, default=25)
    args = parser.parse_args()
    lm = load(args.model, dtype="float32")
    found: dict[str, dict[str, Any]] = {}
    for band in BANDS:
        puzzles = [puzzle.clues for puzzle in held_out(band)[: args.limit]]
        for way in ("free", "clues", "clues_and_digits"):
            found.setdefault(way, {})[band] = measured(lm, puzzles, way, args.batch)
            print(way, band, found[way][band], flush=True)
    record.write("sudoku_pins", {"puzzles_per_band": args.limit, "ways": found})


def measured(lm: LanguageModel, puzzles: list[Grid], way: str, batch: int) -> dict[str, Any]:
    began = time.perf_counter()
    answers: list[Answer] = []
    for begin in range(0, len(puzzles), batch):
        answers += answered(lm, puzzles[begin : begin + batch], way, begin)
    solved = [solves(answered_cells(a.text), p) for a, p in zip(answers, puzzles, strict=True)]
    return {
        "solved": round(sum(solved) / len(solved), 4),
        "steps": round(statistics.fmean(a.forwards for a in answers), 2),
        "seconds_per_puzzle": round((time.perf_counter() - began) / len(puzzles), 3),
    }


def answered(lm: LanguageModel, puzzles: list[Grid], way: str, first_seed: int) -> list[Answer]:
    bench = lm._task_context(max_tokens=ANSWER_LEN)
    requests = []
    for number, puzzle in enumerate(puzzles):
        given = None
        if way != "free":
            known = pins(puzzle)
            fixed = {place: pin for place, pin in known.items() if isinstance(pin, int)}
            given = PinnedTokens.from_pins(known if way == "clues_and_digits" else fixed)
        prompt = bench.opening(lm.tokenizer.encode(to_text(puzzle)), reserve=0)
        request = bench.answer(prompt, max_tokens=ANSWER_LEN, pinned=given, seed=first_seed + number)
        requests.append(request)
    return lm._ask(requests)


if __name__ == "__main__":
    main()
