"""Dated result files: what was run, on what, how it spread."""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dgemma.machine import inspect_machine, package_versions

RESULTS = Path(__file__).parent / "results"


def alternate(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, run in turn: a noisy machine then disturbs all of them alike."""
    for run in ways.values():
        run()  # warm-up
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def ratios(seconds: dict[str, list[float]], base: str) -> dict[str, dict[str, float]]:
    """Each way against `base`, round by round."""
    return {
        name: spread([a / b for a, b in zip(values, seconds[base], strict=True)])
        for name, values in seconds.items()
        if name != base
    }


def write(name: str, findings: dict[str, Any]) -> None:
    machine = inspect_machine()
    result = {
        "date": datetime.date.today().isoformat(),
        "command": "python -m " + " ".join([f"benchmarks.{name}", *sys.argv[1:]]),
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
    (RESULTS / f"{result['date']}-{name}.json").write_text(text + "\n")
