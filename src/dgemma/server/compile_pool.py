"""Compiles response formats to constraints in threads, fairly: least attained service goes first.

The processor time of one compilation is bounded, but a hostile format takes all of it. Many of them at once
must delay neither the event loop nor an honest format. So a few compilations run at a time, and at each check
of its time budget one gives way to those that have used less: of tenants first, then of its own.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from dgemma.errors import DgemmaError, InputError
from dgemma.server.http.errors import invalid, timed_out, too_many_requests
from dgemma.server.http.rate_limits import KeyUsage
from dgemma.server.response_format import RequestedFormat
from dgemma.structured_output.compiler import GrammarCompiler
from dgemma.structured_output.constraint import Constraint

MAX_RUNNING = 2
# Compilations at once, running or giving way: each holds what it has built so far, up to some 50 MB.
MAX_COMPILING = 16
# Refusals that are cached: a repeated request is refused without another compilation.
_MAX_REFUSALS = 1024
# Differences of used time below this are no reason to give way.
_SLACK_S = 0.02
# A tenant's use is forgotten by half in this time.
_HALF_LIFE_S = 30.0


class _AbandonedError(DgemmaError):
    """Nobody waits for this compilation any more."""


@dataclass(eq=False)
class _Job:
    tenant: str
    used_s: float = 0.0
    began_s: float = field(default_factory=time.thread_time)  # made in its own thread
    is_abandoned: bool = False


class FairTurns:
    """Which compilations run: those that have used least, tenant by tenant."""

    def __init__(self, max_running: int = MAX_RUNNING, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_running = max_running
        self._clock = clock
        self._jobs: set[_Job] = set()
        self._used: dict[str, tuple[float, float]] = {}  # by tenant: seconds, and when they were counted
        self._changed = threading.Condition()

    def begin(self, tenant: str) -> _Job:
        job = _Job(tenant)
        with self._changed:
            self._jobs.add(job)
        return job

    def give_way(self, job: _Job) -> None:
        """Wait while enough others have used less. Called by the job's own thread."""
        used_s = time.thread_time() - job.began_s
        if used_s - job.used_s < _SLACK_S and not job.is_abandoned:
            return
        with self._changed:
            self._count(job, used_s)
            self._changed.notify_all()
            while self._num_before(job) >= self._max_running and not job.is_abandoned:
                self._changed.wait()
        if job.is_abandoned:
            raise _AbandonedError

    def end(self, job: _Job) -> float:
        """-> the processor seconds it used."""
        with self._changed:
            self._count(job, time.thread_time() - job.began_s)
            self._jobs.discard(job)
            self._changed.notify_all()
        return job.used_s

    def abandon(self, job: _Job) -> None:
        """Let it end at its next check."""
        with self._changed:
            job.is_abandoned = True
            self._changed.notify_all()

    def _count(self, job: _Job, used_s: float) -> None:
        now = self._clock()
        self._used[job.tenant] = self._tenant_s(job.tenant) + used_s - job.used_s, now
        job.used_s = used_s

    def _tenant_s(self, tenant: str) -> float:
        seconds, at = self._used.get(tenant, (0.0, 0.0))
        return seconds * math.exp2(-(self._clock() - at) / _HALF_LIFE_S)

    def _num_before(self, job: _Job) -> int:
        tenants = {other.tenant: self._tenant_s(other.tenant) for other in self._jobs}

        def is_before(other: _Job) -> bool:
            if other.tenant != job.tenant:
                return tenants[other.tenant] < tenants[job.tenant] - _SLACK_S
            return other.used_s < job.used_s - _SLACK_S

        return sum(map(is_before, self._jobs))


class CompilePool:
    """Compiles response formats in threads of its own. A cached constraint is returned at once."""

    def __init__(self, compiler: GrammarCompiler, turns: FairTurns | None = None) -> None:
        self._compiler = compiler
        self._turns = turns or FairTurns()
        self._refusals: OrderedDict[int, InputError] = OrderedDict()  # by the hash of format and thinking
        self._lock = threading.Lock()
        self._num_compiling = 0
        self._num_of: Counter[str] = Counter()  # by tenant

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
        known = self._compiler.cached(requested.response_format, allow_thought=requested.thinking)
        if known is not None:
            return known
        if usage is not None:
            usage.check_compile()
        if self._num_compiling >= MAX_COMPILING or (tenant and self._num_of[tenant] >= MAX_COMPILING // 2):
            raise too_many_requests("too many response formats are being compiled; ask again later.", 5.0)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Constraint] = loop.create_future()
        jobs: list[_Job] = []

        def settle(found: Constraint | BaseException, used_s: float) -> None:
            self._num_compiling -= 1
            self._num_of[tenant] -= 1
            on_used(used_s)
            if usage is not None:
                usage.spend_compile_s(used_s)
            if done.done():
                return
            if isinstance(found, BaseException):
                done.set_exception(found)
            else:
                done.set_result(found)

        def work() -> None:
            job = self._turns.begin(tenant)
            jobs.append(job)
            found: Constraint | BaseException
            try:
                if done.done():
                    raise _AbandonedError
                found = self._compile(requested, lambda: self._turns.give_way(job))
            except BaseException as error:
                found = error
            used_s = self._turns.end(job)
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, found, used_s)

        self._num_compiling += 1
        self._num_of[tenant] += 1
        # A daemon: a server that ends waits for no compilation.
        threading.Thread(target=work, name="compile", daemon=True).start()
        try:
            async with asyncio.timeout(timeout_s):
                return await done
        except TimeoutError:
            raise timed_out(
                f"{requested.field} was not compiled within {timeout_s:g} seconds: it is too complex, or "
                "others were before it."
            ) from None
        except InputError as error:
            # The compiler names dgemma's own option; the client may have used another field for it.
            field_ = "tools" if error.field == "tools" else requested.field
            raise invalid(f"{field_}: {error}", field_, error.code) from None
        finally:
            # The client may have left, or its time be over.
            for job in jobs:
                self._turns.abandon(job)

    def _compile(self, requested: RequestedFormat, on_check: Callable[[], None]) -> Constraint:
        key = hash((requested.response_format, requested.thinking))
        with self._lock:
            refusal = self._refusals.get(key)
        if refusal is not None:
            raise InputError(str(refusal), field=refusal.field, code=refusal.code)
        try:
            return self._compiler.compile(
                requested.response_format, allow_thought=requested.thinking, on_check=on_check
            )
        except InputError as error:
            with self._lock:
                self._refusals[key] = error
                if len(self._refusals) > _MAX_REFUSALS:
                    self._refusals.popitem(last=False)
            raise
