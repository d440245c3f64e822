"""Peak memory of loading a checkpoint of more than 4 GB, anonymous and file-backed pages apart.

    python -m benchmarks.load_memory DIR            (DIR is made if it does not exist; 4.3 GB)
    python -m benchmarks.load_memory DIR --sparse   (the same files full of holes: no disk needed)

The limit: the checkpoint's size, plus its largest tensor, plus 200 MB, above the resident memory
right after `import dgemma` (which does not import torch: torch's own 200 MB count as loading).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from dgemma.checkpoint.names import tensor_specs
from dgemma.checkpoint.parameter_count import count_parameters
from dgemma.checkpoint.presets import PRESETS, layers

GEOMETRY = replace(
    PRESETS["medium"].config,
    vocab_size=65_536, hidden_size=2048, mlp_size=2048, num_experts=32, expert_size=1024,
    layers=layers(9, head_dim=128, kv_heads=4, full_head_dim=256, full_kv_heads=2),
)  # fmt: skip

CHILD = r"""
import json, sys, threading, time
import dgemma

def resident():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return {n: int(fields[n].split()[0]) * 1024 for n in ("VmRSS", "RssAnon", "RssFile", "VmHWM")}

baseline = resident()
peak = dict(baseline)
done = threading.Event()

def watch():
    while not done.wait(0.002):
        for name, value in resident().items():
            peak[name] = max(peak[name], value)

watcher = threading.Thread(target=watch)
watcher.start()
started = time.perf_counter()
lm = dgemma.load(sys.argv[1], dtype=sys.argv[2])
seconds = time.perf_counter() - started
done.set()
watcher.join()
final = resident()
print(json.dumps({"baseline": baseline, "peak": {**peak, "VmHWM": final["VmHWM"]}, "after": final,
                  "seconds": round(seconds, 2)}))
"""


def make_checkpoint(path: Path, *, sparse: bool) -> None:
    """Random weights, or a file of the same layout that is all holes."""
    from dgemma.checkpoint.random_weights import write_random
    from dgemma.checkpoint.safetensors_file import TensorToWrite, header_of
    from dgemma.checkpoint.save import write_config

    if not sparse:
        write_random(path, GEOMETRY)
        return
    raw = GEOMETRY.to_json() | {"dtype": "bfloat16"}
    write_config(path, raw)
    file = path / "model.safetensors"
    specs = list(tensor_specs(GEOMETRY))
    header = header_of([TensorToWrite(s.name, "BF16", s.shape, list) for s in specs])
    file.write_bytes(header)
    with file.open("r+b") as stretched:
        stretched.truncate(len(header) + sum(2 * s.size for s in specs))


def measure(path: Path, dtype: str) -> dict[str, object]:
    census = count_parameters(GEOMETRY)
    item = {"bfloat16": 2, "float32": 4}[dtype]
    size = census.total_parameters * item
    largest = max(spec.size for spec in tensor_specs(GEOMETRY)) * item
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), dtype], capture_output=True, text=True, check=True
    )
    found = json.loads(child.stdout)
    above = found["peak"]["VmHWM"] - found["baseline"]["VmRSS"]
    limit = size + largest + 200_000_000
    return {
        "dtype": dtype,
        "size_in_memory": size,
        "largest_tensor": largest,
        "peak_above_import": above,
        "peak_above_size": above - size,
        "limit": limit,
        "within_limit": above <= limit,
        "peak_anonymous": found["peak"]["RssAnon"],
        "peak_file_backed": found["peak"]["RssFile"],
        "baseline": found["baseline"],
        "seconds": found["seconds"],
    }


def main() -> None:
    from benchmarks.record import write

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--sparse", action="store_true")
    args = parser.parse_args()
    if not args.path.exists():
        make_checkpoint(args.path, sparse=args.sparse)
    # float32 doubles the numbers on the way: every tensor passes through the conversion buffer.
    findings = [measure(args.path, dtype) for dtype in ("bfloat16", "float32")]
    write("load_memory", {"findings": findings})


if __name__ == "__main__":
    main()
