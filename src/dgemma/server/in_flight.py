"""Requests of one piece of work with the engine: a few at a time, and one way to end them all.

A gap of unknown length alone is some thirty requests. Sent all at once they would be refused wherever the
queue is short, and everybody else would wait behind them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from dgemma.engine.service import BusyError, EngineEvent, EngineFailureError, EngineRequest, EngineService
from dgemma.errors import DgemmaError
from dgemma.events import Answer, Finish, FinishReason

MOST_IN_FLIGHT = 8
# A place in the queue gets free when somebody's answer ends: look often at first, then leave others alone.
_TRIES = 10
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0

Stream = AsyncGenerator[EngineEvent, None]


class OutOfTimeError(DgemmaError):
    """The deadline came before the work was done: what the engine has by then is of no use to it."""


@dataclass
class Tally:
    """What a piece of work took."""

    canvases: int = 0
    forwards: int = 0
    cached_tokens: int | None = None  # that its first request found; its others find what that one has read
    prefill_s: float = 0.0  # of its first request

    def count(self, answer: Answer) -> None:
        self.canvases += len(answer.steps)
        self.forwards += sum(answer.steps)

    def count_first(self, answer: Answer) -> None:
        if self.cached_tokens is None:
            self.cached_tokens, self.prefill_s = answer.cached_tokens, answer.timings.prefill_s


class InFlight:
    """Asks an engine for one body. Its clock runs from the moment it is made."""

    def __init__(self, engine: EngineService, *, deadline_s: float, most: int) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._ends_at = self._loop.time() + deadline_s
        # More than run at once would only stand in the queue before others.
        self._most = max(1, min(MOST_IN_FLIGHT, engine.stats().slots_total, most))
        self.accepted = asyncio.Event()  # the engine has taken a request

    async def ask(self, requests: Sequence[EngineRequest], tally: Tally) -> list[Answer]:
        """The answers in the order of their requests. Left, in whatever way, when nothing of them runs on.

        A full queue is an error only before anything was taken, or if it stays full.
        """
        answers: dict[int, Answer] = {}
        waiting = deque(enumerate(requests))
        running: dict[asyncio.Task[Answer], tuple[int, Stream]] = {}
        tries = 0
        try:
            while waiting or running:
                refusal: BusyError | None = None
                while waiting and len(running) < self._most and refusal is None:
                    number, request = waiting[0]
                    try:
                        stream = await self._submit(request)
                    except BusyError as error:
                        refusal = error
                        continue
                    waiting.popleft()
                    running[asyncio.create_task(_answer(stream))] = number, stream
                    tries = 0
                if running:
                    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        number, _ = running.pop(task)
                        answers[number] = self._taken(task.result(), tally)
                elif refusal is not None:
                    if tries == _TRIES or not self.accepted.is_set():
                        raise refusal
                    await asyncio.sleep(min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2**tries))
                    tries += 1
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            # A task that was cancelled before its first step has closed nothing.
            await asyncio.gather(*(stream.aclose() for _, stream in running.values()), return_exceptions=True)
        found = [answers[number] for number in range(len(requests))]
        for answer in found[:1]:
            tally.count_first(answer)
        return found

    async def _submit(self, request: EngineRequest) -> Stream:
        """The events of a request that the engine has taken."""
        left = self._ends_at - self._loop.time()
        if left <= 0:
            raise OutOfTimeError("there is no time left for the rest of the work.")
        stream = self._engine.submit(replace(request, params=replace(request.params, deadline_s=left)))
        try:
            await anext(stream, None)
        except BaseException:
            await stream.aclose()
            raise
        self.accepted.set()
        return stream

    def _taken(self, answer: Answer, tally: Tally) -> Answer:
        tally.count(answer)
        if answer.finish_reason is FinishReason.DEADLINE:
            raise OutOfTimeError("the deadline cut a part of the work short.")
        return answer


async def _answer(stream: Stream) -> Answer:
    async with aclosing(stream):
        async for event in stream:
            if isinstance(event, Finish):
                return event.answer
    raise EngineFailureError("the engine ended a request without a Finish.")
