"""Tasks in rounds: a generator yields a batch of requests and receives their answers, until it returns.

The generator imports no engine, thread or event loop. The Python API runs it with `drive` and a local engine,
the server with `advance`, step by step, and an asynchronous engine.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dgemma.engine.request import EngineRequest
from dgemma.events import Answer

Result = TypeVar("Result")

Rounds = Generator[list[EngineRequest], list[Answer], Result]


def drive(rounds: Rounds[Result], ask: Callable[[Sequence[EngineRequest]], list[Answer]]) -> Result:
    """Run a task to its end. `ask` returns the answers of a batch of requests, in order."""
    step = advance(rounds, None)
    while not isinstance(step, Ended):
        step = advance(rounds, ask(step) if step else [])
    return step.result


@dataclass(frozen=True)
class Ended(Generic[Result]):
    """The task has returned."""

    result: Result


def advance(rounds: Rounds[Result], answers: list[Answer] | None) -> list[EngineRequest] | Ended[Result]:
    """The next requests, or the end. A StopIteration raised by the caller's `ask` is not the task's end."""
    try:
        return next(rounds) if answers is None else rounds.send(answers)
    except StopIteration as end:
        return Ended(end.value)
