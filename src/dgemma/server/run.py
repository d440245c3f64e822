"""The server process: listen, serve, and on a signal finish the accepted requests."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import platform
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import Receive, Scope, Send

from dgemma.engine.service import EngineDeadError, EngineService
from dgemma.errors import InputError
from dgemma.server.app import create_app
from dgemma.server.defaults import read_defaults
from dgemma.server.http.auth import read_keys
from dgemma.server.http.connections import QuietAccept, bounded_protocol
from dgemma.server.http.log import LOGGER, configure_log
from dgemma.server.http.settings import Settings
from dgemma.server.playground import PlaygroundFacts
from dgemma.server.text import TextService
from dgemma.tasks.calibration import Calibration

# Requests that still run after draining have passed their time limit.
_END_WITHIN_S = 2
_M_ARENA_MAX = -8  # of malloc.h


class ServedState(Protocol):
    """What the process needs to know of its app: of one model, or of several."""

    @property
    def settings(self) -> Settings: ...
    @property
    def num_active(self) -> int: ...
    @property
    def failure(self) -> str | None: ...
    async def drain(self) -> bool: ...


class ServedApp(Protocol):
    @property
    def state(self) -> ServedState: ...
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


def serve(
    settings: Settings,
    engine: EngineService,
    text: TextService,
    listener: socket.socket | None = None,
    facts: PlaygroundFacts | None = None,
    on_start: Callable[[str], None] | None = None,
) -> None:
    """Serve until a signal. The first one (SIGTERM, Ctrl-C) drains, the second ends at once.

    `listener`: made by `listen` before the model is loaded, so that a port in use fails early.
    """
    listener = listener or listen(settings.host, settings.port)
    serve_app(create_app(settings, engine, text, facts), listener, on_start)


def serve_app(app: ServedApp, listener: socket.socket, on_start: Callable[[str], None] | None = None) -> None:
    """`on_start`: called in the event loop with the address, when clients can connect."""
    configure_log(sys.stderr, app.state.settings.log_format)
    # The engine needs the interpreter lock again after each operation, and a thread that compiles a response
    # format gives it up only after this time (by default 5 ms).
    sys.setswitchinterval(0.0005)
    _limit_malloc_arenas()
    server = DrainingServer(app, on_start)
    server.run(sockets=[listener])
    if server.has_failed:
        raise EngineDeadError("the engine has stopped, and so does the server; the log says why.")


def _limit_malloc_arenas() -> None:
    """Let threads share their free memory: glibc gives each an arena of its own, and large bodies, parsed in
    one thread after another, leave holes in all of them."""
    if platform.libc_ver()[0] == "glibc" and "MALLOC_ARENA_MAX" not in os.environ:
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def exit_without_threads(status: int) -> None:
    """End the process now if a thread would keep it alive: a hung step, a long tokenization."""
    main = threading.main_thread()
    if any(thread is not main and not thread.daemon for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class DrainingServer(uvicorn.Server):
    """uvicorn, but the first signal drains before the server stops."""

    def __init__(self, app: ServedApp, on_start: Callable[[str], None] | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                http=bounded_protocol(app.state.settings),
                ssl_certfile=app.state.settings.tls_cert,
                ssl_keyfile=app.state.settings.tls_key,
                timeout_graceful_shutdown=_END_WITHIN_S,
            )
        )
        self._state = app.state
        self._on_start = on_start
        self._was_signalled = False
        self._draining: asyncio.Task[None] | None = None
        self.has_failed = False  # the engine stopped for good: the process ends for its supervisor
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(QuietAccept())
        settings = self._state.settings
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        address = _address(host, port, is_tls=settings.tls_cert is not None)
        _log_event(
            "listening",
            host=host,
            port=port,
            address=address,
            model=settings.served_model_name,
        )
        if not settings.is_loopback and not settings.has_keys:
            _log_event("every client that reaches this port is served; set an API key", level=logging.WARNING)

        if self._on_start is not None:
            self._on_start(address)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None or self._was_signalled:
            self.should_exit = self.force_exit = True
        else:
            # A signal handler runs between any two instructions: the event loop does the work.
            self._was_signalled = True
            self._loop.call_soon_threadsafe(self.begin_drain)

    async def on_tick(self, counter: int) -> bool:
        if self._state.failure is not None and not self._was_signalled:
            self.has_failed = self.should_exit = True
            _log_event("the engine has stopped; the server ends", level=logging.ERROR)
        return await super().on_tick(counter)

    def begin_drain(self) -> None:
        """Admit no more requests; stop when the admitted ones are answered. Called in the event loop."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        _log_event("draining", requests=self._state.num_active)
        try:
            all_answered = await self._state.drain()
            _log_event("drained" if all_answered else "drained, but some answers took too long")
        except Exception:  # an engine that cannot drain must not keep the process alive
            LOGGER.exception("draining failed")
        finally:
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.force_exit:
            for task in self.server_state.tasks:
                task.cancel()
        await super().shutdown(sockets=sockets)


def check_files(settings: Settings) -> None:
    """Refuse files that cannot be used, and defaults, before a large model is loaded."""
    read_defaults(settings.defaults)
    if settings.calibration is not None:
        Calibration.load(settings.calibration)
    if settings.api_key_file is not None:
        read_keys(settings.api_key_file)
    if settings.tls_cert is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            settings.tls_cert, settings.tls_key
        )
    except OSError as error:  # ssl.SSLError is one
        named = str(settings.tls_cert) + ("" if settings.tls_key is None else f" with {settings.tls_key}")
        raise InputError(
            f"the certificate {named} cannot be used: {error.strerror or error}. "
            "Give PEM files to --tls-cert and --tls-key."
        ) from None


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; an address in use is an error in one line."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        made = socket.create_server((host, port), family=family)
        # asyncio sets TCP_NODELAY only on sockets whose protocol is TCP, and accepted sockets inherit it from
        # this one. Without it a response waits 40 ms between its head and its body.
        return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=made.detach())
    except (OSError, OverflowError) as error:
        # Python adds the address, which the message has already.
        why = (getattr(error, "strerror", None) or str(error)).partition(" (while attempting")[0]
        raise InputError(
            f"cannot listen on {host} port {port}: {why}. Choose another --host or --port."
        ) from None


def _address(host: str, port: int, *, is_tls: bool) -> str:
    named = f"[{host}]" if ":" in host else host
    return f"{'https' if is_tls else 'http'}://{named}:{port}"


def _log_event(event: str, level: int = logging.INFO, **facts: object) -> None:
    LOGGER.log(level, event, extra={"facts": facts})
