"""Server-sent events with keep-alive comments, and cancellation when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Send

DONE = b"data: [DONE]\n\n"
# A line that begins with a colon is a comment: every client skips it.
_COMMENT = b": waiting\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # else a proxy may buffer the events
]


def event_bytes(data: bytes, name: str | None = None) -> bytes:
    """One event. JSON as the server writes it has no line breaks, so one data line is enough."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


class EventStream:
    """One streamed response."""

    def __init__(self, send: Send, *, keep_alive_s: float) -> None:
        self._send = send
        self._keep_alive_s = keep_alive_s

    async def run(
        self, chunks: AsyncGenerator[bytes, None], error_event: Callable[[Exception], bytes]
    ) -> None:
        """Send all chunks. If they raise, send `error_event` of the exception and end the response."""
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
                    chunk = error_event(error)
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


async def while_connected(
    receive: Receive, work: Coroutine[Any, Any, None], is_answered: Callable[[], bool]
) -> None:
    """Run `work`; when the client disconnects, cancel it and wait for its cleanup.

    Nothing else may read `receive` meanwhile: the body has been read. `is_answered`: whether the last byte
    was sent; a disconnect after that cancels nothing.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if is_answered():
            await asyncio.wait({task})
        has_left = not task.done()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
    if has_left:
        raise ClientDisconnect
    task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
