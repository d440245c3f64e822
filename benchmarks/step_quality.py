"""How few steps keep the result: settings of the sampler on Sudoku and on text, steps beside quality.

    python -m benchmarks.step_quality            (--puzzles N per band, --prompts N)

Sudoku: solved at the first try, of held-out puzzles. Text: mean log-probability (nats a token) that the same
weights, read left to right, give to what the canvas wrote after the beginnings of scenes.
Higher is better for both; texts that repeat themselves get a high one too, so the share of distinct pairs of
neighbouring tokens stands beside it.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks import record
from dgemma.evaluation.runner import evaluate
from dgemma.evaluation.tasks.sudoku import SudokuTask
from dgemma.language_model import LanguageModel
from dgemma.loading import load
from dgemma.params import PRESETS
from recipes.english.prose import sentences
from recipes.english.scenes import make_scene

SETTINGS: dict[str, dict[str, Any]] = {
    **{f"preset {name}": options for name, options in PRESETS.items()},
    "bound 0.3": {"entropy_bound": 0.3},
    "bound 0.3, sure at 0.02": {"entropy_bound": 0.3, "confidence_threshold": 0.02},
    "bound 0.5, sure at 0.05": {"entropy_bound": 0.5, "confidence_threshold": 0.05},
    "bound 1, sure at 0.05": {"entropy_bound": 1.0, "confidence_threshold": 0.05},
    "at most 24": {"max_denoising_steps": 24},
    "at most 12": {"max_denoising_steps": 12},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--puzzles", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--suffix", default="", help="of the result file's name")
    args = parser.parse_args()
    sudoku, text = load("bundled:sudoku"), load("bundled:text")
    found: dict[str, Any] = {}
    for name, options in SETTINGS.items():
        found[name] = {"options": options, "sudoku": {}, "text": text_row(text, options, args.prompts)}
        for band in ("medium", "hard"):
            found[name]["sudoku"][band] = sudoku_row(sudoku, band, options, args.puzzles)
        print(name, {k: v for k, v in found[name].items() if k != "options"}, flush=True)
    findings = {"puzzles_per_band": args.puzzles, "prompts": args.prompts, "settings": found}
    record.write("step_quality", findings, args.suffix)


def sudoku_row(lm: LanguageModel, band: str, options: dict[str, Any], limit: int) -> dict[str, Any]:
    report = evaluate(lm, SudokuTask(band), limit=limit, batch=50, seed=0, options=options)
    return {"solved": round(report.scores["exact"].mean, 4), "steps": report.steps_mean}


def text_row(lm: LanguageModel, options: dict[str, Any], limit: int) -> dict[str, float]:
    scenes = [sentences(make_scene(number, seed=3).text) for number in range(limit)]
    paragraphs = [" ".join(scene[:2]) for scene in scenes]
    asked = {"max_denoising_steps": 48, **options}
    answers = lm.generate(
        paragraphs, seeds=list(range(len(paragraphs))), max_tokens=64, ignore_end=True, **asked
    )
    logprobs, pairs, distinct = [], 0, 0
    for paragraph, answer in zip(paragraphs, answers, strict=True):
        logprobs.append(causal_log_prob(lm, lm.tokenizer.encode(paragraph), list(answer.tokens)))
        neighbours = list(zip(answer.tokens, answer.tokens[1:], strict=False))
        pairs, distinct = pairs + len(neighbours), distinct + len(set(neighbours))
    return {
        "causal_log_prob": round(sum(logprobs) / len(logprobs), 4),
        "distinct_pairs": round(distinct / pairs, 3),
        "steps": round(sum(sum(a.steps) for a in answers) / len(answers), 2),
    }


@torch.inference_mode()
def causal_log_prob(lm: LanguageModel, prompt: list[int], answer: list[int]) -> float:
    """Mean log-probability of the answer's tokens, left to right."""
    hidden = lm.encode(torch.tensor([prompt + answer]), lm.new_cache(batch=1))
    log_probs = lm.logits(hidden[:, len(prompt) - 1 : -1]).log_softmax(-1)
    return float(log_probs.gather(-1, torch.tensor([answer])[..., None]).mean())


if __name__ == "__main__":
    main()
