"""Decisions on labelled data: accuracy, and calibration before and after a temperature was fitted.

    python -m benchmarks.decide [--puzzles N] [--scenes N]

sudoku: `bundled:sudoku` is asked for the digit of every empty cell of held-out puzzles at once, the clues
pinned, after a few steps; each cell is a choice among nine. text: `bundled:text` reads a new scene and a
question about it, and chooses among four words of a kind, one of which is right; in the answer's place, as
in training, and asked by `lm.decide`. The temperature is fitted on every second puzzle or scene, and all
figures are of the others. Expected calibration error in 15 bins.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from benchmarks import record
from benchmarks.held_out_text import CORPUS, texts
from dgemma import Choice, LanguageModel, Question, load
from dgemma.sudoku.puzzles import held_out
from dgemma.sudoku.tokens import BOS, PROMPT_LEN, VOCABULARY, pins, to_text
from dgemma.tasks.calibration import Calibration, Labelled, expected_calibration_error, fit
from dgemma.tasks.rounds import drive
from dgemma.tasks.slots import Part, Slot, read_slots
from recipes.english.scenes import WORDS, make_scene

WAYS = ((1, 1), (1, 4), (2, 1), (4, 1), (8, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--puzzles", type=int, default=100, help="hard ones (default: 100; 0: only scenes)")
    parser.add_argument("--scenes", type=int, default=300, help="(default: 300)")
    args = parser.parse_args()
    known = set(texts(CORPUS.with_name("train.jsonl")))  # what is lacking is named before the long part
    lm = load("bundled:sudoku", dtype="float32")
    sudoku = {
        f"{steps} steps, {draws} draws": measured(cells(lm, args.puzzles, steps, draws))
        for steps, draws in WAYS
        if args.puzzles
    }
    print(sudoku, flush=True)
    lm = load("bundled:text", dtype="float32")
    questions = list(islice(questions_about(known), args.scenes))
    text = {"in_the_answer": measured(answered(lm, questions)), "decided": measured(decided(lm, questions))}
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


@dataclass(frozen=True)
class Asked:
    """A question about a scene. choices: four words of a kind; the answer goes around the right one."""

    scene: str
    question: str
    before: str
    after: str
    choices: tuple[str, ...]
    right: int


def questions_about(known: set[str]) -> Iterator[Asked]:
    """One about each new scene of a topic in training, where a word of a kind is the answer."""
    draw = random.Random(3)
    for number in count():
        scene = make_scene(number, seed=2)
        if scene.split != "train" or scene.text in known:
            continue
        for question, answer in scene.chats:
            if found := one_of_a_kind(answer):
                before, word, after = found
                kind = next(kind for kind in WORDS.values() if word in kind)
                others = draw.sample([other for other in kind if other not in scene.text], 3)
                choices = draw.sample([word, *others], 4)
                yield Asked(scene.text, question, before, after, tuple(choices), choices.index(word))
                break


def one_of_a_kind(answer: str) -> tuple[str, str, str] | None:
    """The answer up to the last word that belongs to a kind of the scenes, that word, and the rest."""
    for kind in WORDS.values():
        for word in kind:
            if found := re.fullmatch(rf"(.+) ({re.escape(word)})(\W.*)", answer):
                return found[1], found[2], found[3]
    return None


def answered(lm: LanguageModel, questions: Sequence[Asked]) -> list[list[Labelled]]:
    """The word in the answer, as in training."""
    assert lm.chat_template is not None
    found: list[list[Labelled]] = []
    for number, one in enumerate(questions):
        content = f"{one.scene} {one.question}"
        prompt = tuple(lm.chat_template.render([{"role": "user", "content": content}]))
        words = Slot(tuple(tuple(lm.tokenizer.encode(f" {choice}")) for choice in one.choices))
        parts: list[Part] = [
            tuple(lm.tokenizer.encode(one.before)),
            words,
            tuple(lm.tokenizer.encode(one.after)),
        ]
        read = drive(read_slots(lm._task_context(seed=number), prompt, parts, steps=1, draws=4), lm._ask)
        found.append([(read.probabilities[0], one.right)])
    return found


def decided(lm: LanguageModel, questions: Sequence[Asked]) -> list[list[Labelled]]:
    """The same by `lm.decide`."""
    found: list[list[Labelled]] = []
    for number, one in enumerate(questions):
        question = Question(
            kind="choice",
            instructions=one.question,
            choices=tuple(Choice(value=word) for word in one.choices),
        )
        (decision,) = lm.decide(one.scene, [question], seed=number)
        found.append([(decision.probabilities, one.right)])
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
