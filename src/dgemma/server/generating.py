"""The way of a generating request over HTTP: admitted, read, answered whole or in a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dgemma.server.api_error import to_json
from dgemma.server.asked import Asked, Form, read_asked
from dgemma.server.asked_work import AskedWork
from dgemma.server.body import read_object
from dgemma.server.connection import while_connected
from dgemma.server.record import RequestRecord, note_error, record_of
from dgemma.server.replies import Reply
from dgemma.server.sse import EventStream, event_bytes
from dgemma.server.state import ServerState


class GeneratedResponse(Response):
    """A response that does its work when it is sent, because only then it can see the client leave."""

    def __init__(self, state: ServerState, form: Form) -> None:
        super().__init__()
        self._state = state
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        settings, record = self._state.settings, record_of(scope)
        with self._state.admission.enter():
            try:
                body = await read_object(
                    Request(scope, receive),
                    max_bytes=settings.max_body_bytes,
                    timeout_s=settings.body_timeout_s,
                )
                work = self._answer(body, record, send)
                await while_connected(receive, work, lambda: record.is_answered)
            except ClientDisconnect:
                record.has_left = True

    async def _answer(self, body: Mapping[str, Any], record: RequestRecord, send: Send) -> None:
        asked = await read_asked(self._state, self._form, body, record)
        settings = self._state.settings
        try:
            # After the engine's time and its grace, the client has as much grace to read.
            async with asyncio.timeout(settings.request_timeout_s + 2 * settings.timeout_grace_s):
                if asked.plan.stream:
                    await self._stream(asked, send)
                else:
                    await _send_whole(send, await asked.whole())
        except TimeoutError:  # who does not read what is sent is gone, whatever its socket says
            raise ClientDisconnect from None

    async def _stream(self, asked: Asked | AskedWork, send: Send) -> None:
        end = self._form.end_of_stream
        async with asked.replies() as replies, aclosing(_chunks(replies, end)) as chunks:
            stream = EventStream(send, keep_alive_s=self._state.settings.keep_alive_s)
            await stream.run(chunks, lambda error: _last_words(error, asked.record))


async def _chunks(replies: AsyncGenerator[Reply, None], end: bytes) -> AsyncGenerator[bytes, None]:
    async with aclosing(replies):
        async for reply in replies:
            yield event_bytes(reply.to_json())
    if end:
        yield end


def _last_words(error: Exception, record: RequestRecord) -> bytes:
    """The last event of a stream that cannot go on: its status was sent long ago."""
    return event_bytes(to_json(note_error(error, record).body()))


async def _send_whole(send: Send, reply: Reply) -> None:
    content = reply.to_json()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})
