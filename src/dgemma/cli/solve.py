"""Solve a Sudoku with the bundled model, and watch the board settle.

The puzzle is 81 characters row by row, `.` or 0 for empty cells, or a drawn board; given as it is, as a file,
or on stdin. Without one, on a terminal, a puzzle is drawn that no bundled model was trained on. A wrong
answer is detected by the rules: the model then samples again with another seed, at most --tries times. In a
pipe the answer is one line of 81 digits. The exit status is 1 if no try kept the rules."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dgemma.cli.options import (
    add_trace_argument,
    check_trace,
    keep_undecodable_input,
    load_with_progress,
    recording,
    thread_count,
)
from dgemma.cli.views.progress import Notice
from dgemma.errors import InputError
from dgemma.events import Draft, Finish
from dgemma.params import GenerationParams
from dgemma.sudoku.grid import EMPTY, Grid, check_puzzle
from dgemma.sudoku.puzzles import BANDS, held_out
from dgemma.sudoku.tokens import ANSWER_LEN, CELL_PLACES, UNKNOWN, answered_cells, solves, to_text

if TYPE_CHECKING:
    from rich.text import Text

    from dgemma import LanguageModel


# By entropy in nats, as in the view of texts; ln 2 is a toss-up between two digits.
SURE_NATS = 0.1
_STYLES = ((SURE_NATS, ""), (0.7, "green"), (2.0, "yellow"))

EXAMPLES = (
    "examples:\n"
    "  dgemma solve\n"
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
    is_sure: tuple[bool, ...]  # each empty cell, in the last draft

    @property
    def num_sure(self) -> int:
        return sum(self.is_sure)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "puzzle", metavar="PUZZLE", nargs="?", help="81 cells, or a file; -: stdin; none: any"
    )
    parser.add_argument("--band", choices=BANDS, help="of a drawn puzzle (default: any)")
    parser.add_argument("--model", default=MODEL, help=f"another Sudoku model (default: {MODEL})")
    parser.add_argument("--adapter", metavar="DIR", help="a LoRA adapter of that model (default: none)")
    parser.add_argument(
        "--tries", type=int, default=5, metavar="N", help="most answers to ask for (default: 5)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first try (default: 0)")
    parser.add_argument(
        "--max-denoising-steps", type=int, metavar="N", help="most steps per answer (default: 48)"
    )
    parser.add_argument(
        "--pace", type=float, default=0.3, metavar="SECONDS",
        help="at least so long each step is shown on a terminal (default: 0.3)",
    )  # fmt: skip
    parser.add_argument("--threads", type=thread_count, metavar="N", help="of the processor (default: auto)")
    parser.add_argument("--json", action="store_true", help="print one JSON object for a program")
    add_trace_argument(parser)


def run(args: argparse.Namespace) -> int:
    if args.tries < 1:
        raise InputError(f"--tries is {args.tries}; it must be at least 1.")
    if not 0 <= args.pace <= 60:
        raise InputError(f"--pace is {args.pace:g}; it must be between 0 and 60 seconds.")
    check_trace(args)
    options: dict[str, Any] = {}
    if args.max_denoising_steps is not None:
        options["max_denoising_steps"] = args.max_denoising_steps
    for seed in (args.seed, args.seed + args.tries - 1):
        GenerationParams.make(seed=seed, **options)
    puzzle = _puzzle(args)
    check_puzzle(puzzle)
    tries: list[Try] = []
    with open_board_view(puzzle, quiet=args.json, pace_s=args.pace) as view:
        lm = load_with_progress(
            args.model, threads=args.threads, all_cores=True, quiet=True, adapter=args.adapter
        )
        began = time.perf_counter()
        with recording(lm, args.trace, "solve"):
            while len(tries) < args.tries and not (tries and tries[-1].is_right):
                tries.append(_ask(lm, puzzle, {**options, "seed": args.seed + len(tries)}, view))
        last = tries[-1]
        view.finish(last, _verdict(tries, time.perf_counter() - began - view.waited_s))
    if args.json:
        print(json.dumps(_to_json(puzzle, tries, time.perf_counter() - began)))
    if not last.is_right:
        print(
            f"dgemma solve: none of {len(tries)} tries keeps the rules and the clues; of the last, "
            f"{last.num_sure} of {81 - puzzle.num_clues} empty cells were sure",
            file=sys.stderr,
        )
        return 1
    return 0


def _puzzle(args: argparse.Namespace) -> Grid:
    if args.puzzle is None and sys.stdin.isatty():
        # Another one each time; the seed is of the answer.
        with Notice("drawing a puzzle ..."):
            return random.choice(held_out(args.band)).clues  # noqa: S311
    return Grid.read(_text(args.puzzle))


def _ask(lm: LanguageModel, puzzle: Grid, options: dict[str, Any], view: LiveBoard | PlainBoard) -> Try:
    sure: tuple[bool, ...] = (False,) * 81
    for event in lm.stream(to_text(puzzle), drafts=True, max_tokens=ANSWER_LEN, **options):
        if isinstance(event, Draft):
            sure = tuple(value <= SURE_NATS for value in _entropies(event))
            view.show(event)
        elif isinstance(event, Finish):
            answer = event.answer
    cells = answered_cells(answer.text)
    is_sure = tuple(one and clue == EMPTY for one, clue in zip(sure, puzzle.cells, strict=True))
    return Try(cells, options["seed"], sum(answer.steps), solves(cells, puzzle), is_sure)


def _entropies(draft: Draft) -> list[float]:
    """Of each cell, in nats."""
    return [draft.entropy[at] if at < len(draft.entropy) else 9.0 for at in CELL_PLACES]


def _text(given: str | None) -> str:
    if given is None or given == "-":
        keep_undecodable_input()
        return sys.stdin.read(1 << 16)
    # A puzzle may be longer than a file's name can be.
    if len(given) < 81 or given.endswith((".txt", ".sdk", ".sudoku")):
        if not Path(given).is_file():
            raise InputError(f"{given!r} is neither 81 cells nor a file.")
        return Path(given).read_text(errors="replace")[: 1 << 16]
    return given


def _verdict(tries: list[Try], seconds: float) -> str:
    steps = ", ".join(str(one.steps) for one in tries)
    verdict = "solved" if tries[-1].is_right else "not solved"
    return f"{verdict} in {seconds:.2f} s, {steps} steps" + (
        f", {len(tries)} tries" if len(tries) > 1 else ""
    )


def _to_json(puzzle: Grid, tries: list[Try], seconds: float) -> dict[str, Any]:
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


def open_board_view(puzzle: Grid, *, quiet: bool, pace_s: float) -> LiveBoard | PlainBoard:
    """The view that stdout can show; none at all if `quiet`."""
    if quiet or not sys.stdout.isatty():
        return PlainBoard(quiet=quiet)
    return LiveBoard(puzzle, pace_s)


class PlainBoard:
    """The answer as one line of 81 cells."""

    waited_s = 0.0

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, draft: Draft) -> None:
        """Nothing of a draft is final."""

    def finish(self, last: Try, verdict: str) -> None:
        if not self._quiet:
            print(last.cells)


class LiveBoard:
    """The board, redrawn at every step: clues bold, guesses by how sure they are."""

    def __init__(self, puzzle: Grid, pace_s: float) -> None:
        from rich.console import Console
        from rich.live import Live

        self._puzzle = puzzle
        self._pace_s = pace_s
        self._drawn_at = 0.0
        self.waited_s = 0.0  # for the person who watches
        self._opened = ExitStack()
        # Every step is worth seeing, however fast they come.
        self._screen = Live(console=Console(), auto_refresh=False, vertical_overflow="visible")

    def __enter__(self) -> Self:
        self._opened.enter_context(self._screen)
        self._draw(self._puzzle.cells, [""] * 81, f"{self._puzzle.num_clues} clues, loading the model ...")
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def show(self, draft: Draft) -> None:
        entropy = _entropies(draft)
        styles = [next((style for most, style in _STYLES if value <= most), "dim") for value in entropy]
        settled = sum(value <= SURE_NATS for value in entropy)
        self._wait()
        self._draw(answered_cells(draft.text), styles, f"step {draft.step}, {settled} of 81 cells settled")

    def finish(self, last: Try, verdict: str) -> None:
        self._wait()
        if last.is_right:
            self._draw(last.cells, [""] * 81, verdict)
        else:
            styles = ["" if sure else "dim" for sure in last.is_sure]
            self._draw(last.cells, styles, f"{verdict}; red breaks the rules, dim was not sure")

    def _wait(self) -> None:
        rest_s = self._drawn_at + self._pace_s - time.monotonic()
        if rest_s > 0:
            self.waited_s += rest_s
            time.sleep(rest_s)

    def _draw(self, cells: str, styles: list[str], below: str) -> None:
        self._screen.update(board(self._puzzle, cells, styles, below), refresh=True)
        self._drawn_at = time.monotonic()


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
