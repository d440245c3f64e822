"""Ours beside the reference in Transformers, same weights, same steps: speed, memory, share of the roofline.

    python -m benchmarks.against_reference GEOMETRY DTYPE      (--rounds N; --steps K; --canvases N)

Geometries: "1024" (0.73 B parameters, 32 experts of which 4 are used, 262,144 tokens), "2816" (the released
width, 32 experts of which 4 are used, 262,144 tokens, 1.2 B parameters), "tiny" (2,048 tokens).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import record
from benchmarks.engine_speed import made_model
from dgemma.bench.model_bench import BenchPlan, ModelBench
from dgemma.bench.reference import TimedReference, load_reference
from dgemma.checkpoint.presets import PRESETS, layers

GEOMETRIES = {
    "1024": PRESETS["medium"].config,
    "2816": replace(
        PRESETS["26b"].config,
        layers=layers(2, head_dim=256, kv_heads=8, full_head_dim=512, full_kv_heads=2),
        num_experts=32,
        experts_per_token=4,
    ),
    "tiny": replace(PRESETS["small"].config, vocab_size=2048),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("geometry", choices=GEOMETRIES)
    parser.add_argument("dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--canvases", type=int, default=1)
    args = parser.parse_args()
    plan = BenchPlan(
        prompt_tokens=64, canvases=args.canvases, steps=args.steps, causal_tokens=4, rounds=args.rounds,
        time_limit_s=3600,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as made:
        lm = made_model(Path(made) / "model", GEOMETRIES[args.geometry], args.dtype)
        reference = TimedReference(load_reference(Path(made) / "model", getattr(torch, args.dtype)))
        bench = ModelBench(lm, reference, plan, log=lambda text: print(text, file=sys.stderr, flush=True))
        for part in (bench.fixed, bench.memory, bench.roofline):
            part()
    found = bench.found | {"parameters": sum(p.numel() for p in lm.transformer.parameters())}
    record.write("against_reference", found, f"-{args.geometry}-{args.dtype}")


if __name__ == "__main__":
    main()
