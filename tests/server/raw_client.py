"""A client without a library: it decides when it leaves, and sees what is sent as it is sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from dgemma.server.http.middleware import RequestMiddleware


class RawClient:
    """One request straight into the application."""

    def __init__(
        self, app: RequestMiddleware, path: str, body: Any, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        self._app = app
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._incoming.put_nowait({"type": "http.request", "body": raw})
        self.sent: list[dict[str, Any]] = []
        self._news = asyncio.Event()
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), *headers],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.task = asyncio.create_task(self._app(self._scope, self._incoming.get, self._send))

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def until_sent(self, part: bytes) -> None:
        while part not in self.body:
            self._news.clear()
            await self._news.wait()

    @property
    def status(self) -> int | None:
        return next((m["status"] for m in self.sent if m["type"] == "http.response.start"), None)

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent)

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        self._news.set()
