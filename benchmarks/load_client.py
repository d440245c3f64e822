"""A light client for load: one request on one connection, which it may leave whenever it likes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

HOST = "127.0.0.1"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Longer than any answer takes: who waits so long has lost it.
_PATIENCE_S = 300.0


@dataclass(frozen=True)
class Leaving:
    """When a client goes: after so many seconds, or so many events of its stream; politely or not."""

    after_s: float
    after_events: int | None = None
    abruptly: bool = False


@dataclass
class Reply:
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    num_events: int = 0  # of a stream
    first_draft_s: float | None = None
    is_complete: bool = False  # its last byte has come
    has_left: bool = False  # we have
    failure: str | None = None  # what became of the connection
    seconds: float = 0.0

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def is_done(self) -> bool:
        """Whether it is whole, and a stream says so itself."""
        return self.is_complete and (not self.is_stream or self.body.endswith(b"data: [DONE]\n\n"))

    @property
    def retry_after_s(self) -> float | None:
        value = self.headers.get("retry-after", "")
        return float(value) if value.isdigit() else None

    def events(self) -> list[dict[str, Any]]:
        lines = [line for line in self.body.split(b"\n\n") if line.startswith(b"data: {")]
        return [json.loads(line.removeprefix(b"data: ")) for line in lines]

    def error(self) -> dict[str, Any] | None:
        """The error, in OpenAI's form and with nothing beside it; in a stream, its last event."""
        try:
            found = (self.events() or [{}])[-1] if self.is_stream else json.loads(self.body)
        except ValueError:
            return None
        error = found.get("error") if isinstance(found, dict) and len(found) == 1 else None
        if not isinstance(error, dict) or error.keys() != {"message", "type", "param", "code"}:
            return None
        return error


async def ask(
    port: int,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    request_id: str = "load",
    headers: dict[str, str] | None = None,
    leaving: Leaving | None = None,
    sent: asyncio.Event | None = None,
) -> Reply:
    """One request; without a body, a GET. `sent` is set when its last byte is on its way."""
    reply, began = Reply(), time.perf_counter()
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(leaving.after_s if leaving else _PATIENCE_S):
            reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 22)
            writer.write(_request(path, body, {"x-request-id": request_id, **(headers or {})}))
            await writer.drain()
            if sent is not None:
                sent.set()
            await _read_head(reader, reply)
            async for piece in _pieces(reader, reply):
                reply.body += piece
                reply.num_events += piece.count(b"data: ") if reply.is_stream else 0
                if reply.first_draft_s is None and b'"draft"' in piece:
                    reply.first_draft_s = time.perf_counter() - began
                if leaving and leaving.after_events and reply.num_events >= leaving.after_events:
                    reply.has_left = True
                    break
            else:
                reply.is_complete = True
    except TimeoutError:
        reply.has_left = leaving is not None
        reply.failure = None if leaving else f"nothing for {_PATIENCE_S:g} seconds"
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        reply.failure = f"{type(error).__name__}: {error}"
    finally:
        reply.seconds = time.perf_counter() - began
        if writer is not None:
            if leaving and leaving.abruptly:
                writer.transport.abort()
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
    return reply


def _request(path: str, body: dict[str, Any] | None, headers: dict[str, str]) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    if body is not None:
        headers = {"content-type": "application/json", "content-length": str(len(content)), **headers}
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"host: {HOST}", "connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + content


async def _read_head(reader: asyncio.StreamReader, reply: Reply) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    reply.status = int(head[0].split()[1])
    for line in head[1:-2]:
        name, _, value = line.partition(":")
        reply.headers[name.lower()] = value.strip()


async def _pieces(reader: asyncio.StreamReader, reply: Reply) -> AsyncIterator[bytes]:
    if reply.headers.get("transfer-encoding") != "chunked":
        yield await reader.readexactly(int(reply.headers["content-length"]))
        return
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
