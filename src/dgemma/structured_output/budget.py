"""The time budget of compiling one constraint."""

from __future__ import annotations

import time

from dgemma.errors import InputError

DEFAULT_SECONDS = 4.5


class TimeBudget:
    """Limits the CPU time of the calling thread, so that load of other threads refuses no constraint."""

    def __init__(self, seconds: float = DEFAULT_SECONDS) -> None:
        self._end = time.thread_time() + seconds
        self._seconds = seconds

    def check(self) -> None:
        """Raise InputError when the time is spent. Called after each bounded amount of work."""
        if time.thread_time() > self._end:
            raise InputError(
                f"the constraint takes more than {self._seconds:g} seconds to compile; simplify it."
            )
