"""One piece of work at a time, the clients in rotation: one with much to do delays others by one piece."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class Turns:
    """Runs functions in a thread, one after another. Used from one event loop."""

    def __init__(self) -> None:
        self._is_busy = False
        # By client, in the order of their turns; none without someone who waits.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, client: str, work: Callable[[], Result]) -> Result:
        """The result of `work`. It ends its turn even if nobody waits for it any more."""
        if self._is_busy:
            await self._wait(client)
        self._is_busy = True
        task = asyncio.ensure_future(asyncio.to_thread(work))
        task.add_done_callback(self._end)
        return await asyncio.shield(task)

    async def _wait(self, client: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had just come
                self._start_next()
            raise

    def _end(self, task: asyncio.Future[Result]) -> None:
        if not task.cancelled():
            task.exception()  # seen, also where nobody waits any more
        self._start_next()

    def _start_next(self) -> None:
        while self._waiting:
            client, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns  # the last in the rotation
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
                return
        self._is_busy = False
