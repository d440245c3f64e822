"""A run while it trains: on a terminal a bar and a table that stay in place, in a pipe a line now and then.

Everything goes to stderr: stdout belongs to results.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Protocol, Self, TextIO

from dgemma.cli.live_view import printable
from dgemma.cli.train_text import Bins, carried, held_out_line, step_line
from dgemma.training.report import NOISE_BINS, HeldOutReport, StepReport

SECONDS_BETWEEN_LINES = 10.0


class TrainView(Protocol):
    """Where a run says what it does. Use it in a `with`."""

    live: bool
    """Does it stay in place on a terminal?"""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def step(self, report: StepReport) -> None: ...
    def held_out(self, report: HeldOutReport) -> None: ...
    def saved(self, step: int) -> None: ...
    def note(self, text: str) -> None: ...


def open_train_view(num_steps: int, start_step: int = 0) -> TrainView:
    """The view that stderr can show, of a run that goes on from `start_step`."""
    terminal = os.environ.get("TERM", "")
    # Windows sets no TERM; of its terminals, the one that obeys escape sequences says who it is.
    able = terminal != "dumb" and bool(terminal or os.environ.get("WT_SESSION"))
    if able and sys.stderr.isatty():
        from dgemma.cli.live_train_view import LiveTrainView  # and with it rich

        return LiveTrainView(sys.stderr, num_steps, start_step)
    return PlainTrainView(sys.stderr, num_steps)


class PlainTrainView:
    """A line for the first step, then every ten seconds, and for the last one; what is rare, at once."""

    live = False

    def __init__(self, out: TextIO, num_steps: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._num_steps = num_steps
        self._clock = clock
        self._last_line = float("-inf")
        self._unsaid: StepReport | None = None
        self._bins: Bins = (None,) * NOISE_BINS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._unsaid is not None:  # interrupted: how far it came
            self._say_step(self._unsaid)

    def step(self, report: StepReport) -> None:
        self._bins = carried(self._bins, report.diffusion_by_noise)
        self._unsaid = report
        is_last = report.step >= self._num_steps
        if is_last or self._clock() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._say_step(report)

    def held_out(self, report: HeldOutReport) -> None:
        self.note(held_out_line(report))

    def saved(self, step: int) -> None:
        self.note(f"saved at step {step}")

    def note(self, text: str) -> None:
        print(printable(text, self._out.encoding or "ascii"), file=self._out, flush=True)

    def _say_step(self, report: StepReport) -> None:
        self._last_line = self._clock()
        self._unsaid = None
        self.note(step_line(report, self._num_steps, self._bins))
