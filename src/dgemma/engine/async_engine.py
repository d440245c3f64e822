"""The engine for callers in an event loop: submit, listen, walk away.

All of this runs in the event loop. Only the engine's step runs elsewhere, and while it does nobody touches
the engine: what callers want meanwhile is noted down and done between two steps. How a step runs "elsewhere"
is an argument, so that a simulation can run it in place.
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
from dgemma.engine.service import (
    Accepted,
    BusyError,
    DrainingError,
    EngineEvent,
    EngineFailureError,
    EngineRequest,
    EngineStats,
    Failed,
    ServedModel,
)
from dgemma.events import Draft, Event, Finish

Told = list[tuple[int, Event | Failed]]
RunStep = Callable[[Callable[[], Told]], Awaitable[Told]]

_LOG = logging.getLogger(__name__)

# When to come back, as long as no answer has been finished that would tell.
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0


@dataclass(eq=False)
class _Caller:
    """Somebody who listens. Of drafts in a row only the newest is kept: a slow reader costs no memory."""

    request: EngineRequest
    arrived: float
    number: int | None = None  # None: not with the engine yet
    told: deque[Event | EngineFailureError] = field(default_factory=deque)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, event: Event | EngineFailureError) -> None:
        if isinstance(event, Draft) and self.told and isinstance(self.told[-1], Draft):
            self.told.pop()
        self.told.append(event)
        self.news.set()


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
        self._gone: list[_Caller] = []
        self._callers: dict[int, _Caller] = {}
        self._wake = asyncio.Event()
        self._is_draining = False
        self._failure: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._answer_s = _FIRST_WAIT_S

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        self._refuse_if_closed()
        self._engine.check(request)
        waiting = self._num_waiting
        if waiting >= self._max_waiting + self._engine.num_free_slots:
            raise BusyError(
                f"{waiting} requests are waiting, and no more may. Try again later.",
                retry_after_s=self._wait_s(waiting),
            )
        caller = _Caller(request, self._clock())
        self._new.append(caller)
        self._wake.set()
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        is_over = False
        try:
            yield Accepted(num_waiting=waiting)
            while not is_over:
                await caller.news.wait()
                caller.news.clear()
                while caller.told and not is_over:
                    event = caller.told.popleft()
                    is_over = isinstance(event, Finish | EngineFailureError)
                    if isinstance(event, EngineFailureError):
                        raise event
                    yield event
        finally:
            if not is_over:
                self._gone.append(caller)
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
        """End now, whatever is under way."""
        self._is_draining = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._end_all("the server is shutting down.")
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    @property
    def _num_waiting(self) -> int:
        return self._engine.num_waiting + len(self._new)

    def _refuse_if_closed(self) -> None:
        if self._failure is not None:
            raise EngineFailureError(f"the engine has stopped: {self._failure}")
        if self._is_draining:
            raise DrainingError("the server is shutting down and takes no new requests.")

    def _wait_s(self, waiting: int) -> float:
        """About when a place will be free: answers leave one after another."""
        turns = max(1.0, waiting / self._engine.stats().slots_total)
        return min(_LONGEST_WAIT_S, max(_FIRST_WAIT_S, turns * self._answer_s))

    async def _work(self) -> None:
        """Step as long as there is something to do."""
        try:
            while True:
                self._do_errands()
                if not self._engine.is_idle:
                    self._deliver(await self._run_step(self._engine.step))
                elif self._is_draining:
                    return
                else:
                    self._wake.clear()
                    await self._wake.wait()
        except Exception as error:  # not of one request: the engine itself
            _LOG.exception("the engine has stopped")
            self._failure = f"{type(error).__name__}: {error}"
            self._end_all(f"the engine has stopped: {self._failure}")

    def _end_all(self, why: str) -> None:
        for caller in (*self._callers.values(), *self._new):
            caller.tell(EngineFailureError(why))
        self._callers.clear()
        self._new.clear()

    def _do_errands(self) -> None:
        """What callers wanted while a step was under way."""
        gone, self._gone = self._gone, []
        for caller in gone:
            if caller.number is None:
                self._new.remove(caller)
            else:
                self._engine.cancel(caller.number)
                self._callers.pop(caller.number, None)
        while self._new:
            caller = self._new[0]
            caller.number = self._engine.add(caller.request, arrived=caller.arrived)
            self._callers[caller.number] = self._new.popleft()

    def _deliver(self, told: Told) -> None:
        for number, event in told:
            caller = self._callers.get(number)
            if caller is None:
                continue
            if isinstance(event, Finish):
                self._answer_s += 0.1 * (event.answer.timings.total_s - self._answer_s)
            if isinstance(event, Failed):
                error = EngineFailureError(
                    f"this request failed: {type(event.error).__name__}: {event.error}"
                )
                error.__cause__ = event.error
                caller.tell(error)
            else:
                caller.tell(event)
            if isinstance(event, Finish | Failed):
                del self._callers[number]

    async def _in_thread(self, step: Callable[[], Told]) -> Told:
        assert self._thread is not None
        return await asyncio.get_running_loop().run_in_executor(self._thread, step)
