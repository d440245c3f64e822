"""A run on a terminal: a bar, the losses as a table, a line of facts, all of which stay in place.

It is drawn like an answer (answer_view.py): at rest the hidden cursor stands on the region's first cell, so
that a repaint erases all after it, whatever a resize made of it. rich lays the region out; its own live
display would leave stale rows when a window gets narrower. One thread does all the painting: a step may
take a minute, meanwhile the time goes on and the window may be resized; and Ctrl-C, which reaches the main
thread only, cannot cut an escape sequence in half.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr
from typing import Self, TextIO

from rich.console import Console, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dgemma.cli.views.terminal import (
    BEGIN_UPDATE,
    END_UPDATE,
    HIDE_CURSOR,
    NO_WRAP,
    RESTORE_CURSOR,
    SAVE_CURSOR,
    SHOW_CURSOR,
    WRAP,
    printable,
    switch_off_echo,
    window_size,
)
from dgemma.cli.views.train_view import Bins, TrainView, carried, learning_rate, number
from dgemma.training.report import NOISE_BINS, NOISE_LABELS, HeldOutReport, StepReport, duration

_REPAINTS_PER_SECOND = 8
_SECONDS_BETWEEN_POLLS = 0.25  # at the window's size, while there is no news
_SECONDS_BETWEEN_REPAINTS = 1.0  # ... for the time that is left

_ERASE = f"\r{SAVE_CURSOR}\x1b[K\x1b[B\r\x1b[J{RESTORE_CURSOR}"  # in two steps, see answer_view.py

# The least widths at which the table has all its columns with long names, and with short ones.
_WIDE, _NARROW = 84, 57


class LiveTrainView(TrainView):
    """The run on a terminal. What it showed last stays there when it ends."""

    live = True

    def __init__(
        self, out: TextIO, num_steps: int, start_step: int = 0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out = out
        self._encoding = out.encoding or "ascii"
        self._console = Console(file=out, highlight=False, markup=False, emoji=False)
        self._num_steps, self._start_step = num_steps, start_step
        self._clock = clock
        self._changed = threading.Condition()
        self._has_news, self._ended = True, False
        self._notes: list[str] = []
        self._step: StepReport | None = None
        self._step_at = 0.0
        self._bins: Bins = (None,) * NOISE_BINS
        self._held_out: HeldOutReport | None = None
        self._saved: int | None = None
        self._exits = ExitStack()
        self._painter = threading.Thread(target=self._paint_until_the_end, name="train view", daemon=True)

    def __enter__(self) -> Self:
        self._exits.callback(switch_off_echo())
        self._painter.start()
        self._exits.callback(self._stop)
        if sys.stderr is self._out:  # a warning of some library must not tear the region
            stand_in = _Notes(self._out, self.on_note)
            self._exits.callback(stand_in.finish)
            self._exits.enter_context(redirect_stderr(stand_in))
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def _stop(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._painter.join()

    def on_step(self, report: StepReport) -> None:
        with self._changed:
            self._step, self._step_at = report, self._clock()
            self._bins = carried(self._bins, report.diffusion_by_noise)
            self._wake_painter()

    def on_eval(self, report: HeldOutReport) -> None:
        with self._changed:
            self._held_out = report
            self._wake_painter()

    def on_save(self, step: int) -> None:
        with self._changed:
            self._saved = step
            self._wake_painter()

    def on_note(self, text: str) -> None:
        with self._changed:
            self._notes.append(printable(text, self._encoding))
            self._wake_painter()

    def _wake_painter(self) -> None:
        self._has_news = True
        self._changed.notify()

    def _paint_until_the_end(self) -> None:
        painted_at, window = 0.0, (0, 0)
        try:
            self._out.write(HIDE_CURSOR)
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._has_news or self._ended, _SECONDS_BETWEEN_POLLS)
                    due = self._clock() - painted_at >= _SECONDS_BETWEEN_REPAINTS
                    if not (self._has_news or self._ended or due or window_size(self._out) != window):
                        continue
                    self._has_news = False
                    ended, painted_at, window = self._ended, self._clock(), window_size(self._out)
                    notes, self._notes = self._notes, []
                    rows = self._rows(*window)
                self._out.write(_frame(notes, rows, stays=ended))
                self._out.flush()
                if ended:
                    return
                with self._changed:
                    self._changed.wait_for(lambda: self._ended, 1 / _REPAINTS_PER_SECOND)
        except OSError:
            return  # the terminal is gone; the run goes on

    def _rows(self, width: int, height: int) -> list[str]:
        """The region, drawn. Never the whole window: its first row stays the flow's."""
        self._console.width = max(width, 20)  # what is wider than the window, the window crops
        with self._console.capture() as drawn:
            for part in (self._bar(width), self._table(width), self._status(width)):
                if part is not None:
                    self._console.print(part, no_wrap=True, overflow="crop", crop=True)
        rows = drawn.get().rstrip("\n").split("\n")[: max(1, height - 1)]
        return [row.encode(self._encoding, "replace").decode(self._encoding) for row in rows]

    def _bar(self, width: int) -> RenderableType:
        step = self._step.step if self._step else self._start_step
        texts = [f"step {step}/{self._num_steps}"]
        if self._step is None:
            texts.append("first step ...")
        else:
            eta_s = self._step.eta_s
            left = None if eta_s is None else max(0.0, eta_s - (self._clock() - self._step_at))
            eta = "-" if left is None else duration(left)
            texts += [f"{number(self._step.tokens_per_second, 0)} tok/s", f"eta {eta}"]
        while len(texts) > 1 and sum(len(text) + 2 for text in texts) + 8 > width:
            texts.pop(1)
        first, *rest = (Text(text) for text in texts)
        grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
        for index in range(len(texts) + 1):
            grid.add_column(no_wrap=True, ratio=1 if index == 1 else None)
        bar = ProgressBar(total=max(1, self._num_steps), completed=step)
        grid.add_row(first, bar, *rest)
        return grid

    def _table(self, width: int) -> RenderableType | None:
        if self._step is None and self._held_out is None:
            return None
        wide, with_bins = width >= _WIDE, width >= _NARROW
        names = ["loss", "diffusion", "encoder"] if wide else ["loss", "diff", "enc"]
        ranges = NOISE_LABELS if wide else [f"<{(k + 1) / NOISE_BINS:.1f}" for k in range(NOISE_BINS)]
        names += [f"t {ranges[0]}" if wide else f"t{ranges[0]}", *ranges[1:]] if with_bins else []
        table = Table(box=None, padding=(0, 2 if wide else 1, 0, 0), pad_edge=False, header_style="dim")
        table.add_column("", no_wrap=True)
        for name in names:
            table.add_column(name, justify="right", no_wrap=True, min_width=6 if wide else 5)
        for name, report, values in (
            ("training", self._step, self._bins),
            ("held out", self._held_out, self._held_out.diffusion_by_noise if self._held_out else ()),
        ):
            if report is not None:
                loss = number(report.loss) if isinstance(report, StepReport) else ""
                cells = [loss, number(report.diffusion), number(report.encoder), *map(number, values)]
                table.add_row(name, *cells[: len(names)])
        return table

    def _status(self, width: int) -> RenderableType | None:
        parts = []
        if self._step is not None:
            parts.append(f"lr {learning_rate(self._step.learning_rate)}")
            parts.append(f"grad {number(self._step.grad_norm, 1)}")
        if self._held_out is not None:
            parts.append(f"held out at step {self._held_out.step}")
        if self._saved is not None:
            parts.append(f"saved at step {self._saved}")
        if self._step is not None:
            parts += [f"{self._step.examples:,} examples", f"{self._step.tokens:,} tokens"]
        while len(parts) > 1 and len(" | ".join(parts)) > width:
            parts.pop()
        return Text(" | ".join(parts), style="dim") if parts else None


