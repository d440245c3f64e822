"""Answer questions about a text: how likely each of the answers you allow is.

INPUT is a text, @FILE or - for stdin. --ask alone is a question of yes or no; --choices or --levels after it
name its answers. All questions are answered together. Without MODEL the bundled text model is used.

Calibrated probabilities match observed frequencies: --fit fits one on --examples, lines of
{"input": ..., "question": index or name (default: 0), "label": the right answer}. Every second example is
held out and measures the calibration. --calibration applies it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgemma.cli.options import (
    MODEL,
    add_model_arguments,
    add_positionals,
    check_output_file,
    check_text,
    given_positionals,
    load_model,
    looks_like_a_model,
    recording,
)
from dgemma.cli.questions import LabelledExample, add_question_arguments, read_examples, read_questions
from dgemma.cli.text_file import STDIN, read_text_file
from dgemma.cli.views.progress import count_progress
from dgemma.cli.views.tables import Table, show
from dgemma.cli.views.terminal import printable
from dgemma.errors import InputError
from dgemma.params import MAX_STEPS, GenerationParams

if TYPE_CHECKING:
    from dgemma import LanguageModel
    from dgemma.tasks.calibration import Calibration, Labelled
    from dgemma.tasks.decide import Decision, Question


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
    add_positionals(
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
    add_model_arguments(parser, seed=0)  # a fixed seed: the same question gets the same answer


def run(args: argparse.Namespace) -> int:
    positionals = given_positionals(args)
    if (args.fit is None) != (args.examples is None):
        args.parser.error("--fit and --examples go together")
    if args.fit is not None:
        if args.calibration is not None:
            args.parser.error("--fit makes a calibration; --calibration uses one. Give one of them")
        if len(positionals) > 1:
            args.parser.error("with --fit there is no INPUT; the examples have their own")
        args.model = positionals[0] if positionals else MODEL
        return fit_calibration(args, read_questions(args), _options(args))
    if not positionals or (len(positionals) == 1 and looks_like_a_model(positionals[0])):
        args.parser.error("no INPUT; give INPUT, or MODEL and INPUT")
    args.model, given = [MODEL, *positionals][-2:]
    return _decide(args, given)


def _decide(args: argparse.Namespace, given: str) -> int:
    from dgemma.tasks.calibration import Calibration

    options = _options(args)
    questions = read_questions(args)
    calibration = None if args.calibration is None else Calibration.load(args.calibration)
    text = _input(given)
    lm = load_model(args)
    began = time.perf_counter()
    with recording(lm, args.trace, "decide"):
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


_FIGURES = ("accuracy", "error_before", "error_after")


def fit_calibration(args: argparse.Namespace, questions: Sequence[Question], options: dict[str, Any]) -> int:
    """`dgemma decide --fit`: fit a temperature on every second example, write it, and report both halves."""
    from dgemma.tasks.calibration import fit

    examples = read_examples(args.examples, questions)
    _check_out(args.fit)
    lm = load_model(args)
    with recording(lm, args.trace, "decide"):
        labelled = _judged(lm, examples, questions, options)
    fitted, held_out = labelled[::2], labelled[1::2]
    calibration = fit(fitted)
    calibration.save(args.fit)
    halves = {"fitted": _figures(fitted, calibration), "held_out": _figures(held_out, calibration)}
    if args.json:
        print(json.dumps({"file": args.fit, "temperature": calibration.temperature, **halves}))
        return 0
    rows = [
        [name.replace("_", " "), str(half["examples"]), *(f"{half[figure]:.3f}" for figure in _FIGURES)]
        for name, half in halves.items()
    ]
    header = ("examples", "n", *(figure.replace("_", " ") for figure in _FIGURES))
    facts = [["temperature", f"{calibration.temperature:.3f}"], ["written", args.fit]]
    show([Table(header=header, rows=rows), Table(header=(), rows=facts, num_text_columns=2)])
    return 0


def _judged(
    lm: LanguageModel,
    examples: Sequence[LabelledExample],
    questions: Sequence[Question],
    options: dict[str, Any],
) -> list[Labelled]:
    """The model's probabilities of each example, with all questions in one canvas as `decide` has them."""
    known: dict[str, list[tuple[float, ...]]] = {}
    labelled: list[Labelled] = []
    with count_progress("decide", len(examples), "examples") as advance:
        for example in examples:
            if example.input not in known:
                decisions = lm.decide(example.input, questions, **options)
                known[example.input] = [decision.probabilities for decision in decisions]
            labelled.append((known[example.input][example.question], example.right))
            advance(())
    return labelled


def _figures(labelled: Sequence[Labelled], calibration: Calibration) -> dict[str, Any]:
    from dgemma.tasks.calibration import expected_calibration_error

    after = [(calibration.apply(probabilities), right) for probabilities, right in labelled]
    hits = sum(probabilities.index(max(probabilities)) == right for probabilities, right in labelled)
    return {
        "examples": len(labelled),
        "accuracy": hits / len(labelled),
        "error_before": expected_calibration_error(labelled),
        "error_after": expected_calibration_error(after),
    }


def _check_out(out: str) -> None:
    """Refuse a path that cannot be written, or that holds another kind of file, before long work."""
    from dgemma.tasks.calibration import Calibration

    check_output_file(out, "--fit")
    if Path(out).exists():
        try:
            Calibration.load(out)
        except InputError:
            raise InputError(f"{out} exists and is not a calibration; choose another name.") from None


_HEADER = ("question", "answer", "", "probability")
_BAR_CELLS = 20


def show_decisions(decisions: Sequence[Decision]) -> None:
    """A row for each choice of each question, the most probable one marked; for levels also their mean."""
    if sys.stdout.isatty():
        _draw(decisions)
        return
    rows = [row[:4] for decision in decisions for row in _rows(decision)]
    show([Table(header=_HEADER, rows=rows, num_text_columns=3)])


def _rows(decision: Decision) -> Iterator[tuple[str, str, str, str, float | None]]:
    """Question, answer, mark, figure, and how long a bar it has."""
    question = decision.question
    title = " ".join((question.name or question.instructions).split())
    for number, (choice, probability) in enumerate(
        zip(question.choices, decision.probabilities, strict=True)
    ):
        mark = "*" if number == decision.index else ""
        yield title, " ".join(choice.label.split()), mark, f"{probability:.3f}", probability
    if question.kind == "score":
        yield title, f"score, 0 to {len(question.choices) - 1}", "", f"{decision.score:.3f}", None


def _draw(decisions: Sequence[Decision]) -> None:
    """Each question stands once, and its bars are whole in a narrow window too."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console()
    drawn = RichTable(box=box.SIMPLE_HEAD)
    drawn.add_column("question")
    drawn.add_column("answer")
    drawn.add_column("")
    drawn.add_column("", no_wrap=True, min_width=_BAR_CELLS)
    drawn.add_column("probability", justify="right", no_wrap=True, min_width=len("probability"))
    for decision in decisions:
        for number, (title, answer, mark, figure, probability) in enumerate(_rows(decision)):
            bar = "" if probability is None else _bar(probability, console.encoding)
            cells = ("" if number else title, answer, mark, bar, figure)
            drawn.add_row(*(Text(printable(cell, console.encoding)) for cell in cells))
    console.print(drawn)


def _bar(probability: float, encoding: str) -> str:
    full, empty = "█", "░"
    try:
        (full + empty).encode(encoding)
    except UnicodeError:
        full, empty = "#", "."
    cells = round(probability * _BAR_CELLS)
    return full * cells + empty * (_BAR_CELLS - cells)
