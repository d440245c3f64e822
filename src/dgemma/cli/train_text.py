"""A report of a run in words: the numbers of a training view, short enough for a line."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dgemma.training.report import HeldOutReport, StepReport, duration

Bins = tuple[float | None, ...]
"""Losses by noise level; None: not seen yet."""


def step_line(report: StepReport, num_steps: int, bins: Bins) -> str:
    return "  ".join(
        [
            f"step {report.step}/{num_steps}",
            f"loss {number(report.loss)} ({_losses(report)})",
            f"by noise {_row(bins)}",
            f"lr {learning_rate(report.learning_rate)}",
            f"grad {number(report.grad_norm, 1)}",
            f"{number(report.tokens_per_second, 0)} tok/s",
            f"eta {'-' if report.eta_s is None else duration(report.eta_s)}",
        ]
    )


def held_out_line(report: HeldOutReport) -> str:
    return "  ".join(
        [
            f"held out at step {report.step}",
            _losses(report),
            f"by noise {_row(report.diffusion_by_noise)}",
            f"{report.examples} examples in {duration(report.seconds)}",
        ]
    )


def number(value: float | None, decimals: int = 2) -> str:
    """With so many decimals, more if it is small, fewer if it is large: at most six characters."""
    if value is None:
        return "-"
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if size >= 99999.5 or 0 < size < 0.001:
        mantissa, exponent = f"{value:.0e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    if size >= 100:
        return f"{value:.0f}"
    if 0 < size < 10.0**-decimals:
        return f"{value:.1g}"
    return f"{value:.{decimals}f}"


def learning_rate(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def carried(before: Bins, now: Bins) -> Bins:
    """A step of few examples misses some bins: there, what was seen last."""
    return tuple(old if new is None else new for old, new in zip(before, now, strict=True))


def _losses(report: StepReport | HeldOutReport) -> str:
    return f"diffusion {number(report.diffusion)}, encoder {number(report.encoder)}"


def _row(bins: Iterable[float | None]) -> str:
    return " ".join(number(value, 1) for value in bins)
