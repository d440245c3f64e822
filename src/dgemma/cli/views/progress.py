"""Progress of long work: a bar on a terminal, plain lines in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Self

from dgemma.cli.views.terminal import ERASE_ROW, printable, supports_escapes, window_size

_SECONDS_BETWEEN_LINES = 5.0
_FAILURES_SHOWN = 5


def print_line(line: str) -> None:
    """To stderr: stdout is for results."""
    print(line, file=sys.stderr, flush=True)


class Notice:
    """What goes on, on a terminal, until something else is shown there: at once, before slow imports."""

    def __init__(self, text: str) -> None:
        self._is_shown = sys.stderr.isatty()
        if self._is_shown:
            width = window_size(sys.stderr)[0]
            shown = printable(text, sys.stderr.encoding or "ascii")[: width - 1]  # one row: it is erased
            print(shown, end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def clear(self) -> None:
        if self._is_shown:
            self._is_shown = False
            print(f"\r{ERASE_ROW}" if supports_escapes() else "", end="\r", file=sys.stderr, flush=True)


class FirstFailures:
    """The first few failures of long work, line by line; then once that there are more."""

    def __init__(self, more: str) -> None:
        self._more = more
        self._count = 0

    def lines(self, failure: str | None) -> Iterator[str]:
        """Lines to print after one more item; `failure` is None if it did not fail."""
        if failure is None:
            return
        self._count += 1
        if self._count <= _FAILURES_SHOWN:
            yield failure
        elif self._count == _FAILURES_SHOWN + 1:
            yield self._more


@contextmanager
def byte_progress(
    label: str, total: int, log: Callable[[str], None] = print_line
) -> Iterator[Callable[[int], None]]:
    """Yields `advance(num_bytes)`. Without a terminal, `log` receives a line every few seconds."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(label), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda num_bytes: bar.advance(task, num_bytes)
        return
    done, last_line = 0, time.monotonic()
    size, unit = (1e9, "GB") if total >= 1e9 else (1e6, "MB")

    def advance(num_bytes: int) -> None:
        nonlocal done, last_line
        done += num_bytes
        if time.monotonic() - last_line >= _SECONDS_BETWEEN_LINES:
            last_line = time.monotonic()
            log(f"{label}: {done / size:.2f} of {total / size:.2f} {unit}")

    yield advance


@contextmanager
def count_progress(
    label: str, total: int | None, unit: str, *, done: int = 0
) -> Iterator[Callable[[Iterable[str]], None]]:
    """Yields `advance(lines)`: one more is done; `lines` are printed above the bar."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=total, completed=done)

            def advance_bar(lines: Iterable[str]) -> None:
                for line in lines:
                    bar.console.print(printable(line, bar.console.encoding), markup=False, highlight=False)
                bar.advance(task)

            yield advance_bar
        return
    last_line = time.monotonic()

    def advance(lines: Iterable[str]) -> None:
        nonlocal done, last_line
        for line in lines:
            print_line(line)
        done += 1
        if time.monotonic() - last_line >= _SECONDS_BETWEEN_LINES:
            last_line = time.monotonic()
            of_all = "" if total is None else f" of {total}"
            print_line(f"{label}: {done}{of_all} {unit}")

    yield advance
