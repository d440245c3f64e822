"""The engine: tokens per second by concurrency, what the exact way costs, what a known prefix saves.

    python -m benchmarks.engine_speed            (--rounds N; --parts throughput exact flips prefix long)

throughput: 1, 2, 4, 8 and 16 answers at once, each of one canvas that takes a fixed number of steps, beside
what `dgemma.bench.cost_model` expects, and beside the same answers one after another.
exact: the same answers in the exact way and by default, in turn.
flips: by default, how many answers of the bundled text model are the same in company and alone.
prefix: seconds to a canvas of one step after 2,000 tokens, when they are new and when they are known; also
at half the released width, with so many words that the vocabulary's share of a step is about the released
one. long: a prompt of 262,144 tokens, less a canvas, at a narrow geometry.
"""

from __future__ import annotations

import argparse
import operator
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from dgemma.bench.cost_model import ROWS, measure_rates, roofline_s, step_s
from dgemma.bench.timing import alternate, ratios, spread
from dgemma.checkpoint.presets import PRESETS, layers
from dgemma.checkpoint.random_weights import write_random
from dgemma.language_model import LanguageModel
from dgemma.loading import load
from dgemma.model.config import ModelConfig

CONCURRENCY = (1, 2, 4, 8, 16)
STEPS = 6
PREFIX = 2000
# 128 experts of which 8 are used, as released; narrow enough for two cores.
GEOMETRY = replace(
    PRESETS["medium"].config,
    vocab_size=32_768,
    hidden_size=640,
    mlp_size=640,
    layers=layers(6, head_dim=64, kv_heads=4, full_head_dim=128, full_kv_heads=2),
    num_experts=128,
    experts_per_token=8,
    expert_size=128,
    window=256,
)
HALF_WIDTH = replace(
    GEOMETRY,
    vocab_size=10_240,
    hidden_size=1408,
    mlp_size=1056,
    expert_size=352,
    layers=layers(3, head_dim=128, kv_heads=4, full_head_dim=256, full_kv_heads=1),
)
NARROW = replace(
    PRESETS["tiny"].config,
    hidden_size=32,
    layers=layers(2, head_dim=16, kv_heads=1, full_head_dim=16, full_kv_heads=1),
    num_heads=2,
    max_positions=262_144,
)


def main() -> None:
    parts = {"throughput": throughput, "exact": exact, "flips": flips, "prefix": prefix, "long": long}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="*", choices=parts, default=list(parts))
    parser.add_argument("--suffix", default="", help="of the result file's name")
    args = parser.parse_args()
    findings: dict[str, Any] = {"steps_per_canvas": STEPS, "canvas_len": GEOMETRY.canvas_len}
    with tempfile.TemporaryDirectory() as made:
        lm = made_model(Path(made) / "model", GEOMETRY, "bfloat16")
        findings["parameters"] = sum(p.numel() for p in lm.transformer.parameters())
        for name in args.parts:
            findings[name] = parts[name](lm, args.rounds)
            print(name, findings[name], flush=True)
    record.write("engine_speed", findings, args.suffix)


def made_model(path: Path, config: ModelConfig, dtype: str) -> LanguageModel:
    write_random(path, config, dtype="BF16", seed=1)
    return load(path, dtype=dtype)


def ask(lm: LanguageModel, prompts: list[list[int]], **options: Any) -> list[Any]:
    """One canvas each, of STEPS steps whatever the model thinks of them."""
    asked: dict[str, Any] = {
        "max_tokens": lm.config.canvas_len,
        "max_denoising_steps": STEPS,
        "confidence_threshold": 0.0,
        "ignore_end": True,
        **options,
    }
    return lm.generate(prompts, seeds=[sum(prompt) for prompt in prompts], **asked)


