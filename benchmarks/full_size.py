"""The released geometry, 26 B parameters, with random weights in int4, on this machine.

    dgemma new 26b-int4 --preset 26b --quantize int4
    python -m benchmarks.full_size 26b-int4                 (--steps N)

Loads by streaming, denoises a canvas after a short prompt, commits it, and denoises another. Peak memory is
the process's largest resident size; seconds per step stand beside the cost model's. The commit shares the
forward of the second canvas's first step, whose seconds are among the steps'.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

from benchmarks import record
from dgemma.bench.cost_model import ROWS, measure_rates, step_s
from dgemma.loading import load

PROMPT = list(range(10, 42))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--steps", type=int, default=3, help="of each of two canvases")
    args = parser.parse_args()
    began = time.perf_counter()
    lm = load(args.model)
    loaded_s = time.perf_counter() - began
    peak_loaded = peak_bytes()
    print(f"loaded in {loaded_s:.0f} s, peak {peak_loaded / 1e9:.2f} GB", flush=True)
    options = {"max_denoising_steps": args.steps, "confidence_threshold": 0.0, "ignore_end": True}
    # A token more than a canvas holds: so the first is committed, that is, read into the cache.
    answer = lm.generate(PROMPT, max_tokens=lm.config.canvas_len + 1, seed=0, **options)
    print(answer.steps, answer.timings, f"peak {peak_bytes() / 1e9:.2f} GB", flush=True)
    peak = peak_bytes()  # before the measuring below takes its own
    machine = measure_rates(lm.transformer)
    taken = answer.timings.denoise_s / sum(answer.steps)
    predicted = step_s(machine, lm.config, 1, len(PROMPT))
    files = [file for file in Path(args.model).iterdir() if file.suffix == ".safetensors"]
    record.write(
        "full_size",
        {
            "disk_gb": round(sum(file.stat().st_size for file in files) / 1e9, 2),
            "weights_gb": round(lm.nbytes / 1e9, 2),
            "load_s": round(loaded_s, 1),
            "peak_resident_gb": round(peak / 1e9, 2),
            "peak_while_loading_gb": round(peak_loaded / 1e9, 2),
            "tokens": len(answer.tokens),
            "steps": sum(answer.steps),
            "seconds_per_step": round(taken, 3),
            "predicted_seconds_per_step": round(predicted, 3),
            "share_of_predicted": round(predicted / taken, 3),
            "commit_s": round(answer.timings.commit_s, 2),
            "total_s": round(answer.timings.total_s, 2),
            "product_gflops": {
                str(r): round(v / 1e9) for r, v in zip(ROWS, machine.product_flops, strict=True)
            },
            "expert_gflops": {
                str(r): round(v / 1e9) for r, v in zip(ROWS, machine.expert_flops, strict=True)
            },
        },
    )


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
