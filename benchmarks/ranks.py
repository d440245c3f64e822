"""A model divided over 2 and 4 processes against one: memory of each, logits, seconds per step.

    python -m benchmarks.ranks                  (--preset medium --sizes 1 2 4 --steps 8)

Random weights in float32, gloo on this machine, one thread per process. Memory: what a process holds after
the weights are loaded, less what it held before, against the plan. A step of as many processes as cores need
not be faster than one process with one thread: they share the machine's memory bandwidth.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

import dgemma
from benchmarks import record
from dgemma.checkpoint.division import part_bytes
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.checkpoint.source import read_config
from dgemma.model.model_part import ModelPart

PROMPT = tuple(range(5, 205))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="medium")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=8, help="denoise steps that are measured (default: 8)")
    parser.add_argument("--rank", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank, size, store, checkpoint, logits = args.rank
        print(json.dumps(measure(int(rank), int(size), store, Path(checkpoint), Path(logits), args.steps)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Path(scratch) / "model"
        write_random(checkpoint, PRESETS[args.preset].config, dtype="F32", seed=1)
        found = {str(size): run(size, checkpoint, Path(scratch), args.steps) for size in args.sizes}
        whole = np.load(Path(scratch) / "logits-1-0.npy")
        for size in args.sizes:
            parts = [np.load(Path(scratch) / f"logits-{size}-{rank}.npy") for rank in range(size)]
            found[str(size)]["largest_difference_of_logits"] = max(
                float(abs(part - whole).max()) for part in parts
            )
    record.write("ranks", {"preset": args.preset, "ranks": found})


def run(size: int, checkpoint: Path, scratch: Path, steps: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.ranks", "--steps", str(steps), "--rank"]
    processes = [
        subprocess.Popen(
            [*command, *map(str, (rank, size, scratch / f"store-{size}", checkpoint)),
             str(scratch / f"logits-{size}-{rank}.npy")],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    said = [process.communicate()[0] for process in processes]
    ranks = [json.loads(line) for line in said]
    print(size, ranks, flush=True)
    return {"of_each_rank": ranks}


def measure(rank: int, size: int, store: str, checkpoint: Path, logits: Path, steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    _, config = read_config(checkpoint)
    before = psutil.Process().memory_info().rss
    lm = dgemma.load(checkpoint, dtype="float32", mesh=mesh)
    loaded = psutil.Process().memory_info().rss
    with torch.inference_mode():
        cache = lm.new_cache()
        lm.encode(torch.tensor([PROMPT]), cache)
        canvas = torch.arange(config.canvas_len)[None] * 97 % config.vocab_size
        np.save(logits, lm.logits(lm.denoise(canvas, cache)[:, :16]).numpy())
    seconds = []
    for number in range(3):
        began = time.perf_counter()
        answer = lm.generate(PROMPT, seed=number, max_tokens=config.canvas_len, max_denoising_steps=steps)
        seconds.append((time.perf_counter() - began) / sum(answer.steps))
    after = psutil.Process().memory_info().rss
    planned = part_bytes(ModelPart(config, rank, size), item_bytes=4)
    return {
        "weights_planned_mb": planned / 1e6,
        "weights_resident_mb": (loaded - before) / 1e6,
        "weights_ratio": (loaded - before) / planned,
        "resident_after_answers_mb": (after - before) / 1e6,
        "seconds_per_step": statistics.median(seconds),
    }


if __name__ == "__main__":
    main()
