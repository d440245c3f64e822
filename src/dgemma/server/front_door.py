"""Around all endpoints: a request's id and key, whatever goes wrong, its line in the log, its count."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dgemma.server import chat, completions, decisions, edit, fim, health, infill, models
from dgemma.server.api_error import draining, error_response
from dgemma.server.keys import ApiKeys
from dgemma.server.log import log_request
from dgemma.server.record import CLIENT_LEFT, RequestRecord, begin_record, note_error
from dgemma.server.state import ServerState

_KNOWN_PATHS = (
    chat.PATH, completions.PATH, fim.PATH, infill.PATH, edit.PATH, decisions.PATH, decisions.SYSTEM_ONE_PATH,
    models.PATH, health.HEALTH_PATH, health.READY_PATH, health.METRICS_PATH, "/openapi.json",
)  # fmt: skip


class FrontDoor:
    """The application that a server runs. Nothing that happens in one request leaves it as an exception."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self.state = state
        self._keys = ApiKeys(state.settings.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = begin_record(scope)

        async def noted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", record.id.encode())]
            elif message["type"] == "http.response.body":
                record.is_answered = not message.get("more_body", False)
            await send(message)

        try:
            self._keys.check(scope)
            await self._app(scope, receive, noted_send)
        except asyncio.CancelledError:  # the server ends at once
            record.has_left = True
            if record.status is None:
                await error_response(draining())(scope, receive, noted_send)
            raise
        except Exception as error:
            note_error(error, record)
            if record.status is None:
                assert record.error is not None
                await error_response(record.error)(scope, receive, noted_send)
        finally:
            self._close(record)

    def _close(self, record: RequestRecord) -> None:
        if record.has_left:
            record.status = record.status or CLIENT_LEFT
            self.state.metrics.cancelled.add()
        endpoint = _endpoint(record.path)
        self.state.metrics.requests.add(endpoint=endpoint, status=str(record.status))
        self.state.metrics.durations.observe(record.elapsed_s, endpoint=endpoint)
        log_request(record, with_text=self.state.settings.log_text)


def _endpoint(path: str) -> str:
    """A label for metrics: of few values, whatever clients ask for."""
    if path.startswith(f"{models.PATH}/"):
        return f"{models.PATH}/{{model}}"
    return path if path in _KNOWN_PATHS else "other"
