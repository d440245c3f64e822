"""Compiles response formats to constraints, in a process of its own: see `compile_worker.py`."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import queue
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

from dgemma.server.compile_worker import (
    AbandonRequest,
    CompileFailure,
    CompileOutcome,
    CompileRefusal,
    CompileReply,
    CompileRequest,
)
from dgemma.server.http.errors import ApiError, invalid, timed_out, too_many_requests
from dgemma.server.http.rate_limits import KeyUsage
from dgemma.server.response_format import RequestedFormat
from dgemma.structured_output.compiler import GrammarCompiler
from dgemma.structured_output.constraint import Constraint
from dgemma.structured_output.token_dfa import TokenDFA
from dgemma.worker_process import end_worker, read_message, start_worker, write_message

# Refusals that are cached: a repeated request is refused without another compilation.
_MAX_REFUSALS = 1024

_OnReply = Callable[[CompileReply], None]


class CompileProcess:
    """One worker process. Threads write requests and read replies, so that nobody waits for a pipe.

    Whoever starts it also ends it.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._process = start_worker("dgemma.server.compile_worker", "compiles response formats")
        self._requests = queue.SimpleQueue[object]()
        self._requests.put(compiler)
        self._pending: dict[int, _OnReply] = {}
        self._lock = threading.Lock()
        self._has_ended = False
        for target in (self._write, self._read):
            threading.Thread(target=target, name="compile", daemon=True).start()

    def ask(self, request: CompileRequest, on_reply: _OnReply) -> bool:
        """Whether the process takes it. `on_reply` is called once, in another thread."""
        with self._lock:
            if self._has_ended:
                return False
            self._pending[request.id] = on_reply
        self._requests.put(request)
        return True

    def abandon(self, id_: int) -> None:
        self._requests.put(AbandonRequest(id_))

    def end(self) -> None:
        self._requests.put(None)
        end_worker(self._process)

    def _write(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # the process has ended, or the pipe is closed
            while (request := self._requests.get()) is not None:
                write_message(self._process.stdin, pickle.dumps(request, pickle.HIGHEST_PROTOCOL))

    def _read(self) -> None:
        assert self._process.stdout is not None
        with suppress(OSError, ValueError):
            while (message := read_message(self._process.stdout)) is not None:
                reply = pickle.loads(message)  # noqa: S301, the worker is our own package
                with self._lock:
                    on_reply = self._pending.pop(reply.id)
                on_reply(reply)
        with self._lock:
            self._has_ended = True
            pending, self._pending = self._pending, {}
        for id_, on_reply in pending.items():
            on_reply(CompileReply(id_, CompileOutcome.DISPLACED, 0.0))


class CompilePool:
    """Compiles response formats. A cached constraint is returned at once."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._process: CompileProcess | None = None  # started when needed, and again after its end
        self._end_process: Callable[[], object] = lambda: None
        self._starting = threading.Lock()
        self._ids = itertools.count()
        self._refusals: OrderedDict[int, CompileRefusal] = OrderedDict()  # by the hash of format and thinking

    async def compile(
        self,
        requested: RequestedFormat,
        *,
        timeout_s: float,
        tenant: str = "",
        usage: KeyUsage | None = None,
        on_used: Callable[[float], None] = lambda seconds: None,
    ) -> Constraint:
        """The constraint; or a 400 that names the field, a 429 where too many compile, a 504 in the end.

        on_used: told the processor seconds, in the event loop.
        """
        response_format, thinking = requested.response_format, requested.thinking
        known = self._compiler.cached(response_format, allow_thought=thinking)
        if known is not None:
            return known
        key = hash((response_format, thinking))
        if key in self._refusals:
            raise _refused(requested, self._refusals[key])
        if usage is not None:
            usage.check_compile()

        def on_reply(reply: CompileReply) -> None:
            on_used(reply.used_s)
            if usage is not None:
                usage.spend_compile_s(reply.used_s)

        request = CompileRequest(next(self._ids), response_format, thinking, tenant)
        try:
            async with asyncio.timeout(timeout_s):
                result = await self._ask(request, on_reply)
        except TimeoutError:
            raise timed_out(
                f"{requested.field} was not compiled within {timeout_s:g} seconds: it is too complex, or "
                "others were before it."
            ) from None
        match result:
            case TokenDFA():
                return self._compiler.store(response_format, result, allow_thought=thinking)
            case CompileRefusal():
                self._refusals[key] = result
                if len(self._refusals) > _MAX_REFUSALS:
                    self._refusals.popitem(last=False)
                raise _refused(requested, result)
            case CompileOutcome.FULL:
                raise too_many_requests("too many response formats are being compiled; ask again later.", 5.0)
            case CompileOutcome.DISPLACED:
                raise too_many_requests(
                    f"{requested.field} takes long to compile, and others wait; ask again later.", 5.0
                )
            case CompileFailure(text):
                raise RuntimeError(f"a response format could not be compiled:\n{text}")

    async def _ask(
        self, request: CompileRequest, on_reply: _OnReply
    ) -> TokenDFA | CompileRefusal | CompileOutcome | CompileFailure:
        """The result. on_reply: called in the event loop, also when nobody waits for the result any more."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[TokenDFA | CompileRefusal | CompileOutcome | CompileFailure] = (
            loop.create_future()
        )

        def settle(reply: CompileReply) -> None:
            on_reply(reply)
            if not done.done():
                done.set_result(reply.result)

        def settle_later(reply: CompileReply) -> None:
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(settle, reply)

        process = self._process
        if process is None or not process.ask(request, settle_later):
            process = await asyncio.to_thread(self._start, process)
            if not process.ask(request, settle_later):
                raise RuntimeError("the process that compiles response formats ended as it started")
        try:
            return await done
        finally:
            if not done.done() or done.cancelled():  # the client has left, or its time is over
                process.abandon(request.id)

    def _start(self, ended: CompileProcess | None) -> CompileProcess:
        with self._starting:
            if self._process is None or self._process is ended:
                self._end_process()
                self._process = CompileProcess(self._compiler)
                self._end_process = weakref.finalize(self, self._process.end)
            return self._process


def _refused(requested: RequestedFormat, refusal: CompileRefusal) -> ApiError:
    # The compiler names dgemma's own option; the client may have used another field for it.
    field = "tools" if refusal.field == "tools" else requested.field
    return invalid(f"{field}: {refusal.message}", field, refusal.code)
