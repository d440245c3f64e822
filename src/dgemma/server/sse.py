"""Server-sent events: a stream of bytes that stays alive, and ends with a word when it cannot go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from starlette.types import Send

DONE = b"data: [DONE]\n\n"
# A line that begins with a colon is a comment: every client skips it.
_COMMENT = b": waiting\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or a proxy may keep the events for itself
]


def event_bytes(data: bytes) -> bytes:
    """One event. JSON has no line breaks of its own, so one line is enough."""
    return b"data: " + data + b"\n\n"


class EventStream:
    """One response, written as it comes."""

    def __init__(self, send: Send, *, keep_alive_s: float) -> None:
        self._send = send
        self._keep_alive_s = keep_alive_s

    async def run(
        self, chunks: AsyncGenerator[bytes, None], last_words: Callable[[Exception], bytes]
    ) -> None:
        """Send all chunks; if they break off, send what `last_words` makes of the error, and end in order."""
        await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        pending: asyncio.Task[bytes | None] | None = None
        try:
            while True:
                pending = pending or asyncio.create_task(_next(chunks))
                done, _ = await asyncio.wait({pending}, timeout=self._keep_alive_s)
                if not done:
                    await self._write(_COMMENT)
                    continue
                try:
                    chunk = pending.result()
                except Exception as error:
                    chunk = last_words(error)
                    await self._write(chunk)
                    break
                pending = None
                if chunk is None:
                    break
                await self._write(chunk)
        finally:
            if pending is not None:
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})


async def _next(chunks: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(chunks, None)
