"""An OpenAI-compatible server on a real port that does what the prompt says: "ok", "refuse", "break", ..."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

PIECES = ("Salt", " comes", " from rivers.")
USAGE = {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}
_HEAD = "HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\nconnection: close\r\n"


class ScriptedServer:
    """delay_s: before each piece of a "slow" answer. has_usage: whether answers say how long they are."""

    def __init__(self, delay_s: float = 0.2, *, has_usage: bool = True) -> None:
        self.delay_s = delay_s
        self.has_usage = has_usage
        self.models: Any = {"object": "list", "data": [{"id": "scripted"}, {"id": "other"}]}
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.open = 0
        self.most_open = 0

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                await self._answer(reader, writer)
        finally:
            self.open -= 1
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        path = first.split()[1]
        if path == "/v1/models":
            await self._json(writer, 200, self.models)
            return
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.bodies.append(body)
        self.paths.append(path)
        self.headers.append(headers)
        chat = path == "/v1/chat/completions"
        word = body["messages"][0]["content"] if chat else body["prompt"]
        errors = {"refuse": 429, "full": 503, "error": 500, "reject": 400, "key": 401}
        if word in errors:
            message = f"status {errors[word]} \x1b[31m for this"
            await self._json(writer, errors[word], {"error": {"message": message, "type": "x"}})
        elif word == "hang":
            await reader.read()  # until the client leaves
        elif word == "vanish":
            pass
        elif word == "garbage":
            await self._send(writer, _HEAD.format(status=200, kind="application/json"), "\r\n{not json")
        elif body["stream"]:
            await self._stream(writer, word, chat, asked_usage="stream_options" in body)
            if word == "linger":
                await reader.read()
            await self._send(writer, "0\r\n\r\n")
        else:
            await self._whole(writer, word, chat)

    async def _whole(self, writer: asyncio.StreamWriter, word: str, chat: bool) -> None:
        await asyncio.sleep(self.delay_s if word == "slow" else 0)
        text = "".join(PIECES)
        choice = {"message": {"content": text}} if chat else {"text": text}
        usage = {"usage": USAGE} if self.has_usage else {}
        await self._json(writer, 200, {"choices": [] if word == "nothing" else [choice], **usage})

    async def _stream(self, writer: asyncio.StreamWriter, word: str, chat: bool, asked_usage: bool) -> None:
        head = _HEAD.format(status=200, kind="text/event-stream; charset=utf-8")
        await self._send(writer, head, "transfer-encoding: chunked\r\n\r\n")
        await self._chunk(writer, ": a comment\n\n")
        if word == "nothing":
            await self._chunk(writer, "data: [DONE]\n\n")
        if chat:
            await self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        pieces = ("one\u2028line",) if word == "separator" else PIECES
        for number, piece in enumerate(pieces):
            await asyncio.sleep(self.delay_s if word == "slow" else 0)
            if number == 1 and word == "break":
                writer.transport.abort()
                return
            if number == 1 and word == "stop":
                return  # a tidy end, without [DONE]
            if number == 1 and word == "error in stream":
                await self._event(writer, {"error": {"message": "a step failed"}})
            choice = {"delta": {"content": piece}} if chat else {"text": piece}
            await self._event(writer, {"choices": [choice]})
        if self.has_usage and asked_usage:
            await self._event(writer, {"choices": [], "usage": USAGE})
        await self._chunk(writer, "data: [DONE]\n\n")

    async def _event(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        await self._chunk(writer, f"data: {json.dumps(event, ensure_ascii=False)}\n\n")

    async def _chunk(self, writer: asyncio.StreamWriter, text: str) -> None:
        await self._send(writer, f"{len(text.encode()):x}\r\n{text}\r\n")

    async def _json(self, writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        text = json.dumps(value)
        head = _HEAD.format(status=status, kind="application/json")
        await self._send(writer, head, f"content-length: {len(text)}\r\n\r\n{text}")

    async def _send(self, writer: asyncio.StreamWriter, *texts: str) -> None:
        writer.write("".join(texts).encode())
        await writer.drain()


@contextmanager
def listening(server: ScriptedServer) -> Iterator[str]:
    """The server in a thread, until the block ends -> its address."""
    started = threading.Event()
    state: dict[str, Any] = {}

    async def live() -> None:
        state["loop"], state["end"] = asyncio.get_running_loop(), asyncio.Event()
        listener = await asyncio.start_server(server.meet, "127.0.0.1", 0, backlog=512)
        state["port"] = listener.sockets[0].getsockname()[1]
        started.set()
        await state["end"].wait()
        listener.close()

    thread = threading.Thread(target=lambda: asyncio.run(live()), daemon=True)
    thread.start()
    assert started.wait(60)
    try:
        yield f"http://127.0.0.1:{state['port']}"
    finally:
        state["loop"].call_soon_threadsafe(state["end"].set)
        thread.join(timeout=60)
        assert not thread.is_alive()
