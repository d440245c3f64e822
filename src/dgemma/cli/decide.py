"""Answer questions about a text: how likely each of the answers you allow is.

INPUT is a text, @FILE or - for stdin. --ask alone is a question of yes or no; --choices or --levels behind it
name its answers. All questions are answered together. Without MODEL the bundled text model is used.

Probabilities mean what they say after a calibration: --fit fits one on --examples, lines of
{"input": ..., "question": index or name (default: 0), "label": the right answer}. Every second example is
held out, and tells what the calibration is worth. --calibration uses it."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from dgemma.cli.calibration_fit import fit_calibration
from dgemma.cli.canvas_options import MODEL, add_model_arguments, add_words, given_words, looks_like_a_model
from dgemma.cli.decision_view import show_decisions
from dgemma.cli.generation_options import check_text, load_model
from dgemma.cli.questions import add_question_arguments, read_questions
from dgemma.cli.text_file import STDIN, read_text_file
from dgemma.errors import InputError
from dgemma.params import MAX_STEPS, GenerationParams

HELP = "answer questions about a text, with probabilities"
EXAMPLES = (
    "examples:\n"
    '  dgemma decide "Win a prize now!" --ask "Is it spam?"\n'
    '  dgemma decide @mail.txt --ask "Which language?" --choices en,de --ask "Urgent?" --levels low,high\n'
    "  dgemma decide MODEL - --questions triage.json --calibration mail.calibration --json < mail.txt\n"
    '  dgemma decide MODEL --ask "Is it spam?" --fit mail.calibration --examples labelled.jsonl\n'
    "\n"
    "triage.json:\n"
    '  [{"type": "predicate", "name": "spam", "instructions": "Is it spam?"},\n'
    '   {"type": "choice", "instructions": "Who answers?",\n'
    '    "choices": [{"value": "sales", "description": "prices, offers"}, {"value": "support"}]},\n'
    '   {"type": "score", "instructions": "How urgent?", "levels": [{"label": "low"}, {"label": "high"}]}]'
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_words(
        parser,
        ("INPUT", "MODEL INPUT", "[MODEL] --fit OUT --examples FILE"),
        (
            ("MODEL", f"a checkpoint directory, or a hub name (default: {MODEL})"),
            ("INPUT", "a text, @FILE, or - for stdin"),
        ),
    )
    add_question_arguments(parser)
    sure = parser.add_argument_group("calibration")
    sure.add_argument("--calibration", metavar="FILE", help="one that --fit has written")
    sure.add_argument("--fit", metavar="OUT", help="fit one on --examples, and write it")
    sure.add_argument("--examples", metavar="FILE.jsonl", help="labelled examples for --fit")
    parser.add_argument(
        "--steps", type=int, default=1, metavar="N", help="denoise steps, at most (default: 1)"
    )
    parser.add_argument(
        "--draws", type=int, default=4, metavar="N", help="canvases of noise that are averaged (default: 4)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for a program")
    add_model_arguments(parser, seed=0)  # who asks again gets the same answer


def run(args: argparse.Namespace) -> int:
    words = given_words(args)
    if (args.fit is None) != (args.examples is None):
        args.parser.error("--fit and --examples go together")
    if args.fit is not None:
        if args.calibration is not None:
            args.parser.error("--fit makes a calibration; --calibration uses one. Give one of them")
        if len(words) > 1:
            args.parser.error("with --fit there is no INPUT; the examples have their own")
        args.model = words[0] if words else MODEL
        return fit_calibration(args, read_questions(args), _options(args))
    if not words or (len(words) == 1 and looks_like_a_model(words[0])):
        args.parser.error("no INPUT; give INPUT, or MODEL and INPUT")
    args.model, given = [MODEL, *words][-2:]
    return _decide(args, given)


def _decide(args: argparse.Namespace, given: str) -> int:
    from dgemma.canvas.calibration import Calibration

    options = _options(args)
    questions = read_questions(args)
    calibration = None if args.calibration is None else Calibration.load(args.calibration)
    text = _input(given)
    lm = load_model(args)
    began = time.perf_counter()
    decisions = lm.decide(text, questions, calibration=calibration, **options)
    seconds = time.perf_counter() - began
    if args.json:
        found = {
            "answers": [decision.to_json() for decision in decisions],
            "calibration": None if calibration is None else calibration.temperature,
            "seconds": round(seconds, 3),
            "seed": args.seed,
        }
        print(json.dumps(found))
    else:
        show_decisions(decisions)
    return 0


def _options(args: argparse.Namespace) -> dict[str, Any]:
    if not 1 <= args.steps <= MAX_STEPS:
        raise InputError(f"--steps is {args.steps}; it must be from 1 to {MAX_STEPS}.")
    GenerationParams.make(seed=args.seed)
    return {"steps": args.steps, "draws": args.draws, "seed": args.seed}


def _input(given: str) -> str:
    if given == STDIN or given.startswith("@"):
        text = read_text_file(STDIN if given == STDIN else given[1:]).text.removesuffix("\n")
    else:
        text = check_text(given)
        if _is_file(text):
            raise InputError(
                f"INPUT {text!r} is a file; @{text} reads it. A text of that spelling may come from stdin."
            )
    if not text.strip():
        raise InputError(f"the input is {text!r}; it must hold some text.")
    return text


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # a text that no file could be called
        return False
