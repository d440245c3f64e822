"""The engine for callers in an event loop: submit a request, iterate over its events, or cancel it.

Everything runs in the event loop except the engine's step, which runs in a thread. During a step the engine
is not touched: new and cancelled requests are queued, and applied between two steps. `run_step` is an
argument, so that a simulation can run the step in place.

A watchdog bounds the step. After a step that hangs, or fails as a whole, the requests of that step fail, the
others wait for a new engine over the same weights.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from dgemma.engine.engine import Engine
from dgemma.engine.rank_engine import RankEngine
from dgemma.engine.request import EngineRequest, ValidatedRequest
from dgemma.engine.service import (
    Accepted,
    BusyError,
    DrainingError,
    EngineDeadError,
    EngineEvent,
    EngineFailureError,
    EngineRestartedError,
    EngineStats,
    Failed,
    ServedModel,
)
from dgemma.errors import RankError
from dgemma.events import Draft, Event, Finish

StepOutputs = list[tuple[int, Event | Failed]]
EngineError = EngineFailureError | EngineRestartedError | EngineDeadError
RunStep = Callable[[Callable[[], StepOutputs]], Awaitable[StepOutputs]]

_LOG = logging.getLogger(__name__)

# Retry-After, as long as no answer has finished from which to estimate it.
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0

# A step may take so many times the longest one so far.
_STEP_FACTOR = 10.0
# More restarts than this within the time below: the engine has stopped for good.
_MAX_RESTARTS, _RESTART_WINDOW_S = 3, 600.0


class StepTimeoutError(Exception):
    """A step did not end in time."""


@dataclass(eq=False)
class _Caller:
    """One consumer of events. Of consecutive drafts only the newest is kept, to bound memory."""

    request: ValidatedRequest
    arrived: float
    request_id: int | None = None  # None: not added to the engine yet
    events: deque[Event | EngineError] = field(default_factory=deque)
    has_events: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, event: Event | EngineError) -> None:
        if isinstance(event, Draft) and self.events and isinstance(self.events[-1], Draft):
            self.events.pop()
        self.events.append(event)
        self.has_events.set()


class AsyncEngine:
    """An `EngineService`."""

    def __init__(
        self,
        engine: Engine,
        model: ServedModel,
        *,
        max_waiting: int,
        max_tenant_waiting: int | None = None,
        make_engine: Callable[[], Engine] | None = None,
        step_timeout_s: float | None = None,
        run_step: RunStep | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """make_engine: an engine to go on with after a failure; None: the first failure is final.

        max_tenant_waiting: requests of one tenant that may wait. step_timeout_s: the watchdog's bound; it
        grows with the longest step that ended. None: no watchdog.
        """
        self.model = model
        self._engine = engine
        self._make_engine = make_engine
        self._max_waiting = max_waiting
        self._max_tenant_waiting = max_tenant_waiting
        self._step_timeout_s = step_timeout_s
        self._longest_step_s = 0.0
        self._restarts: list[float] = []  # when
        self._num_restarts = 0
        self._before_restarts = EngineStats()  # the counters of engines that are gone
        self._is_stalled = False
        self._thread = None if run_step else _StepThread()
        self._run_step = run_step or self._in_thread
        self._clock = clock
        self._new: deque[_Caller] = deque()
        self._left: list[_Caller] = []
        self._callers: dict[int, _Caller] = {}
        self._wake = asyncio.Event()
        self._is_draining = False
        self._failure: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._mean_answer_s = _FIRST_WAIT_S

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        self._refuse_if_closed()
        validated = self._engine.validate(request)
        self._engine.check_capacity(validated)
        waiting = self._num_waiting
        if waiting >= self._max_waiting + self._engine.num_free_slots:
            raise BusyError(
                f"{waiting} requests are waiting, and no more may. Try again later.",
                retry_after_s=self._wait_s(waiting),
            )
        if request.tenant and self._max_tenant_waiting is not None:
            own = self._num_waiting_of(request.tenant)
            if own >= self._max_tenant_waiting:
                raise BusyError(
                    f"{own} requests of this API key are waiting, and no more may. Try again later.",
                    retry_after_s=self._wait_s(own),
                )
        caller = _Caller(validated, self._clock())
        self._new.append(caller)
        self._wake.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run_loop())
        is_over = False
        try:
            yield Accepted(num_waiting=waiting)
            while not is_over:
                await caller.has_events.wait()
                caller.has_events.clear()
                while caller.events and not is_over:
                    event = caller.events.popleft()
                    is_over = isinstance(event, Finish | EngineError)
                    if isinstance(event, EngineError):
                        raise event
                    yield event
        finally:
            if not is_over:
                self._left.append(caller)
                self._wake.set()

    def follow(self) -> None:
        """In place of `submit`, on a rank that is not the first: take part in its steps until it ends."""
        assert isinstance(self._engine, RankEngine)
        while self._engine.follow():
            pass

    def stats(self) -> EngineStats:
        found, before = self._engine.stats(), self._before_restarts
        return replace(
            found,
            prefix_hit_tokens=before.prefix_hit_tokens + found.prefix_hit_tokens,
            counters={name: before.counters.get(name, 0) + count for name, count in found.counters.items()},
            num_waiting=self._num_waiting,
            failure=self._failure,
            is_stalled=self._is_stalled,
            restarts=self._num_restarts,
        )

    async def fresh_stats(self) -> EngineStats:
        return self.stats()

    async def drain(self, timeout_s: float) -> None:
        self._is_draining = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=timeout_s)

    async def close(self) -> None:
        """Stop now; requests that are running fail."""
        self._is_draining = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._fail_all(EngineFailureError, "the server is shutting down.")
        if self._thread is not None:
            self._thread.stop()

    @property
    def _num_waiting(self) -> int:
        return self._engine.num_waiting + len(self._new)

    def _num_waiting_of(self, tenant: str) -> int:
        new = sum(caller.request.request.tenant == tenant for caller in self._new)
        return self._engine.num_waiting_of(tenant) + new

    def _refuse_if_closed(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(f"the engine has stopped: {self._failure}")
        if self._is_draining:
            raise DrainingError("the server is shutting down and takes no new requests.")

    def _wait_s(self, waiting: int) -> float:
        """An estimate of when a slot will be free, from the mean duration of an answer."""
        turns = max(1.0, waiting / self._engine.stats().slots_total)
        return min(_LONGEST_WAIT_S, max(_FIRST_WAIT_S, turns * self._mean_answer_s))

    async def _run_loop(self) -> None:
        """Step while there are sequences."""
        while True:
            try:
                self._apply_pending()
                if not self._engine.is_idle:
                    self._deliver(await self._step())
                elif self._is_draining:
                    return
                else:
                    self._wake.clear()
                    await self._wait()
            except Exception as error:  # of the engine, not of one request
                if not self._restart(error):
                    return

    async def _wait(self) -> None:
        """Until there is something to do; an engine of several ranks looks after them meanwhile."""
        try:
            await asyncio.wait_for(self._wake.wait(), self._engine.heartbeat_s)
        except TimeoutError:
            await self._step()

    async def _step(self) -> StepOutputs:
        """One step, under the watchdog."""
        began = self._clock()
        limit_s = self._step_limit_s()
        try:
            async with asyncio.timeout(limit_s) as watchdog:
                outputs = await self._run_step(self._engine.step)
        except TimeoutError as error:
            if not watchdog.expired():
                raise
            self._is_stalled = True
            raise StepTimeoutError(f"a step did not end within {limit_s:g} seconds") from error
        self._longest_step_s = max(self._longest_step_s, self._clock() - began)
        return outputs

    def _step_limit_s(self) -> float | None:
        if self._step_timeout_s is None:
            return None
        return max(self._step_timeout_s, _STEP_FACTOR * self._longest_step_s)

    def _restart(self, error: Exception) -> bool:
        """Go on with a new engine -> False if there is none. The requests of the failed step fail."""
        why = f"{type(error).__name__}: {error}"
        now = self._clock()
        self._restarts = [*(at for at in self._restarts if now - at < _RESTART_WINDOW_S), now]
        is_lasting = isinstance(error, RankError)
        if self._make_engine is None or is_lasting or len(self._restarts) > _MAX_RESTARTS:
            _LOG.error("the engine has stopped", exc_info=error)
            self._failure = why
            self._fail_all(EngineDeadError, f"the engine has stopped: {why}")
            return False
        _LOG.error("the engine is restarted", exc_info=error)
        # What has not begun is untouched: it waits for the new engine, before those that came later.
        waiting = [caller for id_, caller in self._callers.items() if self._engine.is_waiting(id_)]
        for caller in self._callers.values():
            # The new engine counts from zero: whoever leaves now must not cancel another's request.
            caller.request_id = None
            if caller not in waiting:
                caller.put(EngineRestartedError(f"the engine was restarted during this answer: {why}"))
        self._callers.clear()
        self._new.extendleft(reversed(waiting))
        if isinstance(error, StepTimeoutError) and self._thread is not None:
            self._thread.stop()  # it ends when the step does, if ever
            self._thread = _StepThread()
        # Built here, in the event loop: it allocates, but computes nothing.
        try:
            so_far = self.stats()
            self._engine = self._make_engine()
            self._before_restarts = so_far
        except Exception as broken:
            _LOG.error("the engine cannot be restarted", exc_info=broken)
            self._failure = why
            self._fail_all(EngineDeadError, f"the engine has stopped: {why}")
            return False
        self._num_restarts += 1
        self._is_stalled = False
        return True

    def _fail_all(self, kind: type[EngineError], why: str) -> None:
        for caller in (*self._callers.values(), *self._new):
            caller.put(kind(why))
        self._callers.clear()
        self._new.clear()

    def _apply_pending(self) -> None:
        """Cancel and add what was queued during the last step."""
        left, self._left = self._left, []
        for caller in left:
            if caller.request_id is not None:
                self._engine.cancel(caller.request_id)
                self._callers.pop(caller.request_id, None)
            elif caller in self._new:  # else the engine refused it
                self._new.remove(caller)
        while self._new:
            caller = self._new.popleft()
            try:
                caller.request_id = self._engine.add(caller.request, arrived=caller.arrived)
            except Exception as error:  # of this request: the engine has changed nothing
                caller.put(_failure_of(error))
            else:
                self._callers[caller.request_id] = caller

    def _deliver(self, events: StepOutputs) -> None:
        for request_id, event in events:
            caller = self._callers.get(request_id)
            if caller is None:
                continue
            if isinstance(event, Finish):
                self._mean_answer_s += 0.1 * (event.answer.timings.total_s - self._mean_answer_s)
            if isinstance(event, Failed):
                caller.put(_failure_of(event.error))
            else:
                caller.put(event)
            if isinstance(event, Finish | Failed):
                del self._callers[request_id]
                # Who leaves without reading this cancels nothing: after a restart the id may be another's.
                caller.request_id = None

    async def _in_thread(self, step: Callable[[], StepOutputs]) -> StepOutputs:
        assert self._thread is not None
        return await self._thread.run(step)


class _StepThread:
    """One thread for all steps: torch keeps its workers by the thread that called them.

    A daemon: a step that hangs must not keep the process alive, which an executor's thread would.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="engine", daemon=True).start()

    async def run(self, step: Callable[[], StepOutputs]) -> StepOutputs:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[StepOutputs] = loop.create_future()

        def settle(how: Callable[[Any], None], value: Any) -> None:
            if not done.done():  # else the step was abandoned
                how(value)

        def tell(how: Callable[[Any], None], value: Any) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, how, value)

        def job() -> None:
            try:
                outputs = step()
            except BaseException as error:
                tell(done.set_exception, error)
            else:
                tell(done.set_result, outputs)

        self._jobs.put(job)
        return await done

    def stop(self) -> None:
        """End after the job under way."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # what it refers to is free while the thread waits


def _failure_of(cause: Exception) -> EngineFailureError:
    """The error that a failed request raises in its caller."""
    error = EngineFailureError(f"this request failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
