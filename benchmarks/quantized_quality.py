"""What few bits do to the bundled models: score, steps per canvas, perplexity, beside the plain weights.

    python -m benchmarks.quantized_quality                  (--limit N puzzles of each band)
    python -m benchmarks.quantized_quality --dtype float32  (where bf16 is imitated, and slow)

sudoku: held-out puzzles solved, by band, and steps per canvas. text: the perplexity of causal mode on
scenes, and steps per canvas over the same. Both:
the distance of one step's distributions, and how often the argmax agrees. Quantized models run as they do
for users here, activations rounded where the kernel runs; `plain activations` is int4 without that.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import record
from dgemma.checkpoint.bundled import bundled_path
from dgemma.checkpoint.quantized.quantization_config import NAMES, quantization_config_for
from dgemma.checkpoint.quantized.writer import from_checkpoint, write_quantized
from dgemma.checkpoint.source import open_checkpoint
from dgemma.evaluation.likelihood import TokenPair, log_likelihoods
from dgemma.evaluation.quantized_report import compare, prompts_for
from dgemma.evaluation.runner import Evaluation
from dgemma.evaluation.task import EvaluationPlan
from dgemma.evaluation.tasks.sudoku import SudokuTask
from dgemma.language_model import LanguageModel
from dgemma.loading import load
from dgemma.sudoku.puzzles import BANDS
from recipes.english.scenes import make_scene


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=24, help="whose canvases are compared")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of activations")
    parser.add_argument("--only", choices=("sudoku", "text"), help="one of the models")
    args = parser.parse_args()
    findings: dict[str, Any] = {"limit": args.limit, "prompts": args.prompts, "dtype": args.dtype}
    with tempfile.TemporaryDirectory() as made:
        for which, measure in (("sudoku", sudoku), ("text", text)):
            if args.only not in (None, which):
                continue
            findings[which] = {}
            models = make_models(Path(made), which, args.dtype)
            for name, lm in models.items():
                findings[which][name] = measure(models["plain"], lm, args.limit, args.prompts)
                print(which, name, findings[which][name], flush=True)
    record.write("quantized_quality", findings, f"-{args.only}" if args.only else "")


def make_models(directory: Path, which: str, dtype: str) -> dict[str, LanguageModel]:
    models = {"plain": load(f"bundled:{which}", dtype=dtype)}
    source = open_checkpoint(bundled_path(which))
    for name in NAMES:
        out = directory / f"{which}-{name}"
        write_quantized(out, from_checkpoint(source), quantization_config_for(name, source.config))
        models[name] = load(out, dtype=dtype)
    models["int4, plain activations"] = load(
        directory / f"{which}-int4", dtype=dtype, round_activations=False
    )
    return models


def distance(plain: LanguageModel, lm: LanguageModel, prompts: list[tuple[int, ...]]) -> dict[str, Any]:
    report = compare(plain, lm, prompts)
    return {
        "megabytes": round(lm.nbytes / 1e6, 1),
        "kl_nats": float(f"{report.kl_nats:.3g}"),
        "argmax_agreement": round(report.argmax_agreement, 4),
        "steps_per_canvas": round(report.steps_per_canvas[1], 2),
    }


def sudoku(plain: LanguageModel, lm: LanguageModel, limit: int, prompts: int) -> dict[str, Any]:
    found = distance(plain, lm, prompts_for(plain, SudokuTask("medium"), prompts))
    for band in BANDS:
        evaluation = Evaluation(lm, SudokuTask(band), EvaluationPlan(limit=limit, batch=50, seed=0))
        for _ in evaluation.run():
            pass
        report = evaluation.report()
        score = report.scores["exact"]
        found[band] = {
            "solved": round(score.mean, 4),
            "interval": score.to_json(),
            "steps": None if report.steps_mean is None else round(report.steps_mean, 2),
        }
    return found


def text(plain: LanguageModel, lm: LanguageModel, limit: int, prompts: int) -> dict[str, Any]:
    paragraphs = [make_scene(number, seed=3).text for number in range(limit)]
    bos = lm.tokenizer.bos_id
    pairs = [TokenPair((bos or 0,), tuple(lm.tokenizer.encode(p))) for p in paragraphs]
    total = sum(found.log_prob for _, found in log_likelihoods(lm, pairs, batch=8))
    tokens = sum(len(pair.continuation) for pair in pairs)
    some = [(bos or 0, *lm.tokenizer.encode(p)) for p in paragraphs[:prompts]]
    return {
        **distance(plain, lm, some),
        "tokens": tokens,
        "perplexity": round(math.exp(-total / tokens), 3),
    }


if __name__ == "__main__":
    main()
