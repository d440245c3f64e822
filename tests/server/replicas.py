"""`TEST_REPLICAS=2 pytest tests/server`: the same tests, with several engines behind the server.

Servers that are processes of their own start replicas by Ray, which must be installed; those in this process
have several engines here.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import count

from dgemma.engine.async_engine import AsyncEngine
from dgemma.engine.request import EngineRequest
from dgemma.engine.service import EngineEvent, EngineService, EngineStats
from dgemma.scale.replicated_engine import ReplicatedEngine

NUM_REPLICAS = int(os.environ.get("TEST_REPLICAS", "1"))


class InTurns:
    """Engines of this process, asked one after another."""

    def __init__(self, engines: Sequence[AsyncEngine]) -> None:
        self.engines = engines
        self._next = count()

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        engine = self.engines[next(self._next) % len(self.engines)]
        async with aclosing(engine.submit(request)) as events:
            async for event in events:
                yield event

    async def stats(self) -> Sequence[EngineStats]:
        return [engine.stats() for engine in self.engines]


def as_one(engines: Sequence[AsyncEngine]) -> EngineService:
    if len(engines) == 1:
        return engines[0]
    return ReplicatedEngine(
        engines[0].model, InTurns(engines), [engine.stats() for engine in engines], poll_s=0.05
    )
