"""A server that is told to end takes nothing new, and finishes what it has accepted."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from dgemma.errors import InputError
from dgemma.server.run import DrainingServer, listen
from server.fake_engine import FakeEngine, Script
from server.raw_client import RawClient
from server.served import CHAT, HELLO, app_of, client_of, error_of, joined, on_a_port, run, run_unhurried

ROOT = Path(__file__).parents[2]


def test_draining_refuses_new_requests_and_finishes_running_ones() -> None:
    async def drained() -> None:
        engine = FakeEngine(Script(text="x" * 40, delay_s=0.05))
        app = app_of(engine)
        inside = RawClient(app, CHAT, {**HELLO, "stream": True})
        while not engine.running:
            await asyncio.sleep(0)
        ending = asyncio.create_task(app.state.drain())
        await asyncio.sleep(0)
        async with client_of(app) as client:
            refused = await client.post(CHAT, json=HELLO)
            assert refused.status_code == 503
            assert error_of(refused)["code"] == "draining"
            assert int(refused.headers["retry-after"]) > 0
            not_ready = await client.get("/ready")
            assert (not_ready.status_code, error_of(not_ready)["code"]) == (503, "draining")
            assert (await client.get("/health")).status_code == 200
        assert not engine.is_draining, "the engine still works for those inside"
        assert await ending
        await inside.task
        assert inside.body.endswith(b"data: [DONE]\n\n")
        assert engine.is_draining

    run_unhurried(drained())


def test_draining_does_not_wait_for_ever() -> None:
    async def drained() -> bool:
        engine = FakeEngine(Script(text="x", holds_at=0))
        app = app_of(engine, drain_timeout_s=0.05)
        client = RawClient(app, CHAT, HELLO)
        while not engine.running:
            await asyncio.sleep(0)
        all_left = await app.state.drain()
        client.leave()
        await client.task
        return all_left

    assert not run_unhurried(drained())


def test_an_engine_that_cannot_drain_does_not_keep_the_process(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(FakeEngine):
        async def drain(self, timeout_s: float) -> None:
            raise RuntimeError("a thread ended")

    async def drained() -> bool:
        server = DrainingServer(app_of(Stuck()))
        server.begin_drain()
        server.begin_drain()
        while not server.should_exit:
            await asyncio.sleep(0)
        return server.force_exit

    assert not run(drained())
    assert caplog.text.count("draining failed") == 1


@contextmanager
def server_process(go: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """go: the file that its answers wait for."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    process = subprocess.Popen(
        [sys.executable, "-m", "server.slow_server", str(go)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        assert process.stderr is not None
        line = next(entry for entry in map(json.loads, process.stderr) if entry["event"] == "listening")
        yield process, f"http://127.0.0.1:{line['port']}"
    finally:
        process.kill()
        process.communicate()


def test_after_one_signal_accepted_answers_are_finished(tmp_path: Path) -> None:
    with server_process(tmp_path / "go") as (process, address), httpx2.Client(timeout=60) as client:
        body = {**HELLO, "stream": True}
        with client.stream("POST", address + CHAT, json=body) as response:
            lines = response.iter_lines()
            assert "assistant" in next(lines)
            process.send_signal(signal.SIGTERM)
            with httpx2.Client(timeout=60) as other:
                while other.get(address + "/ready").status_code == 200:
                    time.sleep(0.02)
                refused = other.post(address + CHAT, json=HELLO)
                assert refused.status_code == 503
                assert error_of(refused)["code"] == "draining"
            (tmp_path / "go").touch()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in rest[:-1]]
        assert joined(chunks, "content") == "x" * 100
        assert process.wait(120) == 0


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with server_process(tmp_path / "never") as (process, address), httpx2.Client(timeout=60) as client:
        with client.stream("POST", address + CHAT, json={**HELLO, "stream": True}) as response:
            lines = response.iter_lines()
            assert "assistant" in next(lines)
            process.send_signal(signal.SIGTERM)
            with httpx2.Client(timeout=60) as other:
                while other.get(address + "/ready").status_code == 200:
                    time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx2.HTTPError):
                list(lines)
        assert process.wait(120) == 0


def test_a_second_signal_tells_those_who_wait_and_logs_no_failure(tmp_path: Path) -> None:
    with server_process(tmp_path / "never") as (process, address), ThreadPoolExecutor(1) as waiting:
        asked = waiting.submit(httpx2.post, address + CHAT, json=HELLO, timeout=120)
        with httpx2.Client(timeout=60) as other:
            while "dgemma_requests_in_progress 1" not in other.get(address + "/metrics").text:
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            while other.get(address + "/ready").status_code == 200:
                time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        refused = asked.result(120)
        assert (refused.status_code, error_of(refused)["code"]) == (503, "draining")
        assert process.wait(120) == 0
        assert process.stderr is not None
        assert {json.loads(line)["level"] for line in process.stderr} == {"info"}


@pytest.mark.parametrize(
    ("settings", "warned"),
    [({}, False), ({"host": "::"}, True), ({"host": "::", "api_keys": ("k",)}, False)],
)
def test_an_open_port_without_a_key_is_worth_a_warning(
    caplog: pytest.LogCaptureFixture, settings: dict[str, Any], warned: bool
) -> None:
    with on_a_port(app_of(**settings)) as address:
        assert httpx2.get(address + "/health", timeout=60).status_code == 200
    assert ("every client that reaches this port" in caplog.text) == warned


def test_nothing_waits_between_the_pieces_of_a_reply() -> None:
    """asyncio sets TCP_NODELAY on what it takes for TCP; without, each reply takes 40 ms more."""

    async def delays_of_a_connection() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        class Noting(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                made = transport.get_extra_info("socket")
                found.set_result(made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

        listener = listen("127.0.0.1", 0)
        server = await asyncio.get_running_loop().create_server(Noting, sock=listener)
        async with server:
            _, writer = await asyncio.open_connection(*listener.getsockname())
            no_delay = await found
            writer.close()
        return no_delay

    assert run(delays_of_a_connection()) == 1


def test_a_port_in_use_is_an_error_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"cannot listen on 127.0.0.1 port {port}: .* Choose another"):
            listen("127.0.0.1", port)
