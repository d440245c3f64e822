"""Raw sockets: silent, slow, huge and ambiguous ones are ended, and others are answered meanwhile."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from dgemma.server.http import connections
from dgemma.server.http.connections import QuietAccept, max_connections
from dgemma.server.http.settings import Settings
from server.fake_engine import FakeEngine, Script
from server.served import CHAT, HELLO, app_of, ask, eventually, on_a_port

HEAD = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


def connect(address: str) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def is_closed(connection: socket.socket) -> bool:
    """By the server; waits for it."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def health_s(address: str) -> float:
    began = time.perf_counter()
    with connect(address) as connection:
        connection.sendall(HEAD + b"connection: close\r\n\r\n")
        assert b"200 OK" in connection.recv(1000)
    return time.perf_counter() - began


def test_a_silent_connection_is_closed() -> None:
    with on_a_port(app_of(header_timeout_s=0.2)) as address, connect(address) as silent:
        assert is_closed(silent)


def test_a_head_that_comes_byte_by_byte_is_not_waited_for() -> None:
    with on_a_port(app_of(header_timeout_s=0.5)) as address, connect(address) as slow:
        began = time.monotonic()
        with suppress(BrokenPipeError, ConnectionResetError):
            while time.monotonic() - began < 60:
                slow.sendall(b"G")
                time.sleep(0.05)
        assert time.monotonic() - began < 60


def test_the_second_request_of_a_connection_has_its_deadline_too() -> None:
    with on_a_port(app_of(header_timeout_s=0.5)) as address:
        for _ in range(10):  # on a busy machine the first head may come too late
            with connect(address) as connection, suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(HEAD + b"\r\n")
                if b"200 OK" in connection.recv(1000):
                    connection.sendall(b"GET /hea")
                    assert is_closed(connection)
                    return
    pytest.fail("it never answered the first")


def test_an_answer_that_takes_longer_than_the_deadline_of_heads_is_not_cut_off() -> None:
    engine = FakeEngine(Script(text="x" * 20, delay_s=0.3))
    with on_a_port(app_of(engine, header_timeout_s=0.1)) as address:
        for _ in range(10):
            try:
                response = httpx2.post(f"{address}{CHAT}", json=HELLO, timeout=60)
                break
            except httpx2.TransportError:  # on a busy machine the head may come too late
                assert not engine.requests, "its head came in time, and yet it was cut off"
        else:
            pytest.fail("its head never came in time")
    assert response.status_code == 200


def test_a_head_that_is_too_large_is_refused() -> None:
    with on_a_port(app_of(max_header_bytes=4096)) as address, connect(address) as connection:
        connection.sendall(HEAD + b"x: " + b"y" * 5000)
        assert connection.recv(1000).startswith(b"HTTP/1.1 431 ")
        assert is_closed(connection)


def test_a_large_body_is_not_taken_for_a_head() -> None:
    body = {**HELLO, "messages": [{"role": "user", "content": "y" * 200_000}]}
    with on_a_port(app_of(max_header_bytes=4096)) as address:
        assert httpx2.post(f"{address}{CHAT}", json=body, timeout=60).status_code in (200, 400)


def test_above_the_limit_the_connection_that_waited_longest_makes_room() -> None:
    app = app_of(max_connections=8, header_timeout_s=600)
    with on_a_port(app) as address, ExitStack() as stack:
        silent = [stack.enter_context(connect(address)) for _ in range(8)]
        for _ in range(5):
            health_s(address)
        assert is_closed(silent[0])


def test_a_request_in_progress_is_never_closed_for_a_newcomer() -> None:
    is_over = threading.Event()
    engine = FakeEngine(Script(text="x" * 20, until=is_over.is_set))
    body = b'{"model": "dgemma", "messages": [{"role": "user", "content": "Hello"}], "seed": 7}'
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    with on_a_port(app_of(engine, max_connections=2)) as address, ExitStack() as stack:
        busy = [stack.enter_context(connect(address)) for _ in range(2)]
        for connection in busy:
            connection.sendall(head.encode() + body)
        eventually(lambda: engine.running == 2)
        with connect(address) as newcomer:
            assert newcomer.recv(1000).startswith(b"HTTP/1.1 503 ")
        is_over.set()
        for connection in busy:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_five_hundred_silent_connections_do_not_keep_health_waiting() -> None:
    with on_a_port(app_of(max_connections=64, header_timeout_s=600)) as address, ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(connect(address))
        assert min(health_s(address) for _ in range(10)) < 1