class _Notes(io.TextIOBase):
    """Stands for stderr while the region is there: whole lines become notes."""

    def __init__(self, out: TextIO, note: Callable[[str], None]) -> None:
        self._out = out
        self._note = note
        self._rest = ""

    def write(self, text: str) -> int:
        *whole, self._rest = (self._rest + text).split("\n")
        if whole:
            self._note("\n".join(whole))
        return len(text)

    def finish(self) -> None:
        if self._rest:
            self._note(self._rest)

    def fileno(self) -> int:
        return self._out.fileno()


def _frame(notes: list[str], rows: list[str], *, stays: bool) -> str:
    """Erase the region, print notes in the flow, draw the region anew: in one write."""
    flow = "".join(f"{note}\n" for note in notes)
    drawn = "\r\n".join(rows)
    if stays:
        return f"{BEGIN_UPDATE}{_ERASE}{flow}{NO_WRAP}{drawn}{WRAP}\r\n{SHOW_CURSOR}{END_UPDATE}"
    # Make space first, scrolling if need be; then nothing scrolls between save and restore.
    down = len(rows) - 1
    make_space = "\x1bD" * down + f"\x1b[{down}A" if down else ""
    frame = f"{NO_WRAP}{make_space}{SAVE_CURSOR}{drawn}{RESTORE_CURSOR}{WRAP}"
    return f"{BEGIN_UPDATE}{_ERASE}{flow}{frame}{END_UPDATE}"
