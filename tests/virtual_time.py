"""An event loop whose time is a number: nobody waits, a sleep moves the clock, a seed decides the rest."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class DeadlockError(Exception):
    """Everybody waits, and nothing is left that could wake anybody."""


class _NoWaiting(selectors.SelectSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlockError(f"at {self.loop.now} everybody waits, and no timer is set")
        self.loop.now += max(0.0, timeout)
        self.loop.turn += 1
        self.loop.on_turn(self.loop.turn)
        return []  # nothing happens outside


class VirtualLoop(asyncio.SelectorEventLoop):
    """`now` may also be moved on by whoever computes: then others are late, as behind a real computation."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turn = 0  # of the loop, each running all that is ready
        self.on_turn: Callable[[int], object] = lambda turn: None
        self.tasks: list[asyncio.Task[Any]] = []
        self.complaints: list[str] = []
        selector = _NoWaiting()
        selector.loop = self
        super().__init__(selector)
        self.set_exception_handler(lambda _, context: self.complaints.append(str(context["message"])))

    def time(self) -> float:
        return self.now

    def create_task(self, *args: Any, **options: Any) -> asyncio.Task[Any]:
        self.tasks.append(super().create_task(*args, **options))
        return self.tasks[-1]

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """In the next turn, in this thread: a thread of its own would end when no seed says."""
        done: asyncio.Future[Any] = self.create_future()

        def work() -> None:
            if done.done():
                return
            try:
                done.set_result(func(*args))
            except Exception as error:
                done.set_exception(error)

        self.call_soon(work)
        return done

    def leftovers(self) -> list[str]:
        """Tasks that still run, failures that nobody looked at, and what the loop complained about."""
        running = [f"still runs: {task!r}" for task in self.tasks[1:] if not task.done()]
        # asyncio would say so when the task is garbage, which no seed decides.
        unseen = [f"nobody looked at the failure of {task!r}" for task in self.tasks if task._log_traceback]
        return [*running, *unseen, *self.complaints]


def run_virtually(main: Callable[[VirtualLoop], Coroutine[Any, Any, Result]]) -> Result:
    """Run `main` to its end in a loop of its own. Raises DeadlockError where it would wait forever."""
    loop = VirtualLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main(loop))
