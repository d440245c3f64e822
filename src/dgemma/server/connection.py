"""Work that is worth doing only as long as its client listens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive


async def while_connected(
    receive: Receive, work: Coroutine[Any, Any, None], is_answered: Callable[[], bool]
) -> None:
    """Do the work; the moment the client leaves, cancel it and wait until it has cleaned up.

    Nothing else may read `receive` meanwhile: the body has been read. `is_answered`: whether the last byte
    was sent. A client that leaves after it has left nobody, and servers call it gone in any case.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if is_answered():
            await asyncio.wait({task})
        has_left = not task.done()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
    if has_left:
        raise ClientDisconnect
    task.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
