"""What constraining does to quality: tasks with a right answer, free, within a language, and by projection.

    python -m benchmarks.constraint_quality [--puzzles N] [--passages N]

- free: no constraint. An answer of the wrong format is a wrong answer.
- within: draws, guesses and entropies are those of the model, conditioned on the language.
- projected: the most probable string of the language replaces each step's sample and guess, while
  entropies and the soft embedding stay those of the free distribution: what a constraint is without sums.

Sudoku on the bundled model: the format with the clues in it, as a regular expression; besides, that each row
holds every digit once (a DFA of 4,608 states, too long for a regular expression). Text on the
bundled model: which of four words goes on a held-out passage (needs `python -m recipes.english.make_corpus`).
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import dgemma.engine.model_runner as sampling_step
from benchmarks import record
from benchmarks.held_out_text import passages
from dgemma import LanguageModel, load
from dgemma.engine.request import EngineRequest
from dgemma.events import Answer
from dgemma.sampling.vocab_scan import VocabScan
from dgemma.structured_output.budget import TimeBudget
from dgemma.structured_output.compiler import GrammarCompiler
from dgemma.structured_output.constraint import Constraint
from dgemma.structured_output.dfa import DFA
from dgemma.structured_output.response_format import ChoiceFormat, RegexFormat
from dgemma.structured_output.token_dfa import TokenTrie, build_token_dfa
from dgemma.sudoku.grid import DIGITS, EMPTY, Grid
from dgemma.sudoku.puzzles import BANDS, held_out
from dgemma.sudoku.tokens import ANSWER_LEN, EOS, ROW_LETTERS, answered_cells, solves, to_text

constrained_scan = sampling_step.scan_constrained_rows


def projected(
    stack: Any, hidden: Any, temperature: Any, place: Any, params: Any, bias: Any, pins: Any, strings: Any
) -> VocabScan:
    """Replaces `scan_constrained_rows`."""
    free = sampling_step.scan_rows(stack, hidden, temperature, place, params, bias)
    best = constrained_scan(stack, hidden, temperature, None, params, bias, pins, strings).guess
    return replace(free, guess=best, drawn=best)


def answers_of(lm: LanguageModel, requests: list[EngineRequest], way: str) -> list[Answer]:
    sampling_step.scan_constrained_rows = projected if way == "projected" else constrained_scan
    try:
        return [answer for at in range(0, len(requests), 16) for answer in lm._ask(requests[at : at + 16])]
    finally:
        sampling_step.scan_constrained_rows = constrained_scan


def form_of(puzzle: Grid) -> RegexFormat:
    return RegexFormat(to_text(puzzle).replace(EMPTY, "[1-9]"))


def rows_machine(puzzle: Grid) -> DFA:
    """Row letters, clues, and every digit once in each row: a state for each row and set of digits in it."""
    symbols = {char: number for number, char in enumerate(DIGITS + ROW_LETTERS)}
    symbol_of_byte = np.full(256, -1, np.int32)
    for char, number in symbols.items():
        symbol_of_byte[ord(char)] = number
    end = len(symbols)
    states: dict[tuple[int, int, int], int] = {(0, -1, 0): 0}  # row, cells written (-1: no letter), digits
    edges: list[tuple[int, int, int]] = []
    queue = list(states)

    def reach(source: int, symbol: int, state: tuple[int, int, int]) -> None:
        if state not in states:
            states[state] = len(states)
            queue.append(state)
        edges.append((source, symbol, states[state]))

    for row, written, used in queue:
        source = states[row, written, used]
        if row == 9:
            edges.append((source, end, source))
        elif written < 0:
            reach(source, symbols[ROW_LETTERS[row]], (row, 0, 0))
        else:
            clue = puzzle.cells[9 * row + written]
            for digit in DIGITS if clue == EMPTY else clue:
                bit = 1 << int(digit)
                if not used & bit:
                    last = written == 8
                    reach(
                        source, symbols[digit], (row + 1, -1, 0) if last else (row, written + 1, used | bit)
                    )
    transitions = np.full((len(states), end + 1), -1, np.int32)
    for source, symbol, to in edges:
        transitions[source, symbol] = to
    accepts = np.zeros(len(states), np.bool_)
    accepts[states[9, -1, 0]] = True
    return DFA(transitions, accepts, symbol_of_byte, {EOS: end})


def sudoku(count: int) -> dict[str, Any]:
    lm = load("bundled:sudoku", dtype="float32")
    bench = lm._task_context(max_tokens=ANSWER_LEN)
    compiler = GrammarCompiler(lm.tokenizer, lm.config.vocab_size, (EOS,))
    trie = TokenTrie.of_tokenizer(lm.tokenizer, lm.config.vocab_size)

    def rows(puzzle: Grid) -> Constraint:
        return Constraint(
            token_dfa=build_token_dfa(rows_machine(puzzle), trie, TimeBudget(10.0)), end_tokens=(EOS,)
        )

    constraints: dict[str, Callable[[Grid], Constraint | None]] = {
        "none": lambda puzzle: None,
        "form": lambda puzzle: compiler.compile(form_of(puzzle)),
        "rows": rows,
    }
    found: dict[str, Any] = {}
    for kind, way in (("none", "free"), *((k, w) for k in ("form", "rows") for w in ("within", "projected"))):
        for band in BANDS:
            puzzles = [puzzle.clues for puzzle in held_out(band)[:count]]
            requests = [
                bench.answer(
                    bench.opening(lm.tokenizer.encode(to_text(puzzle)), reserve=0),
                    max_tokens=ANSWER_LEN,
                    constraint=constraints[kind](puzzle),
                    seed=number,
                )
                for number, puzzle in enumerate(puzzles)
            ]
            answers = answers_of(lm, requests, way)
            solved = [solves(answered_cells(a.text), p) for a, p in zip(answers, puzzles, strict=True)]
            row = {
                "solved": round(statistics.fmean(solved), 3),
                "steps_per_canvas": round(statistics.fmean(a.forwards / len(a.steps) for a in answers), 2),
            }
            found.setdefault(f"{kind}, {way}", {})[band] = row
            print("sudoku", kind, way, band, row, flush=True)
    return {"puzzles_per_band": count, "ways": found}


def text(count: int) -> dict[str, Any]:
    lm = load("bundled:text", dtype="float32")
    bench = lm._task_context(max_tokens=16)
    compiler = GrammarCompiler(lm.tokenizer, lm.config.vocab_size, bench.params.end_tokens)
    rng = random.Random(5)
    found = []
    for passage in passages(lm.tokenizer, [12] * (8 * count), before=60, after=1, seed=11):
        word = next(iter(lm.tokenizer.decode(passage.inside).split(" ")[1:2]), "")
        if len(word) > 3 and word.isalpha():
            found.append((passage.before, f" {word}", lm.tokenizer.decode(passage.inside)))
    # A passage goes on with the words up to its own word, and then that one.
    cases = []
    words = sorted({word for _, word, _ in found})
    for before, word, inside in found[:count]:
        others = rng.sample([other for other in words if other != word], 3)
        head = lm.tokenizer.encode(lm.tokenizer.decode(before) + inside.split(" ")[0])
        cases.append((bench.opening(head, reserve=0), word, tuple(rng.sample([word, *others], 4))))
    ways: dict[str, Any] = {}
    for way in ("free", "within", "projected"):
        requests = [
            bench.answer(
                prompt,
                max_tokens=16,
                constraint=None if way == "free" else compiler.compile(ChoiceFormat(options)),
                seed=number,
            )
            for number, (prompt, _, options) in enumerate(cases)
        ]
        answers = answers_of(lm, requests, way)
        right = [a.text.startswith(word) for a, (_, word, _) in zip(answers, cases, strict=True)]
        formed = [a.text in options for a, (_, _, options) in zip(answers, cases, strict=True)]
        ways[way] = {
            "right": round(statistics.fmean(right), 3),
            "of_the_form": round(statistics.fmean(formed), 3),
            "steps_per_canvas": round(statistics.fmean(a.forwards / len(a.steps) for a in answers), 2),
        }
        print("text", way, ways[way], flush=True)
    return {"passages": len(cases), "options": 4, "ways": ways}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--puzzles", type=int, default=60, help="of each band")
    parser.add_argument("--passages", type=int, default=120)
    args = parser.parse_args()
    record.write("constraint_quality", {"text": text(args.passages), "sudoku": sudoku(args.puzzles)})


if __name__ == "__main__":
    main()
