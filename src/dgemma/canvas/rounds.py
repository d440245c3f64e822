"""Work in rounds: requests go out together, answers come back, and what they say decides on the next ones.

The work is a generator and knows no engine, no thread and no event loop. Whoever drives it has one: the
Python API its local engine, the server its asynchronous one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import TypeVar

from dgemma.engine.service import EngineRequest
from dgemma.events import Answer

Result = TypeVar("Result")

Rounds = Generator[list[EngineRequest], list[Answer], Result]


def drive(rounds: Rounds[Result], ask: Callable[[Sequence[EngineRequest]], list[Answer]]) -> Result:
    """To the end, one batch of requests after another. `ask` answers them in their order."""
    try:
        requests = next(rounds)
        while True:
            requests = rounds.send(ask(requests) if requests else [])
    except StopIteration as end:
        result: Result = end.value
        return result


async def drive_async(
    rounds: Rounds[Result], ask: Callable[[Sequence[EngineRequest]], Awaitable[list[Answer]]]
) -> Result:
    """The same for an `ask` that is awaited."""
    try:
        requests = next(rounds)
        while True:
            requests = rounds.send(await ask(requests) if requests else [])
    except StopIteration as end:
        result: Result = end.value
        return result
