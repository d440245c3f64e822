"""A run while it trains: on a terminal a bar and a table that stay in place, in a pipe a line every ten
seconds.

Everything goes to stderr: stdout is for results.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable
from typing import Self, TextIO

from dgemma.cli.views.terminal import printable, supports_escapes
from dgemma.training.callbacks import TrainerCallback
from dgemma.training.report import NOISE_BINS, HeldOutReport, StepReport, duration

SECONDS_BETWEEN_LINES = 10.0


class TrainView(TrainerCallback):
    """Displays a run; used in a `with`."""

    live = False
    """Does it stay in place on a terminal?"""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


def open_train_view(num_steps: int, start_step: int = 0) -> TrainView:
    """The view that stderr can show, of a run that goes on from `start_step`."""
    if supports_escapes() and sys.stderr.isatty():
        from dgemma.cli.views.live_train_view import LiveTrainView

        return LiveTrainView(sys.stderr, num_steps, start_step)
    return PlainTrainView(sys.stderr, num_steps)


class PlainTrainView(TrainView):
    """A line for the first step, then every ten seconds, and for the last one; what is rare, at once."""

    def __init__(self, out: TextIO, num_steps: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._num_steps = num_steps
        self._clock = clock
        self._last_line = float("-inf")
        self._unprinted: StepReport | None = None
        self._bins: Bins = (None,) * NOISE_BINS

    def __exit__(self, *_: object) -> None:
        if self._unprinted is not None:  # interrupted: how far it came
            self._print_step(self._unprinted)

    def on_step(self, report: StepReport) -> None:
        self._bins = carried(self._bins, report.diffusion_by_noise)
        self._unprinted = report
        is_last = report.step >= self._num_steps
        if is_last or self._clock() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._print_step(report)

    def on_eval(self, report: HeldOutReport) -> None:
        self.on_note(held_out_line(report))

    def on_save(self, step: int) -> None:
        self.on_note(f"saved at step {step}")

    def on_note(self, text: str) -> None:
        print(printable(text, self._out.encoding or "ascii"), file=self._out, flush=True)

    def _print_step(self, report: StepReport) -> None:
        self._last_line = self._clock()
        self._unprinted = None
        self.on_note(step_line(report, self._num_steps, self._bins))


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
