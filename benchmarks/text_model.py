"""The text model on held-out text, beside n-grams of the same text; and how many steps its canvases take.

    python -m benchmarks.text_model --runs runs/text/learn runs/text/settle

causal: the perplexity per token of causal mode, in windows of 256 tokens, on every held-out document.
n-grams: interpolated Kneser-Ney of order 5 over the same tokens, learned from growing parts of the text.
diffusion: the loss per token of a canvas by the share of tokens that are replaced.
curve: what the runs' logs say of the held-out windows they looked at, by the megabytes read so far; the
n-grams' loss on the same windows stands beside it as `window_nats`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import record
from benchmarks.held_out_text import REMEDY
from benchmarks.kneser_ney import KneserNey
from dgemma.evaluation.likelihood import TokenPair, log_likelihoods
from dgemma.language_model import LanguageModel, load
from dgemma.params import PRESETS
from dgemma.training.data.canvases import CanvasSettings
from dgemma.training.data.records import TrainingExample
from dgemma.training.held_out import evaluate_held_out
from dgemma.training.recipe import DataRecipe, Recipe
from dgemma.training.recipe_file import read_recipe
from dgemma.training.report import NOISE_LABELS, HeldOutReport, StepReport, read_log
from dgemma.training.setup import open_stream

ORDER = 5
WINDOW = 256
PARTS_MB = (1, 3, 10, 30, 1000)  # of training text; the last: all there is
PROMPT_TOKENS, ANSWER_TOKENS = 96, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="bundled:text")
    parser.add_argument("--corpus", type=Path, default=Path("data/text"))
    parser.add_argument("--runs", type=Path, nargs="*", default=[], help="training runs, one after the other")
    parser.add_argument("--examples", type=int, default=1024, help="canvases for the diffusion loss")
    parser.add_argument("--prompts", type=int, default=50, help="answers per preset")
    parser.add_argument("--suffix", default="", help="of the result file's name")
    args = parser.parse_args()
    for part in ("held_out", "train", "chats/train.jsonl"):
        if not (args.corpus / part).exists():
            raise SystemExit(f"{args.corpus} has no {part}; {REMEDY}")
    lm = load(args.model)
    recipe = read_recipe("recipes/text/learn.yaml")
    assert recipe.held_out is not None
    stream = open_stream(recipe.held_out.data, lm, recipe.seed)
    windows = stream.take(0, recipe.held_out.examples)
    held_out = documents(args.corpus / "held_out")
    tokens = [lm.tokenizer.encode(text) for text in held_out]
    num_bytes, num_tokens = sum(len(text.encode()) for text in held_out), sum(map(len, tokens))
    findings: dict[str, Any] = {
        "model": args.model,
        "parameters": sum(p.numel() for p in lm.transformer.parameters()),
        "held_out": {"documents": len(held_out), "bytes": num_bytes, "tokens": num_tokens},
        "causal": told(causal_nats(lm, tokens), num_tokens, num_bytes),
        "ngrams": ngrams(lm, args.corpus, tokens, num_bytes, windows),
        "curve": curve(args.runs, recipe, lm, args.corpus),
        "diffusion": diffusion(lm, args.corpus / "held_out", args.examples),
        "steps": {preset: steps(lm, tokens, preset, args.prompts) for preset in PRESETS},
        "samples": samples(lm, tokens),
    }
    record.write("text_model", findings, args.suffix)


def documents(directory: Path) -> list[str]:
    return [file.read_text(encoding="utf-8") for file in sorted(directory.rglob("*.txt"))]


def told(nats: float, num_tokens: int, num_bytes: int) -> dict[str, float]:
    return {
        "nats_per_token": round(nats / num_tokens, 4),
        "perplexity": round(math.exp(nats / num_tokens), 2),
        "bits_per_byte": round(nats / math.log(2) / num_bytes, 4),
    }


def causal_nats(lm: LanguageModel, texts: Sequence[Sequence[int]]) -> float:
    """-log p of every token, each window after a `<bos>` of its own."""
    bos = lm.tokenizer.bos_id
    assert bos is not None
    pairs = [
        TokenPair((bos,), tuple(text[at : at + WINDOW]))
        for text in texts
        for at in range(0, len(text), WINDOW)
    ]
    with torch.inference_mode():
        return -sum(found.log_prob for _, found in log_likelihoods(lm, pairs, batch=16))


def curve(runs: Sequence[Path], recipe: Recipe, lm: LanguageModel, corpus: Path) -> list[dict[str, Any]]:
    """Held-out losses of runs that followed each other, by the text read until then (repeats count)."""
    num_bytes = sum(len(text.encode()) for text in learned_texts(corpus))
    per_example = num_bytes / open_stream(recipe.data, lm, recipe.seed).num_records / 1e6
    found = []
    examples = 0
    for run in runs:
        reports = read_log(run / "log.jsonl")
        taken = {r.step: r.examples for r in reports if isinstance(r, StepReport)}
        found += [
            {
                "run": run.name,
                "step": report.step,
                "mb": round((examples + taken.get(report.step, 0)) * per_example, 2),
                "causal_nats": round(report.encoder, 4),
                "diffusion_nats": round(report.diffusion, 4),
                "diffusion_by_noise": [v and round(v, 3) for v in report.diffusion_by_noise],
            }
            for report in reports
            if isinstance(report, HeldOutReport)
        ]
        examples += max(taken.values())
    return found


def learned_texts(corpus: Path) -> list[str]:
    """The training text: documents, and the answers of chats."""
    lines = (corpus / "chats" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [
        message["content"]
        for line in lines
        for message in json.loads(line)["messages"]
        if message["role"] == "assistant"
    ]
    return [*documents(corpus / "train"), *answers]


def ngrams(
    lm: LanguageModel,
    corpus: Path,
    texts: Sequence[Sequence[int]],
    num_bytes: int,
    windows: Sequence[TrainingExample],
) -> list[dict[str, Any]]:
    """The baseline after growing parts of the training text, in a random order."""
    learned = learned_texts(corpus)
    random.Random(0).shuffle(learned)
    # Order - 1 tokens stand before a document, so that its first has a context of the usual length.
    start = [lm.tokenizer.bos_id or 0] * (ORDER - 1)
    wanted = np.concatenate([np.array([*start, *text]) for text in texts])
    is_start = np.concatenate([np.array([True] * (ORDER - 1) + [False] * len(text)) for text in texts])
    found = []
    stream: list[int] = []
    size = 0
    sizes = iter(PARTS_MB)
    limit = next(sizes)
    for number, text in enumerate(learned):
        stream += [*start, *lm.tokenizer.encode(text)]
        size += len(text.encode())
        if size >= limit * 1e6 or number + 1 == len(learned):
            model = KneserNey(np.array(stream), lm.config.vocab_size, ORDER)
            nats = -float(model.log_probs(wanted)[~is_start[ORDER - 1 :]].sum())
            figures = told(nats, int((~is_start).sum()), num_bytes)
            in_windows = round(window_nats(model, windows, start), 4)
            found.append(
                {"mb": round(size / 1e6, 1), "tokens": len(stream), **figures, "window_nats": in_windows}
            )
            print(found[-1], flush=True)
            limit = next(sizes, 1000)
    return found


def window_nats(model: KneserNey, windows: Sequence[TrainingExample], start: list[int]) -> float:
    """-log p per supervised token of examples that the n-grams see as the model does: one by one."""
    nats: list[float] = []
    for example in windows:
        # The log-probability of token i stands at i: as many tokens stand in front as are left out.
        found = model.log_probs(np.array([*start, *example.tokens]))
        for span in example.responses:
            nats += (-found[span.start : span.stop]).tolist()
    return sum(nats) / len(nats)


def diffusion(lm: LanguageModel, path: Path, examples: int) -> dict[str, Any]:
    stream = open_stream(DataRecipe(path=str(path), max_length=WINDOW + 1), lm, seed=0)
    eos = lm.tokenizer.eos_id
    assert eos is not None
    settings = CanvasSettings(
        canvas_len=lm.config.canvas_len, vocab_size=lm.config.vocab_size, fill_token=eos
    )
    look = evaluate_held_out(lm.transformer, stream, settings, step=0, num_examples=examples, batch_len=32)
    by_noise = dict(
        zip(NOISE_LABELS, (round(v, 3) if v else v for v in look.diffusion_by_noise), strict=True)
    )
    return {"nats_per_token": round(look.diffusion, 4), "by_noise": by_noise}


def prompts_of(lm: LanguageModel, texts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The beginnings of the first documents that are long enough."""
    bos = lm.tokenizer.bos_id
    assert bos is not None
    long = [text for text in texts if len(text) > PROMPT_TOKENS + ANSWER_TOKENS]
    return [[bos, *text[:PROMPT_TOKENS]] for text in long[:count]]


def steps(lm: LanguageModel, texts: Sequence[Sequence[int]], preset: str, count: int) -> dict[str, Any]:
    prompts = prompts_of(lm, texts, count)
    answers = lm.generate(prompts, preset=preset, max_tokens=ANSWER_TOKENS, seeds=list(range(len(prompts))))
    counts = sorted(steps for answer in answers for steps in answer.steps)
    return {
        "canvases": len(counts),
        "mean": round(sum(counts) / len(counts), 2),
        "p90": counts[math.ceil(0.9 * len(counts)) - 1],
    }


def samples(lm: LanguageModel, texts: Sequence[Sequence[int]]) -> list[dict[str, str]]:
    """What it writes after the beginnings of some held-out documents: the first ones, not chosen."""
    prompts = prompts_of(lm, texts, 40)[::8]
    answers = lm.generate(prompts, max_tokens=ANSWER_TOKENS, seeds=list(range(len(prompts))))
    return [
        {"prompt": lm.tokenizer.decode(prompt[1:])[-200:], "answer": answer.text}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


if __name__ == "__main__":
    main()
