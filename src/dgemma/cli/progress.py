"""Progress of long work: a bar on a terminal, plain lines in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def byte_progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields `advance(num_bytes)`. Everything goes to stderr: stdout belongs to results."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(label), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda num_bytes: bar.advance(task, num_bytes)
        return
    done, last_line = 0, time.monotonic()

    def advance(num_bytes: int) -> None:
        nonlocal done, last_line
        done += num_bytes
        if time.monotonic() - last_line >= _SECONDS_BETWEEN_LINES:
            last_line = time.monotonic()
            print(f"{label}: {done / 1e9:.2f} of {total / 1e9:.2f} GB", file=sys.stderr, flush=True)

    yield advance
