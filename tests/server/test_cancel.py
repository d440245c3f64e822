"""A client that leaves ends its request at once: the engine's iterators are closed, streaming or not."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from dgemma.server.http.log import CLIENT_LEFT
from server.fake_engine import FakeEngine, Script
from server.raw_client import RawClient
from server.served import CHAT, COMPLETIONS, HELLO, ONCE, app_of, eventually, on_a_port, run, run_unhurried

WAITS = Script(text="x" * 99, holds_at=2)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_cancels_at_once(stream: bool, n: int) -> None:
    async def leave() -> FakeEngine:
        engine = FakeEngine(WAITS)
        client = RawClient(app_of(engine), CHAT, {**HELLO, "stream": stream, "n": n})
        while engine.running < n:
            await asyncio.sleep(0)
        if stream:
            await client.until_sent(b"xxxx")
        client.leave()
        await asyncio.wait_for(client.task, 60)
        assert client.status == (200 if stream else None), "nothing is sent to nobody"
        assert engine.running == 0, "before the event loop ends, which closes all"
        return engine

    engine = run(leave())
    assert engine.running == 0
    assert len(engine.cancelled) == n
    assert engine.finished == []


def test_leaving_while_waiting_in_the_queue_cancels_too() -> None:
    async def leave() -> FakeEngine:
        engine = FakeEngine(Script(text="x", holds_at=0))
        client = RawClient(app_of(engine), COMPLETIONS, ONCE)
        while not engine.running:
            await asyncio.sleep(0)
        client.leave()
        await asyncio.wait_for(client.task, 60)
        return engine

    assert len(run(leave()).cancelled) == 1


def test_leaving_before_the_body_is_whole_asks_the_engine_nothing() -> None:
    async def leave() -> FakeEngine:
        engine = FakeEngine()
        app = app_of(engine)
        client = RawClient(app, CHAT, HELLO)
        client._incoming.get_nowait()
        client._incoming.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
        client.leave()
        await asyncio.wait_for(client.task, 60)
        assert app.state.admission.num_active == 0
        return engine

    assert run(leave()).requests == []


def test_a_departure_is_counted_and_is_no_error() -> None:
    async def leave() -> str:
        engine = FakeEngine(WAITS)
        app = app_of(engine)
        client = RawClient(app, CHAT, HELLO)
        while not engine.running:
            await asyncio.sleep(0)
        client.leave()
        await asyncio.wait_for(client.task, 60)
        return app.state.metrics.render(engine.stats(), num_active=0)

    page = run(leave())
    assert "dgemma_requests_cancelled_total 1" in page
    assert f'status="{CLIENT_LEFT}"' in page


def test_an_end_of_the_whole_server_cancels_too() -> None:
    async def ended() -> FakeEngine:
        engine = FakeEngine(WAITS)
        client = RawClient(app_of(engine), CHAT, {**HELLO, "stream": True})
        await client.until_sent(b"xxxx")
        client.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client.task
        assert engine.running == 0
        return engine

    assert len(run(ended()).cancelled) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_socket_cancels(stream: bool) -> None:
    engine = FakeEngine(WAITS)
    body = json.dumps({**HELLO, "stream": stream})
    request = (
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n{body}"
    )
    with on_a_port(app_of(engine)) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(request.encode())
            eventually(lambda: engine.running == 1)
        eventually(lambda: engine.running == 0)
    assert len(engine.cancelled) == 1


def test_a_client_that_does_not_read_is_gone_in_the_end() -> None:
    class Deaf(RawClient):
        async def _send(self, message: dict[str, Any]) -> None:
            await super()._send(message)
            if message["type"] == "http.response.body":
                await asyncio.sleep(3600)

    async def deaf() -> FakeEngine:
        engine = FakeEngine()
        app = app_of(engine, request_timeout_s=0.02, timeout_grace_s=0.02)
        client = Deaf(app, CHAT, {**HELLO, "stream": True})
        await asyncio.wait_for(client.task, 60)
        assert engine.running == 0
        return engine

    assert len(run_unhurried(deaf()).cancelled) == 1


def test_silence_is_filled_with_comments_that_clients_skip() -> None:
    async def listen() -> bytes:
        client = RawClient(app_of(FakeEngine(WAITS), keep_alive_s=0.01), CHAT, {**HELLO, "stream": True})
        await client.until_sent(b": waiting\n\n: waiting\n\n")
        client.leave()
        await client.task
        return client.body

    assert run(listen()).startswith(b"data: {")
