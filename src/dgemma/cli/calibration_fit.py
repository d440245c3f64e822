"""A calibration fitted on every second example, and what it is worth on the others."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgemma.cli.examples import Example, read_examples
from dgemma.cli.generation_options import load_model
from dgemma.cli.progress import count_progress
from dgemma.cli.report_view import Table, show
from dgemma.errors import InputError

if TYPE_CHECKING:
    from dgemma import LanguageModel
    from dgemma.canvas.calibration import Calibration, Labelled
    from dgemma.canvas.decide import Question

_FIGURES = ("accuracy", "error_before", "error_after")


def fit_calibration(args: argparse.Namespace, questions: Sequence[Question], options: dict[str, Any]) -> int:
    """`dgemma decide --fit`: fit, write, tell."""
    from dgemma.canvas.calibration import fit

    examples = read_examples(args.examples, questions)
    _check_out(args.fit)
    labelled = _judged(load_model(args), examples, questions, options)
    fitted, held_out = labelled[::2], labelled[1::2]
    calibration = fit(fitted)
    try:
        calibration.save(args.fit)
    except OSError as error:
        raise InputError(f"{args.fit} cannot be written: {error.strerror}.") from None
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
    show([Table(header=header, rows=rows), Table(header=(), rows=facts, words=2)])
    return 0


def _judged(
    lm: LanguageModel, examples: Sequence[Example], questions: Sequence[Question], options: dict[str, Any]
) -> list[Labelled]:
    """What the model thinks of each example. All questions are asked, as they will be."""
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
    from dgemma.canvas.calibration import expected_calibration_error

    after = [(calibration.apply(probabilities), right) for probabilities, right in labelled]
    hits = sum(probabilities.index(max(probabilities)) == right for probabilities, right in labelled)
    return {
        "examples": len(labelled),
        "accuracy": hits / len(labelled),
        "error_before": expected_calibration_error(labelled),
        "error_after": expected_calibration_error(after),
    }


def _check_out(out: str) -> None:
    """Refuse now what could not be written after long work, or is somebody's."""
    from dgemma.canvas.calibration import Calibration

    path = Path(out)
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise InputError(f"{out} cannot be written; give the name of a file in a directory you may write.")
    if path.exists():
        try:
            Calibration.load(path)
        except InputError:
            raise InputError(f"{out} exists and is not a calibration; choose another name.") from None
