"""Dated result files: what was run, on what, how it spread."""

from __future__ import annotations

import datetime
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from dgemma.machine import inspect_machine, package_versions

RESULTS = Path(__file__).parent / "results"


def write(name: str, findings: dict[str, Any], suffix: str = "", *, module: str | None = None) -> None:
    """A file per day, benchmark and, where one has several settings worth keeping, `suffix`.

    module: the one that was run; None: that of the benchmark.
    """
    machine = inspect_machine()
    result = {
        "date": datetime.date.today().isoformat(),
        "command": "python -m " + " ".join([module or f"benchmarks.{name}", *sys.argv[1:]]),
        "machine": {
            "processor": machine.processor,
            "cores": machine.cores,
            "features": machine.cpu_features,
            "memory_gb": round(machine.memory_bytes / 1e9, 1),
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
        },
        "versions": {k: v for k, v in package_versions().items() if v},
        **findings,
    }
    text = json.dumps(result, indent=2)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{result['date']}-{name}{suffix}.json").write_text(text + "\n")
