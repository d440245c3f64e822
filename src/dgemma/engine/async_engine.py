"""The engine for callers in an event loop: submit a request, iterate over its events, or cancel it.

Everything runs in the event loop except the engine's step, which runs in a thread. During a step the engine
is not touched: new and cancelled requests are queued, and applied between two steps. `run_step` is an
argument, so that a simulation can run the step in place.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from dgemma.engine.engine import Engine
from dgemma.engine.request import EngineRequest, ValidatedRequest
from dgemma.engine.service import (
    Accepted,
    BusyError,
    DrainingError,
    EngineDeadError,
    EngineEvent,
    EngineFailureError,
    EngineStats,
    Failed,
    ServedModel,
)
from dgemma.events import Draft, Event, Finish

StepOutputs = list[tuple[int, Event | Failed]]
EngineError = EngineFailureError | EngineDeadError
RunStep = Callable[[Callable[[], StepOutputs]], Awaitable[StepOutputs]]

_LOG = logging.getLogger(__name__)

# Retry-After, as long as no answer has finished from which to estimate it.
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0


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
        run_step: RunStep | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self._engine = engine
        self._max_waiting = max_waiting
        # One thread, always the same: torch keeps its workers by the thread that called them.
        self._thread = None if run_step else ThreadPoolExecutor(1, thread_name_prefix="engine")
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

    def stats(self) -> EngineStats:
        found = self._engine.stats()
        return replace(found, num_waiting=self._num_waiting, failure=self._failure)

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
            self._thread.shutdown(wait=False)

    @property
    def _num_waiting(self) -> int:
        return self._engine.num_waiting + len(self._new)

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
        try:
            while True:
                self._apply_pending()
                if not self._engine.is_idle:
                    self._deliver(await self._run_step(self._engine.step))
                elif self._is_draining:
                    return
                else:
                    self._wake.clear()
                    await self._wake.wait()
        except Exception as error:  # of the engine, not of one request
            _LOG.exception("the engine has stopped")
            self._failure = f"{type(error).__name__}: {error}"
            self._fail_all(EngineDeadError, f"the engine has stopped: {self._failure}")

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

    async def _in_thread(self, step: Callable[[], StepOutputs]) -> StepOutputs:
        assert self._thread is not None
        return await asyncio.get_running_loop().run_in_executor(self._thread, step)


def _failure_of(cause: Exception) -> EngineFailureError:
    """The error that a failed request raises in its caller."""
    error = EngineFailureError(f"this request failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
