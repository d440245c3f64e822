"""Admission control: a limit on concurrent requests, and draining at shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from dgemma.server.http.errors import server_draining, too_many_requests

_RETRY_WHEN_FULL_S = 1.0


class Admission:
    """Counts the requests in progress. Used from one event loop."""

    def __init__(self, max_concurrent: int) -> None:
        self._max_concurrent = max_concurrent
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_active = 0
        self.is_draining = False

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Hold one of the places, or raise 429 (all in use) or 503 (draining)."""
        if self.is_draining:
            raise server_draining()
        if self.num_active >= self._max_concurrent:
            raise too_many_requests(
                f"{self.num_active} requests are being answered, which is the most; ask again in a moment.",
                _RETRY_WHEN_FULL_S,
            )
        self.num_active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_active -= 1
            if not self.num_active:
                self._idle.set()

    async def drain(self, timeout_s: float) -> bool:
        """Admit no more requests -> whether all had ended before the timeout."""
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
