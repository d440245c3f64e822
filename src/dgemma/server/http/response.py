"""The HTTP response of a POST endpoint: admission, body, disconnects, whole or streamed."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dgemma.server.http.admission import BufferedBytes
from dgemma.server.http.body import read_object
from dgemma.server.http.errors import to_json
from dgemma.server.http.log import RequestRecord, note_error, record_of
from dgemma.server.http.sse import EventStream, event_bytes, while_connected
from dgemma.server.pipeline import Endpoint, RequestRunner, TextEndpoint, note_prompt, prepare, with_images
from dgemma.server.protocol import ResponseModel
from dgemma.server.serving import ServingContext
from dgemma.server.state import ServerState
from dgemma.server.validation import flattened


class BodyResponse(Response, ABC):
    """A response that runs its request while it is sent: only then can it see the client disconnect."""

    def __init__(self, state: ServerState) -> None:
        super().__init__()
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        settings, record = self._state.settings, record_of(scope)
        admission = self._state.admission
        self._state.rate_limits.of(record.key).admit()
        with admission.admit(record.key.name):
            try:
                with admission.buffer() as buffered:
                    body = await read_object(
                        Request(scope, receive),
                        max_bytes=settings.max_body_bytes,
                        timeout_s=settings.body_timeout_s,
                        max_image_bytes=self._state.images.max_body_bytes,
                        on_bytes=buffered.add,
                    )
                    work = self._respond(body, record, send, buffered)
                    del body  # images are large, and only needed until they are loaded
                    await while_connected(receive, work, lambda: record.is_answered)
            except ClientDisconnect:
                record.has_left = True

    @abstractmethod
    async def _respond(
        self, body: Mapping[str, Any], record: RequestRecord, send: Send, buffered: BufferedBytes
    ) -> None:
        """Answer. `buffered` counts the body, until it is read, and the images in memory."""


class ComputedResponse(BodyResponse):
    """The response of an endpoint without an engine: made whole in a thread, so that streams go on."""

    def __init__(self, state: ServerState, endpoint: TextEndpoint) -> None:
        super().__init__(state)
        self._endpoint = endpoint

    async def _respond(
        self, body: Mapping[str, Any], record: RequestRecord, send: Send, buffered: BufferedBytes
    ) -> None:
        body = flattened(body)
        context = await with_images(self._state, self._endpoint, body, record, buffered.add)
        record.model, content = await asyncio.to_thread(self._answer, context, body)
        note_prompt(self._state, self._endpoint, body, record)
        await _send_whole(send, content)

    def _answer(self, context: ServingContext, body: Mapping[str, Any]) -> tuple[str, bytes]:
        model, response = self._endpoint.answer(context, body)
        return model, response.to_json()


class GeneratedResponse(BodyResponse):
    """The response of an endpoint of the engine."""

    def __init__(self, state: ServerState, endpoint: Endpoint) -> None:
        super().__init__(state)
        self._endpoint = endpoint

    async def _respond(
        self, body: Mapping[str, Any], record: RequestRecord, send: Send, buffered: BufferedBytes
    ) -> None:
        num_body_bytes = buffered.count
        runner = await prepare(self._state, self._endpoint, body, record, buffered.add)
        del body
        buffered.add(-num_body_bytes)
        settings = self._state.settings
        try:
            # After the engine's time and its grace, the client has as much grace to read.
            async with asyncio.timeout(settings.request_timeout_s + 2 * settings.timeout_grace_s):
                if runner.plan.stream:
                    await self._stream(runner, send)
                else:
                    await _send_whole(send, (await runner.response()).to_json())
        except TimeoutError:  # a client that does not read counts as disconnected
            raise ClientDisconnect from None

    async def _stream(self, runner: RequestRunner, send: Send) -> None:
        end = self._endpoint.end_of_stream
        async with runner.stream() as chunks, aclosing(_events(chunks, end)) as events:
            stream = EventStream(send, keep_alive_s=self._state.settings.keep_alive_s)
            await stream.run(events, lambda error: _error_event(error, runner))


async def _events(chunks: AsyncGenerator[ResponseModel, None], end: bytes) -> AsyncGenerator[bytes, None]:
    async with aclosing(chunks):
        async for chunk in chunks:
            yield event_bytes(chunk.to_json(), chunk.event_name)
    if end:
        yield end


def _error_event(error: Exception, runner: RequestRunner) -> bytes:
    """The last event of a stream that failed: its status line was sent before."""
    api_error = note_error(error, runner.record)
    chunk = runner.plan.writer.error_chunk(api_error)
    if chunk is None:
        return event_bytes(to_json(api_error.body()))
    return event_bytes(chunk.to_json(), chunk.event_name)


async def _send_whole(send: Send, content: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})
