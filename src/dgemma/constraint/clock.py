"""The time that compiling a constraint may take."""

from __future__ import annotations

import time

from dgemma.errors import InputError


class Clock:
    """Refuses to go on when the time is up: the thread's own, so that a busy machine refuses nothing more."""

    def __init__(self, seconds: float) -> None:
        self._end = time.thread_time() + seconds
        self._seconds = seconds

    def check(self) -> None:
        if time.thread_time() > self._end:
            raise InputError(
                f"the constraint takes more than {self._seconds:g} seconds to compile; simplify it."
            )
