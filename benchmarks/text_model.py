"""The text model on held-out text, beside n-grams of the same text; and how many steps its canvases take.

    python -m benchmarks.text_model --runs runs/english/warm runs/english/learn runs/english/settle

Two held-out sets: scenes of topics that training has, and scenes of other topics with definitions of other
words. causal: the perplexity per token of causal mode, each entry after a `<bos>`. n-grams: interpolated
Kneser-Ney of order 5 over the same tokens, learned from growing parts of the text. diffusion: the loss per
token of a canvas by the share of tokens that are replaced. steps: of the canvases after the first sentence of
an entry. samples: what it writes there, the first entries of each set, and answers to questions. curve: what
the runs' logs say of the entries they looked at, by the megabytes read so far; the n-grams' loss on the same
entries stands beside it as `window_nats`.
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
from dgemma.language_model import LanguageModel
from dgemma.loading import load
from dgemma.params import PRESETS
from dgemma.training.data.canvases import CanvasSettings
from dgemma.training.data.records import TrainingExample
from dgemma.training.held_out import evaluate_held_out
from dgemma.training.recipe import DataRecipe, Recipe
from dgemma.training.recipe_file import read_recipe
from dgemma.training.report import NOISE_LABELS, HeldOutReport, StepReport, read_log
from dgemma.training.setup import open_stream
from recipes.english.prose import sentences

ORDER = 5
PARTS_MB = (0.3, 1, 3, 1000)  # of training text; the last: all there is
SETS = ("new_scenes", "held_out")
ANSWER_TOKENS = 32
SAMPLES = 8  # of each set, and half as many answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="bundled:text")
    parser.add_argument("--corpus", type=Path, default=Path("data/english"))
    parser.add_argument("--runs", type=Path, nargs="*", default=[], help="training runs, one after the other")
    parser.add_argument("--entries", type=int, default=800, help="of each held-out set")
    parser.add_argument("--prompts", type=int, default=50, help="answers per preset")
    parser.add_argument("--suffix", default="", help="of the result file's name")
    args = parser.parse_args()
    for part in (*SETS, "train", "chats/train", "chats/held_out"):
        if not (args.corpus / f"{part}.jsonl").exists():
            raise SystemExit(f"{args.corpus} has no {part}.jsonl; {REMEDY}")
    lm = load(args.model, dtype="float32")
    findings: dict[str, Any] = {
        "model": args.model,
        "parameters": sum(p.numel() for p in lm.transformer.parameters()),
        "sets": {
            name: on_set(lm, args.corpus / f"{name}.jsonl", args.entries, args.prompts) for name in SETS
        },
        "answers": answers(lm, args.corpus),
    }
    if args.runs:
        recipe = read_recipe("recipes/english/warm.py")
        assert recipe.held_out is not None
        windows = open_stream(recipe.held_out.data, lm, recipe.seed).take(0, recipe.held_out.examples)
        findings["ngrams"] = ngrams(lm, args.corpus, windows)
        findings["curve"] = curve(args.runs, recipe, lm, args.corpus)
    record.write("text_model", findings, args.suffix)


def entries(file: Path) -> list[str]:
    """Texts in an order that is always the same."""
    found = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]
    random.Random(0).shuffle(found)
    return found


def on_set(lm: LanguageModel, file: Path, count: int, num_prompts: int) -> dict[str, Any]:
    texts = entries(file)[:count]
    tokens = [lm.tokenizer.encode(text) for text in texts]
    num_bytes, num_tokens = sum(len(text.encode()) for text in texts), sum(map(len, tokens))
    return {
        "entries": len(texts),
        "bytes": num_bytes,
        "tokens": num_tokens,
        "causal": told(causal_nats(lm, tokens), num_tokens, num_bytes),
        "diffusion": diffusion(lm, texts, num_tokens / num_bytes),
        "steps": {preset: steps(lm, texts, preset, num_prompts) for preset in PRESETS},
        "samples": samples(lm, texts),
    }


def told(nats: float, num_tokens: int, num_bytes: int) -> dict[str, float]:
    return {
        "nats_per_token": round(nats / num_tokens, 4),
        "perplexity": round(math.exp(nats / num_tokens), 2),
        "bits_per_byte": round(nats / math.log(2) / num_bytes, 4),
    }


def causal_nats(lm: LanguageModel, texts: Sequence[Sequence[int]]) -> float:
    """-log p of every token, each text after a `<bos>` of its own."""
    bos = lm.tokenizer.bos_id
    assert bos is not None
    pairs = [TokenPair((bos,), tuple(text)) for text in texts]
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
    """The training text: entries, and the answers of chats."""
    lines = (corpus / "chats" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return [*entries(corpus / "train.jsonl"), *(json.loads(line)["response"] for line in lines)]


def ngrams(lm: LanguageModel, corpus: Path, windows: Sequence[TrainingExample]) -> list[dict[str, Any]]:
    """The baseline after growing parts of the training text, in a random order."""
    learned = learned_texts(corpus)
    random.Random(0).shuffle(learned)
    # Order - 1 tokens stand before a text, so that its first has a context of the usual length.
    start = [lm.tokenizer.bos_id or 0] * (ORDER - 1)
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
            in_windows = round(window_nats(model, windows, start), 4)
            found.append({"mb": round(size / 1e6, 1), "tokens": len(stream), "window_nats": in_windows})
            print(found[-1], flush=True)
            limit = next(sizes, 1000)
    return found


def window_nats(model: KneserNey, windows: Sequence[TrainingExample], start: list[int]) -> float:
    """-log p per supervised token of examples, one by one."""
    nats: list[float] = []
    for example in windows:
        # The log-probability of token i stands at i: as many tokens stand in front as are left out.
        found = model.log_probs(np.array([*start, *example.tokens]))
        for span in example.responses:
            nats += (-found[span.start : span.stop]).tolist()
    return sum(nats) / len(nats)


def diffusion(lm: LanguageModel, texts: Sequence[str], tokens_per_byte: float) -> dict[str, Any]:
    """The loss by noise, in bits per byte too: tokenizers differ."""
    records = [{"text": text} for text in texts]
    stream = open_stream(DataRecipe(records=records, max_length=256, shuffle=False), lm, seed=0)
    eos = lm.tokenizer.eos_id
    assert eos is not None
    settings = CanvasSettings(
        canvas_len=lm.config.canvas_len, vocab_size=lm.config.vocab_size, fill_token=eos
    )
    look = evaluate_held_out(lm.transformer, stream, settings, step=0, num_examples=len(texts), batch_len=32)
    by_noise = dict(zip(NOISE_LABELS, look.diffusion_by_noise, strict=True))
    return {
        "nats_per_token": round(look.diffusion, 4),
        "by_noise": {name: v and round(v, 3) for name, v in by_noise.items()},
        "bits_per_byte_by_noise": {
            name: v and round(v * tokens_per_byte / math.log(2), 3) for name, v in by_noise.items()
        },
    }


def steps(lm: LanguageModel, texts: Sequence[str], preset: str, count: int) -> dict[str, Any]:
    found = lm.generate(beginnings(texts)[:count], preset=preset, max_tokens=ANSWER_TOKENS, seed=1)
    counts = sorted(steps for answer in found for steps in answer.steps)
    return {
        "canvases": len(counts),
        "mean": round(sum(counts) / len(counts), 2),
        "p90": counts[math.ceil(0.9 * len(counts)) - 1],
    }


def beginnings(texts: Sequence[str]) -> list[str]:
    """The first sentences of those that have another one."""
    return [first for first, *others in map(sentences, texts) if others]


def samples(lm: LanguageModel, texts: Sequence[str]) -> list[dict[str, str]]:
    """What it writes after the first sentences of the first texts, by both ways of decoding."""
    prompts = beginnings(texts)[:SAMPLES]
    seeds = list(range(len(prompts)))
    written = {
        way: lm.generate(prompts, max_tokens=2 * ANSWER_TOKENS, seeds=seeds, decode=way)
        for way in ("diffuse", "causal")
    }
    return [
        {"prompt": prompt, **{way: own[number].text for way, own in written.items()}}
        for number, prompt in enumerate(prompts)
    ]


def answers(lm: LanguageModel, corpus: Path) -> list[dict[str, str]]:
    """Answers to questions that training has not seen, about its own words and about unknown scenes."""
    lines = (corpus / "chats" / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    random.Random(0).shuffle(lines)
    asked = [json.loads(line) for line in lines[: SAMPLES // 2]]
    return [
        {**chat, "answer": lm.chat(chat["prompt"], max_tokens=2 * ANSWER_TOKENS, seed=number).text}
        for number, chat in enumerate(asked)
    ]


if __name__ == "__main__":
    main()
