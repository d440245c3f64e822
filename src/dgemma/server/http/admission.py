"""Admission control: limits on concurrent requests and on buffered bodies, and draining at shutdown."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dgemma.server.http.errors import server_draining, too_many_requests

_RETRY_WHEN_FULL_S = 1.0


class BufferedBytes:
    """The bytes that one request keeps in memory."""

    def __init__(self, on_add: Callable[[int], None]) -> None:
        self._on_add = on_add
        self.count = 0

    def add(self, count: int) -> None:
        """Count more, or less if it is negative; more than the server may keep is refused with 429."""
        self._on_add(count)
        self.count += count


class Admission:
    """Counts the requests in progress. Used from one event loop."""

    def __init__(self, max_concurrent: int, max_buffered_bytes: int) -> None:
        self._max_concurrent = max_concurrent
        self._max_buffered_bytes = max_buffered_bytes
        self._num_buffered_bytes = 0
        self._active_of: Counter[str] = Counter()  # by API key
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_active = 0
        self.is_draining = False

    @contextmanager
    def admit(self, key: str = "") -> Iterator[None]:
        """Hold one of the places, or raise 429 (all in use) or 503 (draining).

        One API key holds at most half of them, so that it cannot lock out the others.
        """
        if self.is_draining:
            raise server_draining()
        if self.num_active >= self._max_concurrent:
            raise too_many_requests(
                f"{self.num_active} requests are being answered, which is the most; ask again in a moment.",
                _RETRY_WHEN_FULL_S,
            )
        if key and self._active_of[key] >= max(1, self._max_concurrent // 2):
            raise too_many_requests(
                f"{self._active_of[key]} requests of this API key are being answered, which is the most; ask "
                "again in a moment.",
                _RETRY_WHEN_FULL_S,
            )
        self.num_active += 1
        self._active_of[key] += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_active -= 1
            self._active_of[key] -= 1
            if not self.num_active:
                self._idle.set()

    @contextmanager
    def buffer(self) -> Iterator[BufferedBytes]:
        """Count the bytes of a body that is arriving, and of its images."""
        buffered = BufferedBytes(self._add_bytes)
        try:
            yield buffered
        finally:
            buffered.add(-buffered.count)

    def _add_bytes(self, count: int) -> None:
        if count > 0 and self._num_buffered_bytes + count > self._max_buffered_bytes:
            raise too_many_requests(
                "too many large bodies are arriving at once; ask again in a moment.", _RETRY_WHEN_FULL_S
            )
        self._num_buffered_bytes += count

    async def drain(self, timeout_s: float) -> bool:
        """Admit no more requests -> whether all had ended before the timeout."""
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
