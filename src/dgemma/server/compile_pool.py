"""Compiles response formats to constraints in threads, fairly: least attained service goes first.

The processor time of one compilation is bounded, but a hostile format takes all of it. Many of them at once
must delay neither the event loop nor an honest format. So a few compilations run at a time, and at each check
of its time budget one gives way to those that have used less: of tenants first, then of its own. What it has
built stays in memory meanwhile, so of those that take long only a few go on. The others wait while they are
small, and are the first to be refused when all places are taken.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dgemma.errors import DgemmaError, InputError
from dgemma.server.http.errors import invalid, timed_out, too_many_requests
from dgemma.server.http.rate_limits import KeyUsage
from dgemma.server.response_format import RequestedFormat
from dgemma.structured_output.compiler import GrammarCompiler
from dgemma.structured_output.constraint import Constraint

# More than one would take turns at the interpreter lock, which the engine and the event loop need too.
MAX_RUNNING = 1
# Compilations at once, running or waiting; of one tenant half as many.
MAX_COMPILING = 64
# One that has taken so long has built a few MB. So many may build more, up to some 200 MB each.
LONG_S = 0.5
MAX_LONG = 2
# Refusals that are cached: a repeated request is refused without another compilation.
_MAX_REFUSALS = 1024
# So long one runs before others are looked at, and differences of used time below this are none.
_QUANTUM_S = 0.02
# While answers are written, one that has taken longer than this rests so many times as long as it works.
_SHORT_S = 0.2
_REST = 3.0
# A tenant's use is forgotten by half in this time.
_HALF_LIFE_S = 30.0


class _AbandonedError(DgemmaError):
    """This compilation is not to go on: nobody waits for it any more, or others take its place."""


@dataclass(eq=False)
class _Job:
    tenant: str
    turn: threading.Condition
    used_s: float = 0.0
    began_s: float = 0.0  # of the time of its thread
    is_running: bool = False  # else it waits for its turn, or rests
    is_resting: bool = False
    may_be_long: bool = False
    is_abandoned: bool = False


class FairTurns:
    """Which compilations run: those that have used least, tenant by tenant."""

    def __init__(
        self,
        max_running: int = MAX_RUNNING,
        *,
        is_busy: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """is_busy: whether answers are being written, which a long compilation must not slow down."""
        self._max_running = max_running
        self._is_busy = is_busy
        self._clock = clock
        self._jobs: dict[_Job, None] = {}  # in the order they came
        self._used: dict[str, tuple[float, float]] = {}  # by tenant: seconds, and when they were counted
        self._lock = threading.Lock()

    def make_room(self, tenant: str) -> bool:
        """Whether one more is taken in, if necessary in place of the longest one."""
        with self._lock:
            jobs = [job for job in self._jobs if not job.is_abandoned]
            own = [job for job in jobs if job.tenant == tenant]
            if tenant and len(own) >= MAX_COMPILING // 2:
                return self._displace(own)
            return len(jobs) < MAX_COMPILING or self._displace(jobs)

    def add(self, tenant: str) -> _Job:
        job = _Job(tenant, threading.Condition(self._lock))
        with self._lock:
            self._jobs[job] = None
        return job

    def begin(self, job: _Job) -> None:
        """Wait for the first turn. This and the next two are called by the job's own thread."""
        job.began_s = time.thread_time()
        self.give_way(job)

    def give_way(self, job: _Job) -> None:
        """Wait while others have used less."""
        used_s = time.thread_time() - job.began_s
        if job.is_running and used_s - job.used_s < _QUANTUM_S and not job.is_abandoned:
            return
        rest_s = _REST * (used_s - job.used_s) if used_s > _SHORT_S and self._is_busy() else 0.0
        with self._lock:
            self._count(job, used_s)
            if job.is_running and self._may_run(job) and not self._is_overtaken(job) and not rest_s:
                job.may_be_long = used_s > LONG_S
            else:
                job.is_running = False
                if rest_s:
                    job.is_resting = True
                    self._start_next()
                    job.turn.wait(rest_s)  # or until it is abandoned
                    job.is_resting = False
                self._start_next()
            while not job.is_running and not job.is_abandoned:
                job.turn.wait()
        if job.is_abandoned:
            raise _AbandonedError

    def end(self, job: _Job) -> float:
        """-> the processor seconds it used."""
        with self._lock:
            self._count(job, time.thread_time() - job.began_s)
            del self._jobs[job]
            self._start_next()
        return job.used_s

    def abandon(self, job: _Job) -> None:
        """Let it end at its next check."""
        with self._lock:
            job.is_abandoned = True
            job.turn.notify()

    def _displace(self, jobs: Sequence[_Job]) -> bool:
        longest = max(jobs, key=self._rank())
        longest.is_abandoned = longest.used_s > LONG_S
        longest.turn.notify()
        return longest.is_abandoned

    def _start_next(self) -> None:
        while sum(job.is_running for job in self._jobs) < self._max_running and (waiting := self._waiting()):
            job = min(waiting, key=self._rank())
            job.is_running = True
            job.may_be_long = job.used_s > LONG_S
            job.turn.notify()

    def _waiting(self) -> list[_Job]:
        return [job for job in self._jobs if not job.is_running and not job.is_resting and self._may_run(job)]

    def _may_run(self, job: _Job) -> bool:
        """Whether it is short, or one of the few that may be long, or can become one of these."""
        num_long = sum(other.may_be_long for other in self._jobs)
        is_fine = job.used_s <= LONG_S or job.may_be_long or num_long < MAX_LONG
        return is_fine and not job.is_abandoned

    def _is_overtaken(self, job: _Job) -> bool:
        def is_before(other: _Job) -> bool:
            if other.tenant == job.tenant:
                return other.used_s < job.used_s - _QUANTUM_S
            return self._tenant_s(other.tenant) < self._tenant_s(job.tenant) - _QUANTUM_S

        return any(map(is_before, self._waiting()))

    def _rank(self) -> Callable[[_Job], tuple[float, float]]:
        """Less is sooner."""
        tenants = {job.tenant: self._tenant_s(job.tenant) for job in self._jobs}
        return lambda job: (tenants[job.tenant], job.used_s)

    def _count(self, job: _Job, used_s: float) -> None:
        now = self._clock()
        self._used[job.tenant] = self._tenant_s(job.tenant) + used_s - job.used_s, now
        job.used_s = used_s

    def _tenant_s(self, tenant: str) -> float:
        seconds, at = self._used.get(tenant, (0.0, 0.0))
        return seconds * math.exp2(-(self._clock() - at) / _HALF_LIFE_S)