def test_the_limit_follows_what_the_process_may_open(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    assert max_connections(Settings()) == 256 - 64
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1 << 20))
    assert max_connections(Settings(max_connections=1000)) == 1000
    assert limits[-1] == (1064, 1 << 20)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
    assert max_connections(Settings(max_connections=1000)) == 1000
    assert len(limits) == 2


def test_accepting_without_file_descriptors_is_one_warning_not_thousands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    others: list[dict[str, Any]] = []
    monkeypatch.setattr(connections.LOGGER, "log", lambda level, text: told.append(text))

    class Loop:
        default_exception_handler = staticmethod(others.append)

    quiet = QuietAccept()
    for _ in range(1000):
        quiet(Loop(), {"exception": OSError(24, "Too many open files")})  # type: ignore[arg-type]
    assert told == ["no file descriptors left to accept connections"]
    quiet(Loop(), {"exception": OSError(5, "other")})  # type: ignore[arg-type]
    assert len(others) == 1


@pytest.mark.parametrize(
    "headers",
    [
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 5\r\n",
        b"host: other\r\ncontent-length: 5\r\n",
    ],
)
def test_an_ambiguous_request_is_refused_and_its_connection_closed(headers: bytes) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode()
    with on_a_port(app_of()) as address, connect(address) as connection:
        connection.sendall(head + headers + b"\r\n0\r\n\r\nGET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        told = b""
        while part := connection.recv(4096):
            told += part
        assert told.startswith(b"HTTP/1.1 400 ")
        assert b"200 OK" not in told, "what follows is not read as a request"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("localhost:8000", 200), ("127.0.0.1:9", 200), ("[::1]:80", 200),
        ("LOCALHOST", 200), ("evil.example", 421), ("127.evil.example:1", 421),
        ("localhost.evil.example", 421), ("", 421),
    ],
)  # fmt: skip
def test_a_loopback_server_answers_only_to_its_own_names(host: str, status: int) -> None:
    assert ask(app_of(), "GET", "/health", headers={"host": host}).status_code == status


def test_other_names_are_allowed_by_name_and_any_on_a_public_address() -> None:
    allowed = app_of(allowed_hosts=("proxy.example", "Other.Proxy"))
    for name in ("proxy.example", "Proxy.Example:443", "other.proxy"):
        assert ask(allowed, "GET", "/health", headers={"host": name}).status_code == 200
    assert ask(allowed, "GET", "/health", headers={"host": "other.example"}).status_code == 421
    public = app_of(host="0.0.0.0")  # noqa: S104
    assert ask(public, "GET", "/health", headers={"host": "any.example"}).status_code == 200


def test_bodies_that_arrive_at_once_share_a_budget() -> None:
    """Held back one byte before their end, they would occupy their size in memory until the timeout."""
    app = app_of(max_buffered_bytes=1 << 20, max_body_bytes=1 << 20)
    body = b'{"model": "' + b"x" * 700_000
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body) + 100}\r\n\r\n"
    )
    with on_a_port(app) as address, connect(address) as first, connect(address) as second:
        first.sendall(head.encode() + body)
        eventually(lambda: app.state.admission._num_buffered_bytes == len(body))
        second.sendall(head.encode() + body)
        assert second.recv(1000).startswith(b"HTTP/1.1 429 ")
        first.close()
        eventually(lambda: app.state.admission._num_buffered_bytes == 0)


def test_the_server_speaks_tls(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    try:
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost",
             "-days", "1", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
            check=True, capture_output=True,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("there is no openssl to make a certificate with")
    trust = ssl.create_default_context(cafile=certificate)
    with on_a_port(app_of(tls_cert=certificate, tls_key=key)) as address:
        secure = address.replace("http://127.0.0.1", "https://localhost")
        assert httpx2.get(f"{secure}/health", verify=trust, timeout=60).json() == {"status": "ok"}
        with pytest.raises(httpx2.HTTPError):
            httpx2.get(f"{address}/health", timeout=60)


def test_a_client_that_reads_nothing_is_gone_after_the_send_timeout() -> None:
    engine = FakeEngine(Script(text="x" * 4_000_000))
    body = b'{"model": "dgemma", "messages": [{"role": "user", "content": "Hello"}], "stream": true}'
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    app = app_of(engine, send_timeout_s=0.3)
    with on_a_port(app) as address:
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = address.removeprefix("http://").split(":")
        deaf.connect((host, int(port)))
        deaf.sendall(head.encode() + body)
        eventually(lambda: "dgemma_requests_cancelled_total 1.0" in app.state.metrics.render(
            engine.stats(), num_active=0))  # fmt: skip
        deaf.close()
    assert engine.running == 0
