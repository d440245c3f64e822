"""What the server's tests share: an app in this process, one on a real port, and plain requests."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx2

from dgemma.server.app import create_app
from dgemma.server.http.middleware import RequestMiddleware
from dgemma.server.http.settings import Settings
from dgemma.server.run import DrainingServer, listen
from server.fake_engine import FakeEngine, FakeText
from virtual_time import run_virtually

T = TypeVar("T")
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO: dict[str, Any] = {"model": "dgemma", "messages": [{"role": "user", "content": "Hello"}], "seed": 7}
ONCE: dict[str, Any] = {"model": "dgemma", "prompt": "Once", "seed": 7}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


def app_of(engine: FakeEngine | None = None, **settings: Any) -> RequestMiddleware:
    return create_app(Settings(**settings), engine or FakeEngine(), FakeText())


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(120):
            return await work

    return asyncio.run(bounded())


def run_unhurried(work: Coroutine[Any, Any, T]) -> T:
    """In virtual time: a short time limit is over when all wait for it, not when the machine is busy."""
    return run_virtually(lambda loop: work)


def client_of(app: RequestMiddleware, **options: Any) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost", **options)


def ask(
    app: RequestMiddleware,
    method: str,
    path: str,
    *,
    by: Callable[[Coroutine[Any, Any, httpx2.Response]], httpx2.Response] = run,
    **options: Any,
) -> httpx2.Response:
    """One request, in this process. When it is over, nothing of it runs on: looked at before the event loop
    ends, which would close what was forgotten."""

    async def asked() -> httpx2.Response:
        async with client_of(app) as client:
            response = await client.request(method, path, **options)
            assert isinstance(app.state.engine, FakeEngine)
            assert app.state.engine.running == 0
            return response

    return by(asked())


def post(app: RequestMiddleware, path: str, body: Any, **options: Any) -> httpx2.Response:
    return ask(app, "POST", path, json=body, **options)


def error_of(response: httpx2.Response) -> dict[str, Any]:
    """The error, which must have OpenAI's form and nothing beside it."""
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert isinstance(body["error"]["type"], str)
    assert response.headers["content-type"] == "application/json"
    return dict(body["error"])


def events_of(response: httpx2.Response) -> list[dict[str, Any]]:
    """The data of a stream's events; [DONE] must be the last, and is left out."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def named_events_of(response: httpx2.Response) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream that names them, and ends without [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in [part for part in response.text.split("\n\n") if part and not part.startswith(":")]:
        head, data = block.split("\n")
        found.append((head.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def joined(chunks: list[dict[str, Any]], field: str, index: int = 0) -> str:
    """What a client gets that joins one field of the deltas of a choice."""
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(choice["delta"].get(field) or "" for choice in choices)


@contextmanager
def on_a_port(app: RequestMiddleware) -> Iterator[str]:
    """The app behind a real socket, in a thread -> its address."""
    server = DrainingServer(app)
    listener = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=60)
        assert not thread.is_alive()


def eventually(condition: Any, timeout_s: float = 60.0) -> None:
    """Another thread or process shall bring it about."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
