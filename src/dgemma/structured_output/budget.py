"""The time budget of compiling one constraint."""

from __future__ import annotations

import time
from collections.abc import Callable

from dgemma.errors import InputError

DEFAULT_SECONDS = 4.5


class TimeBudget:
    """Limits the CPU time of the calling thread, so that load of other threads refuses no constraint.

    on_check: called at each check; it may wait, to let other compilations go first, or raise.
    """

    def __init__(self, seconds: float = DEFAULT_SECONDS, on_check: Callable[[], None] = lambda: None) -> None:
        self._end = time.thread_time() + seconds
        self._seconds = seconds
        self._on_check = on_check

    def check(self) -> None:
        """Raise InputError when the time is spent. Called after each bounded amount of work."""
        if time.thread_time() > self._end:
            raise InputError(
                f"the constraint takes more than {self._seconds:g} seconds to compile; simplify it."
            )
        self._on_check()
