"""What oneDNN keeps of bf16 products with ever new numbers of rows: memory, and time of a new one.

    python -m benchmarks.product_shapes

Each process multiplies matrices of every number of rows from 8 to 307 with four weights, five times over.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from benchmarks import record

CAPACITIES = ("64", "256", "1024")  # oneDNN's own: 1024
WEIGHTS = ((768, 192), (192, 768), (384, 192), (192, 192))
ROWS = range(8, 308)
ROUNDS = 5


def measure() -> None:
    """In a process of its own: prints MB beyond the start, and milliseconds for a product, of each round."""
    import psutil
    import torch

    torch.set_num_threads(1)
    process = psutil.Process()
    weights = [torch.randn(shape).bfloat16() for shape in WEIGHTS]
    inputs = {size: torch.randn(max(ROWS), size).bfloat16() for size in {shape[1] for shape in WEIGHTS}}
    torch.nn.functional.linear(inputs[192][:7], weights[0])  # the library is loaded
    before = process.memory_info().rss
    rounds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for rows in ROWS:
            for weight in weights:
                torch.nn.functional.linear(inputs[weight.shape[1]][:rows], weight)
        spent_ms = 1e3 * (time.process_time() - began) / len(ROWS) / len(weights)
        grown_mb = (process.memory_info().rss - before) / 1e6
        rounds.append({"grown_mb": round(grown_mb), "ms": round(spent_ms, 3)})
    print(json.dumps(rounds))


def main() -> None:
    if sys.argv[1:] == ["--child"]:
        measure()
        return
    found = {}
    for capacity in CAPACITIES:
        env = {**os.environ, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": capacity}
        command = [sys.executable, "-m", "benchmarks.product_shapes", "--child"]
        out = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
        found[capacity] = json.loads(out)
        print(capacity, out, flush=True)
    shapes = len(ROWS) * len(WEIGHTS)
    record.write("product_shapes", {"shapes": shapes, "rounds_by_primitive_cache_capacity": found})


if __name__ == "__main__":
    main()