class CompilePool:
    """Compiles response formats in threads of its own. A cached constraint is returned at once."""

    def __init__(self, compiler: GrammarCompiler, is_busy: Callable[[], bool] = lambda: False) -> None:
        self._compiler = compiler
        self._turns = FairTurns(is_busy=is_busy)
        # By the hash of format and thinking: message, field and code. Not the error: that has a traceback.
        self._refusals: OrderedDict[int, tuple[str, str | None, str]] = OrderedDict()
        self._lock = threading.Lock()

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
        if not self._turns.make_room(tenant):
            raise too_many_requests("too many response formats are being compiled; ask again later.", 5.0)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Constraint] = loop.create_future()
        job = self._turns.add(tenant)

        def settle(found: Constraint | BaseException, used_s: float) -> None:
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
            found: Constraint | BaseException
            try:
                self._turns.begin(job)
                found = self._compile(requested, lambda: self._turns.give_way(job))
            except InputError as error:
                found = error.with_traceback(None)  # which holds all that was built
            except BaseException as error:
                found = error
            used_s = self._turns.end(job)
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, found, used_s)

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
        except _AbandonedError:
            raise too_many_requests(
                f"{requested.field} takes long to compile, and others wait; ask again later.", 5.0
            ) from None
        except InputError as error:
            # The compiler names dgemma's own option; the client may have used another field for it.
            field_ = "tools" if error.field == "tools" else requested.field
            raise invalid(f"{field_}: {error}", field_, error.code) from None
        finally:
            # The client may have left, or its time be over.
            self._turns.abandon(job)

    def _compile(self, requested: RequestedFormat, on_check: Callable[[], None]) -> Constraint:
        key = hash((requested.response_format, requested.thinking))
        with self._lock:
            refusal = self._refusals.get(key)
        if refusal is not None:
            message, field, code = refusal
            raise InputError(message, field=field, code=code)
        try:
            return self._compiler.compile(
                requested.response_format, allow_thought=requested.thinking, on_check=on_check
            )
        except InputError as error:
            with self._lock:
                self._refusals[key] = str(error), error.field, error.code
                if len(self._refusals) > _MAX_REFUSALS:
                    self._refusals.popitem(last=False)
            raise
