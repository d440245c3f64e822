"""The answers of one request, written at once: their events in one stream, and one way to end them all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager

from dgemma.engine.service import EngineEvent, EngineFailureError, EngineRequest, EngineService
from dgemma.events import Answer
from dgemma.server.api_error import timed_out

Step = asyncio.Task[EngineEvent | None]


@asynccontextmanager
async def open_answers(
    engine: EngineService, requests: Sequence[EngineRequest], *, timeout_s: float
) -> AsyncIterator[AsyncIterator[tuple[int, EngineEvent]]]:
    """Events with the number of their request, in the order they come.

    Entered when all requests are accepted; the first refusal is raised instead. Left, in whatever way, when
    all iterators of the engine are closed: what is not finished then is cancelled. The engine should have
    ended by itself after `timeout_s`, for it knows the deadline; if not, it is given up.
    """
    streams = [engine.submit(request) for request in requests]
    steps: dict[Step, int] = {}
    ends_at = asyncio.get_running_loop().time() + timeout_s
    try:
        steps |= {asyncio.create_task(_step(stream)): index for index, stream in enumerate(streams)}
        await asyncio.wait(steps, return_when=asyncio.FIRST_EXCEPTION, timeout=timeout_s)
        for step in [step for step in steps if step.done()]:
            step.result()
        if not all(step.done() for step in steps):
            raise _gave_up(timeout_s)
        yield _merged(streams, steps, ends_at, timeout_s)
    finally:
        for step in steps:
            step.cancel()
        await asyncio.gather(*steps, return_exceptions=True)
        await asyncio.gather(*(stream.aclose() for stream in streams), return_exceptions=True)


def all_of(answers: dict[int, Answer], count: int) -> list[Answer]:
    """The answers in the order of their requests."""
    if len(answers) != count:
        raise EngineFailureError(
            f"the engine ended {count - len(answers)} of {count} answers without a Finish."
        )
    return [answers[index] for index in range(count)]


async def _merged(
    streams: Sequence[AsyncGenerator[EngineEvent, None]],
    steps: dict[Step, int],
    ends_at: float,
    timeout_s: float,
) -> AsyncIterator[tuple[int, EngineEvent]]:
    while steps:
        left = max(0.0, ends_at - asyncio.get_running_loop().time())
        done, _ = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED, timeout=left)
        if not done:
            raise _gave_up(timeout_s)
        for step in sorted(done, key=steps.__getitem__):
            index = steps.pop(step)
            event = step.result()
            if event is not None:
                yield index, event
                # Asked for only now: the next step begins when this event was taken.
                steps[asyncio.create_task(_step(streams[index]))] = index


async def _step(stream: AsyncGenerator[EngineEvent, None]) -> EngineEvent | None:
    return await anext(stream, None)


def _gave_up(timeout_s: float) -> Exception:
    return timed_out(f"no answer within {timeout_s:g} seconds; ask for fewer tokens, or set deadline_s.")
