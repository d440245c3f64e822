"""What recording a trace costs: the same generation with and without, by turns; and how large traces are.

python -m benchmarks.trace_cost              (--rounds N; --preset P)
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import record
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.language_model import LanguageModel
from dgemma.loading import load
from dgemma.trace.trace_writer import trace_bytes

TOKENS, STEPS = 512, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--preset", choices=PRESETS, default="medium")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        write_random(Path(made) / "model", PRESETS[args.preset].config, dtype="F32", seed=1)
        lm = load(Path(made) / "model")
        findings = measure(lm, args.rounds)
    record.write("trace_cost", {"preset": args.preset, "tokens": TOKENS, "steps": STEPS, **findings})


def measure(lm: LanguageModel, rounds: int) -> dict[str, Any]:
    prompt = list(range(2, 130))

    def plain() -> None:
        lm.generate(prompt, max_tokens=TOKENS, max_denoising_steps=STEPS, seed=1, ignore_end=True)

    plain()  # first use is not counted
    ratios: list[float] = []
    size, num_canvases = 0, 0
    for number in range(rounds):
        seconds = {}
        for recorded in (number % 2 == 0, number % 2 == 1):
            began = time.perf_counter()
            if recorded:
                with lm.record() as recorder:
                    plain()
                trace = recorder.trace()
            else:
                plain()
            seconds[recorded] = time.perf_counter() - began
        ratios.append(seconds[True] / seconds[False])
        size = len(trace_bytes(trace))
        num_canvases = sum(1 for request in trace.requests for _ in request.canvases)
        print(f"{ratios[-1]:.4f}", flush=True)
    return {
        "times_as_long": [round(value, 4) for value in statistics.quantiles(ratios, n=4)],
        "bytes": size,
        "bytes_per_canvas": round(size / num_canvases),
        "canvas_len": lm.config.canvas_len,
    }


if __name__ == "__main__":
    main()
