"""Solve a Sudoku with the bundled model, and watch the board settle.

The puzzle is 81 characters row by row, `.` or 0 for empty cells, or a drawn board; given as it is, as a file,
or on stdin. The model may err, which is seen at once: it is then asked again with another seed, at most
--tries times. In a pipe the answer is one line of 81 digits. The exit status is 1 if no try kept the
rules."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgemma.cli.board_view import open_board_view
from dgemma.errors import InputError
from dgemma.events import Draft, Finish
from dgemma.sudoku.grid import Grid, check_puzzle
from dgemma.sudoku.tokens import ANSWER_LEN, answered_cells, solves, to_text

if TYPE_CHECKING:
    from dgemma import LanguageModel

HELP = "solve a Sudoku, offline, with the bundled model"
EXAMPLES = (
    "examples:\n"
    "  dgemma solve 53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79\n"
    "  dgemma solve puzzle.txt --json\n"
    "  dgemma solve --model my-sudoku-model --seed 7 < puzzle.txt"
)
MODEL = "bundled:sudoku"


@dataclass(frozen=True)
class Try:
    """One answer of the model."""

    cells: str
    seed: int
    steps: int
    is_right: bool  # keeps the rules and all clues: the solution, where there is only one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("puzzle", metavar="PUZZLE", nargs="?", help="81 cells, or a file; - or none: stdin")
    parser.add_argument("--model", default=MODEL, help=f"another Sudoku model (default: {MODEL})")
    parser.add_argument("--adapter", metavar="DIR", help="a LoRA adapter of that model (default: none)")
    parser.add_argument(
        "--tries", type=int, default=5, metavar="N", help="most answers to ask for (default: 5)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first try (default: 0)")
    parser.add_argument(
        "--max-denoising-steps", type=int, metavar="N", help="most steps per answer (default: 48)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for a program")


def run(args: argparse.Namespace) -> int:
    if args.tries < 1:
        raise InputError(f"--tries is {args.tries}; it must be at least 1.")
    puzzle = Grid.read(_text(args.puzzle))
    check_puzzle(puzzle)
    import dgemma

    lm = dgemma.load(args.model, adapter=args.adapter)
    began = time.perf_counter()
    tries: list[Try] = []
    with open_board_view(puzzle, quiet=args.json) as view:
        while len(tries) < args.tries and not (tries and tries[-1].is_right):
            tries.append(_ask(lm, puzzle, args, args.seed + len(tries), view))
        last = tries[-1]
        view.finish(last.cells, _verdict(tries, time.perf_counter() - began))
    if args.json:
        print(json.dumps(_told(puzzle, tries, time.perf_counter() - began)))
    if not last.is_right:
        print(f"dgemma solve: none of {len(tries)} tries keeps the rules and the clues", file=sys.stderr)
        return 1
    return 0


def _ask(lm: LanguageModel, puzzle: Grid, args: argparse.Namespace, seed: int, view: Any) -> Try:
    options: dict[str, Any] = {"seed": seed, "max_tokens": ANSWER_LEN}
    if args.max_denoising_steps is not None:
        options["max_denoising_steps"] = args.max_denoising_steps
    for event in lm.stream(to_text(puzzle), drafts=view.live, **options):
        if isinstance(event, Draft):
            view.show(event)
        elif isinstance(event, Finish):
            answer = event.answer
    cells = answered_cells(answer.text)
    return Try(cells, seed, sum(answer.steps), solves(cells, puzzle))


def _text(given: str | None) -> str:
    if given is None and sys.stdin.isatty():
        raise InputError("no puzzle; give 81 cells or a file, or send one to stdin.")
    if given is None or given == "-":
        return sys.stdin.read(1 << 16)
    # A puzzle may be longer than a file's name can be.
    if len(given) < 81 or given.endswith((".txt", ".sdk", ".sudoku")):
        if not Path(given).is_file():
            raise InputError(f"{given!r} is neither 81 cells nor a file.")
        return Path(given).read_text(errors="replace")[: 1 << 16]
    return given


def _verdict(tries: list[Try], seconds: float) -> str:
    steps = ", ".join(str(one.steps) for one in tries)
    word = "solved" if tries[-1].is_right else "not solved"
    return f"{word} in {seconds:.2f} s, {steps} steps" + (f", {len(tries)} tries" if len(tries) > 1 else "")


def _told(puzzle: Grid, tries: list[Try], seconds: float) -> dict[str, Any]:
    last = tries[-1]
    return {
        "puzzle": puzzle.cells,
        "answer": last.cells,
        "solved": last.is_right,
        "clues": puzzle.num_clues,
        "steps": last.steps,
        "tries": len(tries),
        "steps_in_all": sum(one.steps for one in tries),
        "seed": last.seed,
        "seconds": round(seconds, 3),
    }
