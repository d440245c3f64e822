"""Alternating timing: variants run in turn, so that noise affects all of them equally."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def alternate(
    variants: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each variant, round by round, after one warm-up round."""
    for run in variants.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            started = clock()
            run()
            seconds[name].append(clock() - started)
    return seconds


def spread(values: list[float]) -> dict[str, float]:
    """Median, minimum and maximum, rounded to five significant digits."""
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: float(f"{value:.5g}") for name, value in found.items()}


def ratios(seconds: dict[str, list[float]], base: str) -> dict[str, dict[str, float]]:
    """The ratio of each variant to `base`, round by round."""
    return {
        name: spread([a / b for a, b in zip(values, seconds[base], strict=True)])
        for name, values in seconds.items()
        if name != base
    }
