"""Turns at compiling response formats: least attained service goes first.

The processor time of one compilation is bounded, but a hostile format takes all of it. Many of them at once
must not delay an honest format. So a few compilations run at a time, and at each check of its time budget one
gives way to those that have used less: of tenants first, then of its own. What it has built stays in memory
meanwhile, so of those that take long only a few go on. The others wait while they are small, and are the
first to be refused when all places are taken.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dgemma.errors import DgemmaError

# More than one would take turns at the interpreter lock.
MAX_RUNNING = 1
# Compilations at once, running or waiting; of one tenant half as many.
MAX_COMPILING = 64
# One that has taken so long has built a few MB. So many may build more, up to some 200 MB each.
LONG_S = 0.5
MAX_LONG = 2
# So long one runs before others are looked at, and differences of used time below this are none.
_QUANTUM_S = 0.02
# A tenant's use is forgotten by half in this time.
_HALF_LIFE_S = 30.0


class AbandonedError(DgemmaError):
    """This compilation is not to go on: nobody waits for it any more, or others take its place."""


@dataclass(eq=False)
class CompileJob:
    tenant: str
    turn: threading.Condition
    used_s: float = 0.0
    began_s: float = 0.0  # of the time of its thread
    is_running: bool = False  # else it waits for its turn
    may_be_long: bool = False
    is_abandoned: bool = False


class FairTurns:
    """Which compilations run: those that have used least, tenant by tenant."""

    def __init__(
        self, max_running: int = MAX_RUNNING, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_running = max_running
        self._clock = clock
        self._jobs: dict[CompileJob, None] = {}  # in the order they came
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

    def add(self, tenant: str) -> CompileJob:
        job = CompileJob(tenant, threading.Condition(self._lock))
        with self._lock:
            self._jobs[job] = None
        return job

    def begin(self, job: CompileJob) -> None:
        """Wait for the first turn. This and the next two are called by the job's own thread."""
        job.began_s = time.thread_time()
        self.give_way(job)

    def give_way(self, job: CompileJob) -> None:
        """Wait while others have used less."""
        used_s = time.thread_time() - job.began_s
        if job.is_running and used_s - job.used_s < _QUANTUM_S and not job.is_abandoned:
            return
        with self._lock:
            self._count(job, used_s)
            if job.is_running and self._may_run(job) and not self._is_overtaken(job):
                job.may_be_long = used_s > LONG_S
            else:
                job.is_running = False
                self._start_next()
            while not job.is_running and not job.is_abandoned:
                job.turn.wait()
        if job.is_abandoned:
            raise AbandonedError

    def end(self, job: CompileJob) -> float:
        """-> the processor seconds it used."""
        with self._lock:
            self._count(job, time.thread_time() - job.began_s)
            del self._jobs[job]
            self._start_next()
        return job.used_s

    def abandon(self, job: CompileJob) -> None:
        """Let it end at its next check."""
        with self._lock:
            job.is_abandoned = True
            job.turn.notify()

    def _displace(self, jobs: Sequence[CompileJob]) -> bool:
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

    def _waiting(self) -> list[CompileJob]:
        return [job for job in self._jobs if not job.is_running and self._may_run(job)]

    def _may_run(self, job: CompileJob) -> bool:
        """Whether it is short, or one of the few that may be long, or can become one of these."""
        num_long = sum(other.may_be_long for other in self._jobs)
        is_fine = job.used_s <= LONG_S or job.may_be_long or num_long < MAX_LONG
        return is_fine and not job.is_abandoned

    def _is_overtaken(self, job: CompileJob) -> bool:
        def is_before(other: CompileJob) -> bool:
            if other.tenant == job.tenant:
                return other.used_s < job.used_s - _QUANTUM_S
            return self._tenant_s(other.tenant) < self._tenant_s(job.tenant) - _QUANTUM_S

        return any(map(is_before, self._waiting()))

    def _rank(self) -> Callable[[CompileJob], tuple[float, float]]:
        """Less is sooner."""
        tenants = {job.tenant: self._tenant_s(job.tenant) for job in self._jobs}
        return lambda job: (tenants[job.tenant], job.used_s)

    def _count(self, job: CompileJob, used_s: float) -> None:
        now = self._clock()
        self._used[job.tenant] = self._tenant_s(job.tenant) + used_s - job.used_s, now
        job.used_s = used_s

    def _tenant_s(self, tenant: str) -> float:
        seconds, at = self._used.get(tenant, (0.0, 0.0))
        return seconds * math.exp2(-(self._clock() - at) / _HALF_LIFE_S)
