"""Middleware around all routes: request id, API key, exceptions, the log line and the request metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dgemma.server.http.auth import ApiKeyAuth
from dgemma.server.http.errors import error_response, server_draining
from dgemma.server.http.log import CLIENT_LEFT, RequestRecord, begin_record, log_request, note_error
from dgemma.server.http.models import MODELS_PATH
from dgemma.server.http.tracing import open_tracing
from dgemma.server.state import ServerState


class RequestMiddleware:
    """The ASGI application that uvicorn runs. No exception of a request leaves it."""

    def __init__(self, app: ASGIApp, state: ServerState, paths: Collection[str]) -> None:
        self._app = app
        self.state = state
        self._paths = frozenset(paths)  # labels of the request metrics
        self._auth = ApiKeyAuth(state.settings.api_keys)
        self.tracing = open_tracing()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = begin_record(scope)
        if self.tracing is not None:
            record.trace = self.tracing.begin(scope, record, self._endpoint(record.path))

        async def recorded_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", record.id.encode())]
                if record.trace is not None:
                    message["headers"].append((b"traceresponse", record.trace.header))
            elif message["type"] == "http.response.body":
                record.is_answered = not message.get("more_body", False)
            await send(message)

        try:
            self._auth.check(scope)
            await self._app(scope, receive, recorded_send)
        except asyncio.CancelledError:  # the server ends at once
            record.has_left = True
            if record.status is None:
                await error_response(server_draining())(scope, receive, recorded_send)
            raise
        except Exception as error:
            note_error(error, record)
            if record.status is None:
                assert record.error is not None
                await error_response(record.error)(scope, receive, recorded_send)
        finally:
            self._close(record)

    def _close(self, record: RequestRecord) -> None:
        metrics = self.state.metrics
        if record.has_left:
            record.status = record.status or CLIENT_LEFT
            metrics.cancelled.inc()
        endpoint = self._endpoint(record.path)
        metrics.requests.labels(endpoint=endpoint, status=str(record.status)).inc()
        metrics.durations.labels(endpoint=endpoint).observe(record.elapsed_s)
        if record.trace is not None:
            record.trace.end(record)
        log_request(record, with_text=self.state.settings.log_text)

    def _endpoint(self, path: str) -> str:
        """A metrics label: of few values, whatever paths clients request."""
        if path.startswith(f"{MODELS_PATH}/"):
            return f"{MODELS_PATH}/{{model}}"
        return path if path in self._paths else "other"
