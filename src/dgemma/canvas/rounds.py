"""Work in rounds: requests go out together, answers come back, and what they say decides on the next ones.

The work is a generator and knows no engine, no thread and no event loop. Whoever drives it has one: the
Python API its local engine, the server its asynchronous one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dgemma.engine.service import EngineRequest
from dgemma.events import Answer

Result = TypeVar("Result")

Rounds = Generator[list[EngineRequest], list[Answer], Result]


def drive(rounds: Rounds[Result], ask: Callable[[Sequence[EngineRequest]], list[Answer]]) -> Result:
    """To the end, one batch of requests after another. `ask` answers them in their order."""
    step = advance(rounds, None)
    while not isinstance(step, Ended):
        step = advance(rounds, ask(step) if step else [])
    return step.result


async def drive_async(
    rounds: Rounds[Result], ask: Callable[[Sequence[EngineRequest]], Awaitable[list[Answer]]]
) -> Result:
    """The same for an `ask` that is awaited."""
    step = advance(rounds, None)
    while not isinstance(step, Ended):
        step = advance(rounds, await ask(step) if step else [])
    return step.result


@dataclass(frozen=True)
class Ended(Generic[Result]):
    """The work is done."""

    result: Result


def advance(rounds: Rounds[Result], answers: list[Answer] | None) -> list[EngineRequest] | Ended[Result]:
    """The next requests, or the end. A StopIteration of whoever answers is not the work's."""
    try:
        return next(rounds) if answers is None else rounds.send(answers)
    except StopIteration as end:
        return Ended(end.value)
