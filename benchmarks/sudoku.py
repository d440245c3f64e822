"""The bundled Sudoku model on the held-out puzzles: every acceptance, every cap, and what it is up against.

    python -m benchmarks.sudoku                          (all 3,000 puzzles; --limit N per band for less)
    python -m benchmarks.sudoku --model runs/other/model --suffix=-other

Against: the same geometry before its first training step, and the same weights written left to right through
causal mode (greedy), as such and as the check of drafts (lossless, verified).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from dgemma.evaluation.report import EvaluationReport, scores_of
from dgemma.evaluation.runner import evaluate
from dgemma.evaluation.tasks.sudoku import SudokuTask
from dgemma.language_model import LanguageModel
from dgemma.loading import load
from dgemma.sudoku.puzzles import BANDS
from dgemma.sudoku.tokens import ANSWER_LEN
from recipes.sudoku.make_model import make_model

CAPS = (48, 24, 12, 6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="bundled:sudoku")
    parser.add_argument("--adapter", help="a LoRA adapter of the model")
    parser.add_argument("--limit", type=int, default=1000, help="puzzles per band (default: all 1,000)")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--only", nargs="*", help="ways to run, such as entropy_bound-48 (default: all)")
    parser.add_argument("--suffix", default="", help="of the result file's name")
    args = parser.parse_args()
    lm = load(args.model, adapter=args.adapter)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as made:
        make_model(Path(made) / "start")
        untrained = load(Path(made) / "start", dtype="float32")
        for name, (model, options) in ways(lm, untrained).items():
            if not args.only or name in args.only:
                found[name] = {band: measured(model, band, options, args) for band in BANDS}
    findings = {
        "model": args.model,
        "parameters": sum(p.numel() for p in lm.transformer.parameters()),
        "puzzles_per_band": args.limit,
        "ways": found,
    }
    record.write("sudoku", findings, args.suffix)


def ways(lm: LanguageModel, untrained: LanguageModel) -> dict[str, tuple[LanguageModel, dict[str, Any]]]:
    """Every setting by its name: the model, and its generation options."""
    found: dict[str, tuple[LanguageModel, dict[str, Any]]] = {}
    for acceptance in ("entropy_bound", "confidence", "fixed"):
        for cap in CAPS:
            options: dict[str, Any] = {"acceptance": acceptance, "max_denoising_steps": cap}
            if acceptance == "fixed":
                options["accept_per_step"] = -(-ANSWER_LEN // cap)
            found[f"{acceptance}-{cap}"] = (lm, options)
    found["causal"] = (lm, {"decode": "causal", "temperature": 0.0})
    for decode in ("lossless", "verified"):
        found[decode] = (lm, {"decode": decode, "temperature": 0.0})
    found["untrained"] = (untrained, {})
    return found


def measured(
    lm: LanguageModel, band: str, options: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    with torch.inference_mode():
        report = evaluate(lm, SudokuTask(band), limit=args.limit, batch=args.batch, options=options, seed=0)
    figures = told(report)
    print(band, options, figures, flush=True)
    return figures


def told(report: EvaluationReport) -> dict[str, Any]:
    scores = {name: round(found.mean, 4) for name, found in report.scores.items()}
    interval = report.scores["exact"].interval
    by_clues = {
        group: round(scores_of(results, ["exact"])["exact"].mean, 3)
        for group, results in report.groups.items()
        if group.endswith("clues")
    }
    return {
        **scores,
        "exact_interval": None if interval is None else [round(interval.low, 4), round(interval.high, 4)],
        "steps_mean": report.steps_mean,
        "steps_p90": report.steps_p90,
        "seconds_per_puzzle": report.seconds_per_example,
        "exact_by_clues": by_clues,
    }


if __name__ == "__main__":
    main()
