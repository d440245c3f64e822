"""Peak memory and seconds of quantizing a checkpoint of more than 4 GB, in each format.

    python -m benchmarks.quantize_memory DIR                (DIR is made if it does not exist; 4.3 GB)

The limit: the checkpoint's largest tensor and 500 MB, above the resident memory right after `import dgemma`
(which does not import torch: torch's own 200 MB count as quantizing).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks import record
from benchmarks.load_memory import GEOMETRY, make_checkpoint
from dgemma.checkpoint.names import tensor_specs
from dgemma.checkpoint.quantized.quantization_config import NAMES

CHILD = r"""
import json, resource, sys, time
import dgemma
before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
from dgemma.cli.main import main
began = time.perf_counter()
sys.stdout = sys.stderr
status = main(["quantize", sys.argv[1], sys.argv[2], "--format", sys.argv[3], "--no-report"])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
seconds = time.perf_counter() - began
found = {"status": status, "above_import": peak - before, "peak": peak, "seconds": seconds}
print(json.dumps(found), file=sys.__stdout__)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("path", type=Path)
    args = parser.parse_args()
    if not args.path.exists():
        make_checkpoint(args.path, sparse=False)
    sizes = [2 * spec.size for spec in tensor_specs(GEOMETRY)]
    limit = max(sizes) + 500_000_000
    findings: dict[str, object] = {
        "checkpoint_gb": round(sum(sizes) / 1e9, 2),
        "largest_tensor_mb": round(max(sizes) / 1e6, 1),
        "limit_mb": round(limit / 1e6, 1),
    }
    for name in NAMES:
        out = args.path.with_name(f"{args.path.name}-{name}")
        command = [sys.executable, "-c", CHILD, str(args.path), str(out), name]
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(child.stdout)
        assert found["status"] == 0, found
        findings[name] = {
            "gigabytes": round(sum(f.stat().st_size for f in out.glob("*.safetensors")) / 1e9, 2),
            "peak_above_import_mb": round(found["above_import"] / 1e6, 1),
            "peak_mb": round(found["peak"] / 1e6, 1),
            "within_limit": found["above_import"] <= limit,
            "seconds": round(found["seconds"], 1),
        }
        shutil.rmtree(out)
        print(name, findings[name], flush=True)
    record.write("quantize_memory", findings)


if __name__ == "__main__":
    main()
