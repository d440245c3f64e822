"""The engine requests of one client request: submitted in rounds, their events merged, all closed together.

A task such as infill of an unknown length has some thirty requests per round. Submitted all at once they
would be refused wherever the queue is short, and would delay other clients. So few are in flight.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from dgemma.engine.request import EngineRequest
from dgemma.engine.service import BusyError, EngineEvent, EngineFailureError, EngineService
from dgemma.errors import DgemmaError
from dgemma.events import Finish
from dgemma.server.http.errors import timed_out

MAX_IN_FLIGHT = 8
# A place in the queue becomes free when an answer ends: retry soon at first, then with growing pauses.
_MAX_RETRIES = 10
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.05, 2.0

EngineStream = AsyncGenerator[EngineEvent, None]
Step = asyncio.Task[EngineEvent | None]


class TaskDeadlineError(DgemmaError):
    """The deadline came before a task was done: the answers so far are of no use to it."""


@dataclass(frozen=True, kw_only=True)
class SubmitPolicy:
    """How the requests of a round are submitted."""

    max_in_flight: int | None  # None: all at once, and all must be accepted before an event is passed on
    deadline_s: float  # for all rounds of the client request
    timeout_s: float  # after the deadline: how long the engine has to end by itself, from the start
    tenant: str = ""
    max_tenant_seqs: int | None = None
    cache_salt: str = ""


class EngineRounds:
    """Submits rounds of requests for one client request. Its clock starts when it is made."""

    def __init__(self, engine: EngineService, policy: SubmitPolicy) -> None:
        self._engine = engine
        self._policy = policy
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self.is_accepted = False  # the engine has accepted a request

    @property
    def time_left_s(self) -> float:
        """Until the server stops waiting for the engine."""
        return max(0.0, self._began + self._policy.timeout_s - self._loop.time())

    def timeout(self) -> Exception:
        return timed_out(
            f"no answer within {self._policy.timeout_s:g} seconds; ask for fewer tokens, or set deadline_s."
        )

    async def events(
        self, requests: Sequence[EngineRequest]
    ) -> AsyncGenerator[tuple[int, EngineEvent], None]:
        """Events with the index of their request, as they come. Ends when every request has finished.

        When this generator is closed, all engine streams are closed: unfinished requests are cancelled.
        """
        policy = self._policy
        owned = [
            replace(
                request,
                tenant=policy.tenant,
                max_tenant_seqs=policy.max_tenant_seqs,
                cache_salt=policy.cache_salt,
            )
            for request in requests
        ]
        round_ = _Round(self._engine, owned)
        try:
            if self._policy.max_in_flight is None:
                merged = self._all_at_once(round_)
            else:
                merged = self._windowed(round_, self._policy.max_in_flight)
            async with aclosing(merged):
                async for index, event in merged:
                    yield index, event
        finally:
            await round_.close()
        round_.check_finished()

    async def _all_at_once(self, round_: _Round) -> AsyncGenerator[tuple[int, EngineEvent], None]:
        while round_.waiting:
            round_.submit()
        # The first step of each stream is its acceptance or its refusal.
        await asyncio.wait(round_.steps, return_when=asyncio.FIRST_EXCEPTION, timeout=self.time_left_s)
        for step in [step for step in round_.steps if step.done()]:
            step.result()
        if not all(step.done() for step in round_.steps):
            raise self.timeout()
        self.is_accepted = True
        while round_.steps:
            for index, event in await self._next_events(round_):
                yield index, event

    async def _windowed(self, round_: _Round, limit: int) -> AsyncGenerator[tuple[int, EngineEvent], None]:
        """At most `limit` requests in flight, each submitted when the one before it is accepted.

        A full queue is an error only before the engine has accepted anything, or if it stays full.
        """
        retries = 0
        while round_.waiting or round_.steps:
            refusal: BusyError | None = None
            while round_.waiting and len(round_.steps) < limit and refusal is None:
                try:
                    accepted = await self._accepted(round_)
                except BusyError as error:
                    refusal = error
                    continue
                retries = 0
                if not self.is_accepted:
                    self.is_accepted = True
                    yield round_.last_submitted, accepted
            if round_.steps:
                for index, event in await self._next_events(round_):
                    yield index, event
            elif refusal is not None:
                if retries == _MAX_RETRIES or not self.is_accepted:
                    raise refusal
                await asyncio.sleep(min(_LONGEST_RETRY_S, _FIRST_RETRY_S * 2**retries))
                retries += 1

    async def _accepted(self, round_: _Round) -> EngineEvent:
        """Submit the next request and wait for its first event, Accepted; a refusal leaves it waiting."""
        try:
            # Awaited here, not in a task: the whole window is submitted before its requests advance.
            async with asyncio.timeout(self.time_left_s):
                return await round_.submit_and_wait(deadline_s=self._deadline_left_s())
        except TimeoutError:
            raise self.timeout() from None

    def _deadline_left_s(self) -> float:
        left = self._began + self._policy.deadline_s - self._loop.time()
        if left <= 0:
            raise TaskDeadlineError("there is no time left for the rest of the task.")
        return left

    async def _next_events(self, round_: _Round) -> Iterator[tuple[int, EngineEvent]]:
        """The events of all streams that have one."""
        done, _ = await asyncio.wait(
            round_.steps, return_when=asyncio.FIRST_COMPLETED, timeout=self.time_left_s
        )
        if not done:
            raise self.timeout()
        return round_.take(done)


class _Round:
    """The streams of one round, and the pending step of each."""

    def __init__(self, engine: EngineService, requests: Sequence[EngineRequest]) -> None:
        self._engine = engine
        self._requests = requests
        self._streams: dict[int, EngineStream] = {}
        self._num_finished = 0
        self.waiting = deque(range(len(requests)))
        self.steps: dict[Step, int] = {}
        self.last_submitted = 0

    def submit(self) -> None:
        """Submit the next waiting request; its first step is pending."""
        index = self.waiting.popleft()
        self._streams[index] = self._engine.submit(self._requests[index])
        self.resume(index)

    async def submit_and_wait(self, *, deadline_s: float) -> EngineEvent:
        """Submit the next waiting request -> its first event. If the engine refuses, it stays waiting."""
        index = self.waiting[0]
        request = self._requests[index]
        params = replace(request.params, deadline_s=deadline_s)
        stream = self._engine.submit(replace(request, params=params))
        self._streams[index] = stream
        try:
            event = await anext(stream)
        except BusyError:
            del self._streams[index]
            raise
        self.last_submitted = self.waiting.popleft()
        self.resume(index)
        return event

    def resume(self, index: int) -> None:
        """Ask for the next event."""
        self.steps[asyncio.create_task(_next_event(self._streams[index]))] = index

    def take(self, done: set[Step]) -> Iterator[tuple[int, EngineEvent]]:
        """The events of steps that are done, in the order of their requests. Asks for the next ones."""
        for step in sorted(done, key=self.steps.__getitem__):
            index = self.steps.pop(step)
            event = step.result()
            if event is not None:
                self._num_finished += isinstance(event, Finish)
                yield index, event
                # Only now, when the event was taken: of a slow reader's drafts the engine keeps the newest.
                self.resume(index)

    async def close(self) -> None:
        for step in self.steps:
            step.cancel()
        await asyncio.gather(*self.steps, return_exceptions=True)
        # A step that was cancelled before it began has closed nothing.
        streams = self._streams.values()
        await asyncio.gather(*(stream.aclose() for stream in streams), return_exceptions=True)

    def check_finished(self) -> None:
        count = len(self._requests)
        if self._num_finished != count:
            missing = count - self._num_finished
            raise EngineFailureError(f"the engine ended {missing} of {count} answers without a Finish.")


async def _next_event(stream: EngineStream) -> EngineEvent | None:
    return await anext(stream, None)
