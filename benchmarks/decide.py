"""Decisions on labelled data: accuracy, and calibration before and after a temperature was fitted.

    python -m benchmarks.decide [--puzzles N] [--passages N]

sudoku: `bundled:sudoku` is asked for the digit of every empty cell of held-out puzzles at once, the clues
pinned, after a few steps; each cell is a choice among nine. text: `bundled:text` reads 400 characters of
held-out documentation and chooses what it documents: CMake, the Linux kernel, or Python. The temperature is
fitted on every second puzzle or passage, and all figures are of the others. Expected calibration error in 15
bins.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any

from benchmarks import record
from benchmarks.held_out_text import SOURCES, documents
from dgemma import LanguageModel, load
from dgemma.sudoku.puzzles import held_out
from dgemma.sudoku.tokens import BOS, PROMPT_LEN, VOCABULARY, pins, to_text
from dgemma.tasks.calibration import Calibration, Labelled, expected_calibration_error, fit
from dgemma.tasks.rounds import drive
from dgemma.tasks.slots import Part, Slot, read_slots

WAYS = ((1, 1), (1, 4), (2, 1), (4, 1), (8, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--puzzles", type=int, default=100, help="hard ones (default: 100)")
    parser.add_argument("--passages", type=int, default=150, help="in all (default: 150)")
    args = parser.parse_args()
    documents(sources=SOURCES)  # what is lacking is named before the long part
    lm = load("bundled:sudoku", dtype="float32")
    sudoku = {
        f"{steps} steps, {draws} draws": measured(cells(lm, args.puzzles, steps, draws))
        for steps, draws in WAYS
    }
    print(sudoku, flush=True)
    lm = load("bundled:text", dtype="float32")
    text = {
        "documentation_of": measured(sources(lm, args.passages, "\n\nThis is the documentation of")),
        "asked_as_a_question": measured(asked(lm, args.passages)),
    }
    record.write("decide", {"sudoku_hard": sudoku, "text": text})


def cells(lm: LanguageModel, count: int, steps: int, draws: int) -> list[list[Labelled]]:
    """Of each puzzle, the probabilities of each empty cell's digits, and the right one."""
    digits = tuple(range(1, 10))
    found: list[list[Labelled]] = []
    for number, puzzle in enumerate(held_out("hard")[:count]):
        prompt = (BOS, *(VOCABULARY.index(c) for c in to_text(puzzle.clues)))
        assert len(prompt) == PROMPT_LEN
        parts: list[Part] = []
        for _, pin in sorted(pins(puzzle.clues).items()):
            parts.append((pin,) if isinstance(pin, int) else Slot(tuple((word,) for word in pin)))
        read = drive(
            read_slots(lm._task_context(seed=number), prompt, parts, steps=steps, draws=draws), lm._ask
        )
        empty = [cell for cell, clue in enumerate(puzzle.clues.cells) if clue == "."]
        right = [int(puzzle.solution.cells[cell]) for cell in empty]
        found.append([(p, digits.index(r)) for p, r in zip(read.probabilities, right, strict=True)])
    return found


def drawn_passages(count: int) -> list[tuple[str, str]]:
    """(source, text), as many of each source."""
    rng = random.Random(3)
    texts = documents(sources=SOURCES)
    found = []
    for number in range(count):
        source = sorted(SOURCES)[number % len(SOURCES)]
        text = rng.choice([own for own in texts[source] if len(own) > 1000])
        at = rng.randrange(len(text) - 400)
        found.append((source, text[at : at + 400]))
    return found


def sources(lm: LanguageModel, count: int, question: str) -> list[list[Labelled]]:
    """The name of what is documented, as the text would go on."""
    found: list[list[Labelled]] = []
    names = sorted(SOURCES)
    labels = tuple(tuple(lm.tokenizer.encode(f" {SOURCES[name]}")) for name in names)
    end = tuple(lm.tokenizer.encode(".\n"))
    for number, (source, text) in enumerate(drawn_passages(count)):
        bench = lm._task_context(seed=number)
        prompt = bench.opening(lm.tokenizer.encode(text + question), reserve=bench.canvas_len)
        read = drive(read_slots(bench, prompt, [Slot(labels), end], steps=1, draws=4), lm._ask)
        found.append([(read.probabilities[0], names.index(source))])
    return found


def asked(lm: LanguageModel, count: int) -> list[list[Labelled]]:
    """The same through the chat template, by `lm.decide`."""
    from dgemma import Choice, Question

    names = sorted(SOURCES)
    question = Question(
        kind="choice",
        instructions="What is this the documentation of?",
        choices=tuple(Choice(value=SOURCES[name]) for name in names),
    )
    found: list[list[Labelled]] = []
    for number, (source, text) in enumerate(drawn_passages(count)):
        (decision,) = lm.decide(text, [question], seed=number)
        found.append([(decision.probabilities, names.index(source))])
    return found


def measured(groups: Sequence[Sequence[Labelled]]) -> dict[str, Any]:
    """Fitted on every second group, told of the others."""
    learned = [example for group in groups[::2] for example in group]
    told = [example for group in groups[1::2] for example in group]
    calibration: Calibration = fit(learned)
    after = [(calibration.apply(p), right) for p, right in told]
    hits = [max(range(len(p)), key=lambda n: p[n]) == right for p, right in told]
    sums = [abs(sum(p) - 1) for p, _ in (*told, *after)]
    return {
        "examples": len(told),
        "accuracy": round(sum(hits) / len(hits), 4),
        "chance": round(1 / len(told[0][0]), 4),
        "temperature": round(calibration.temperature, 3),
        "calibration_error_before": round(expected_calibration_error(told), 4),
        "calibration_error_after": round(expected_calibration_error(after), 4),
        "largest_error_of_a_sum": max(sums),
    }


if __name__ == "__main__":
    main()
