"""Connections: their number, and how long one may take to send the head of a request.

uvicorn closes a connection that is silent after a response, but not one that never sends a request, or
sends its head byte by byte. Here every connection has a deadline for its next head. When the limit of
connections is reached, the one that has waited longest without a request makes room.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import sys
import time
from collections import OrderedDict
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from dgemma.server.http.log import LOGGER
from dgemma.server.http.settings import Settings

# File descriptors for everything but connections: the listener, logs, model files, the event loop.
_RESERVED_FILES = 64
_SECONDS_BETWEEN_WARNINGS = 10.0


def max_connections(settings: Settings) -> int:
    """The configured limit, or what the process may open."""
    if sys.platform == "win32":  # no limit of this kind
        return settings.max_connections
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.max_connections + _RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(1, soft - _RESERVED_FILES)
    return settings.max_connections


class ConnectionTable:
    """The open connections of one server; those without a request in progress, oldest first."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.limit = max_connections(settings)
        self.num_open = 0
        self.idle: OrderedDict[BoundedConnection, None] = OrderedDict()

    def make_room(self) -> bool:
        """Whether one more connection fits, if necessary in place of the one idle longest."""
        if self.num_open < self.limit:
            return True
        if not self.idle:
            return False
        oldest, _ = self.idle.popitem(last=False)
        oldest.abort()
        return True


class BoundedConnection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol with a limit on connections, and on bytes and seconds of a request's head."""

    table: ConnectionTable  # set by `bounded_protocol`

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._deadline: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        fits = self.table.make_room()
        self.table.num_open += 1
        super().connection_made(transport)
        if fits:
            self._expect_head()
        else:
            self._refuse(b"503 Service Unavailable", "all connections of this server are in use.")

    def connection_lost(self, exc: Exception | None) -> None:
        self.table.num_open -= 1
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._has_request:
            self._stop_waiting()
            return
        self._head_bytes += len(data)
        settings = self.table.settings
        # After an early refusal the rest of its body may still arrive.
        is_body = self.cycle is not None and self.cycle.more_body
        limit = settings.max_body_bytes if is_body else settings.max_header_bytes
        if self._head_bytes > limit and not self.transport.is_closing():
            status = b"431 Request Header Fields Too Large"
            self._refuse(status, f"a request's head has at most {limit} bytes.")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._has_request and not self.transport.is_closing():
            self._expect_head()

    def abort(self) -> None:
        """Close at once, without waiting for what was not sent."""
        self._stop_waiting()
        self.transport.abort()

    @property
    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_head(self) -> None:
        self._stop_waiting()
        self._head_bytes = 0
        self.table.idle[self] = None
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self.table.settings.header_timeout_s, self.abort)

    def _stop_waiting(self) -> None:
        self.table.idle.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, status: bytes, message: str) -> None:
        """Answer before there is a request that the application could answer."""
        body = message.encode()
        self.transport.write(
            b"HTTP/1.1 " + status + b"\r\ncontent-type: text/plain\r\nconnection: close\r\n"
            b"content-length: " + str(len(body)).encode() + b"\r\n\r\n" + body
        )
        self._stop_waiting()
        self.transport.close()


def bounded_protocol(settings: Settings) -> type[BoundedConnection]:
    """The protocol class of one server, with a table of its own."""
    return type("BoundedConnection", (BoundedConnection,), {"table": ConnectionTable(settings)})


class QuietAccept:
    """An exception handler for the event loop: one warning where accepting fails thousands of times.

    A process without file descriptors cannot accept; the event loop then reports each attempt.
    """

    def __init__(self) -> None:
        self._last_s = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._last_s > _SECONDS_BETWEEN_WARNINGS:
            self._last_s = time.monotonic()
            LOGGER.log(logging.WARNING, "no file descriptors left to accept connections")