def prompts_of(count: int, length: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(6, 30_000, (count, length), generator=generator).tolist()


def throughput(lm: LanguageModel, rounds: int) -> dict[str, Any]:
    machine = measure_rates(lm.transformer)
    length = 32
    rates = {"product": machine.product_flops, "expert": machine.expert_flops}
    found: dict[str, Any] = {
        "machine": {
            **{
                f"{name}_gflops": {str(r): round(v / 1e9) for r, v in zip(ROWS, values, strict=True)}
                for name, values in rates.items()
            },
            "read_gb_per_s": round(machine.bytes_per_s / 1e9, 1),
            "scan_ns_per_position_and_token": round(machine.scan_s * 1e9, 4),
            "ns_per_number": {
                name: round(1e9 * getattr(machine, f"{name}_s"), 4)
                for name in ("norm", "gate", "copy", "add")
            },
        }
    }
    for count in CONCURRENCY:
        shares, roofs, speeds, one_by_one = [], [], [], []
        for number in range(rounds):
            prompts = prompts_of(count, length, seed=100 * count + number)
            began = time.perf_counter()
            answers = ask(lm, prompts)
            seconds = time.perf_counter() - began
            tokens = sum(len(answer.tokens) for answer in answers)
            speeds.append(tokens / seconds)
            # Measured in the same minute as what it is compared with.
            machine = measure_rates(lm.transformer)
            taken = statistics.mean(a.timings.denoise_s for a in answers) / STEPS
            shares.append(step_s(machine, lm.config, count, length) / taken)
            roofs.append(roofline_s(machine, lm.config, count) / taken)
            if count > 1:
                again = prompts_of(min(count, 4), length, seed=7000 + 100 * count + number)
                began = time.perf_counter()
                for row in again:
                    ask(lm, [row])
                alone = len(again) * lm.config.canvas_len / (time.perf_counter() - began)
                one_by_one.append(speeds[-1] / alone)
        found[str(count)] = {
            "tokens_per_s": spread(speeds),
            "share_of_predicted": spread(shares),
            "share_of_roofline": spread(roofs),
            **({"times_one_by_one": spread(one_by_one)} if one_by_one else {}),
        }
        print(count, found[str(count)], flush=True)
    return found


def exact(lm: LanguageModel, rounds: int) -> dict[str, Any]:
    exactly = lm.exact()
    found = {}
    for count in (1, 8):
        prompts = prompts_of(count, 32, seed=count)
        seconds = alternate(
            {"default": lambda p=prompts: ask(lm, p), "exact": lambda p=prompts: ask(exactly, p)},  # type: ignore[misc]
            rounds,
        )
        found[f"{count} at once"] = ratios(seconds, "default")
    return found


def flips(_: LanguageModel, rounds: int) -> dict[str, Any]:
    """By default: of answers to paragraphs of our documentation, 16 at once, how many are the same alone."""
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    paragraphs = [p for page in pages for p in page.read_text().split("\n\n") if 200 < len(p) < 800]
    found = {}
    for dtype in ("float32", "bfloat16"):
        lm = load("bundled:text", dtype=dtype)
        same = tokens_same = tokens = 0
        for begin in range(0, 16 * rounds, 16):
            some = paragraphs[begin : begin + 16]
            seeds = list(range(begin, begin + len(some)))
            together = lm.generate(some, seeds=seeds, max_tokens=64)
            for prompt, seed, answer in zip(some, seeds, together, strict=True):
                alone = lm.generate(prompt, seed=seed, max_tokens=64)
                same += answer.tokens == alone.tokens
                tokens += len(alone.tokens)
                tokens_same += sum(map(operator.eq, answer.tokens, alone.tokens))
        count = 16 * rounds
        found[dtype] = {
            "answers": count,
            "same": same,
            "share_of_tokens_same": round(tokens_same / tokens, 4),
        }
    return found


def prefix(lm: LanguageModel, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made:
        wide = made_model(Path(made) / "wide", HALF_WIDTH, "bfloat16")
        return {"32,768 words": sooner(lm, rounds), "half the released width": sooner(wide, rounds)}


def sooner(lm: LanguageModel, rounds: int) -> dict[str, Any]:
    gains, news, knowns = [], [], []
    for number in range(rounds + 1):
        (shared,) = prompts_of(1, PREFIX, seed=number)
        times = []
        for tail in ([7], [8]):
            tokens = [token % lm.config.vocab_size for token in [*shared, *tail]]
            (answer,) = ask(lm, [tokens], max_denoising_steps=1)
            times.append(answer.timings.first_commit_s)
            cached = answer.cached_tokens
        if number:  # the first warms up
            gains.append(times[0] / times[1])
            news.append(times[0])
            knowns.append(times[1])
    return {
        "prefix": PREFIX,
        "of_it_cached": cached,
        "seconds_new": spread(news),
        "seconds_known": spread(knowns),
        "times_sooner": spread(gains),
    }


def long(_: LanguageModel, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made:
        lm = made_model(Path(made) / "narrow", NARROW, "float32")
        (prompt,) = prompts_of(1, lm.config.max_positions - lm.config.canvas_len, seed=1)
        began = time.perf_counter()
        (answer,) = lm.generate([[token % 2000 for token in prompt]], max_tokens=8, seed=1)
        return {
            "tokens": len(prompt),
            "seconds": round(time.perf_counter() - began, 1),
            "steps": answer.steps,
        }


if __name__ == "__main__":
    main()
