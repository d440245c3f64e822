"""Replies of 16 to 1,024 tokens: diffusion at K steps a canvas beside left to right, and the predictions.

    python -m benchmarks.left_to_right MODEL           (--dtype D; --lengths N ...; --time-limit S)

The part `lengths` of `dgemma bench MODEL`, for models whose real prompts say nothing: random weights.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import record
from dgemma.bench.model_bench import BenchPlan, ModelBench, verdict
from dgemma.loading import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--lengths", type=int, nargs="*", default=[16, 64, 256, 1024])
    parser.add_argument("--time-limit", type=float, default=900.0)
    args = parser.parse_args()
    plan = BenchPlan(
        prompt_tokens=64,
        canvases=1,
        steps=4,
        rounds=2,
        lengths=tuple(args.lengths),
        time_limit_s=args.time_limit,
    )
    lm = load(args.model, dtype=args.dtype)
    bench = ModelBench(lm, None, plan, log=lambda text: print(text, file=sys.stderr, flush=True))
    for part in (bench.fixed, bench.roofline, bench.lengths):
        part()
    found = bench.found | {"parameters": sum(p.numel() for p in lm.transformer.parameters())}
    record.write("left_to_right", found | {"verdict": verdict(found)}, f"-{Path(args.model).name}")


if __name__ == "__main__":
    main()
