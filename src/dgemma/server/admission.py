"""Who may come in: not when it is full, and not when it is closing. And when everybody has left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from dgemma.server.api_error import draining, too_many

_RETRY_WHEN_FULL_S = 1.0


class Admission:
    """Counts the requests inside. Used from one event loop."""

    def __init__(self, max_concurrent: int) -> None:
        self._max_concurrent = max_concurrent
        self._empty = asyncio.Event()
        self._empty.set()
        self.num_inside = 0
        self.is_draining = False

    @contextmanager
    def enter(self) -> Iterator[None]:
        if self.is_draining:
            raise draining()
        if self.num_inside >= self._max_concurrent:
            raise too_many(
                f"{self.num_inside} requests are being answered, which is the most; ask again in a moment.",
                _RETRY_WHEN_FULL_S,
            )
        self.num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.num_inside -= 1
            if not self.num_inside:
                self._empty.set()

    async def drain(self, timeout_s: float) -> bool:
        """Let nobody in any more -> whether all had left before the time was up."""
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True
