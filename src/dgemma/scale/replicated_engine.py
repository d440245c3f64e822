"""Several engines, each with the whole model, as one: an `EngineService` for the server.

A request whose replica is lost begins again on another one. The same seed gives the same text there, so what
was already passed on is compared and left out, and a stream goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

from dgemma.engine.request import EngineRequest
from dgemma.engine.service import (
    Accepted,
    DrainingError,
    EngineDeadError,
    EngineEvent,
    EngineFailureError,
    EngineRestartedError,
    EngineStats,
    ServedModel,
)
from dgemma.errors import DgemmaError
from dgemma.events import CanvasStep, Commit, Draft, Finish, PromptScored

_LOG = logging.getLogger(__name__)
_MAX_ATTEMPTS = 5


class ReplicaLostError(DgemmaError):
    """The replica that had the request is gone."""


class Replicas(Protocol):
    def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """`EngineService.submit` on one of them. Raises `ReplicaLostError` if it is lost."""
        ...

    async def stats(self) -> Sequence[EngineStats]:
        """Of each that answers."""
        ...


class ReplicatedEngine:
    """An `EngineService`. stats: of each replica at the start."""

    def __init__(
        self, model: ServedModel, replicas: Replicas, stats: Sequence[EngineStats], *, poll_s: float = 1.0
    ) -> None:
        self.model = model
        self.num_replicas = len(stats)
        self._replicas = replicas
        self._stats = total(stats)
        self._poll_s = poll_s
        self._polling: asyncio.Task[None] | None = None
        self._polled = 0.0
        self._running = 0
        self._is_idle = asyncio.Event()
        self._is_draining = False

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        if self._is_draining:
            raise DrainingError("the server is shutting down and takes no new requests.")
        self._running += 1
        self._is_idle.clear()
        try:
            async with aclosing(self._attempts(request)) as events:
                async for event in events:
                    yield event
        finally:
            self._running -= 1
            if not self._running:
                self._is_idle.set()

    async def _attempts(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        passed = _PassedOn()
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            try:
                async with aclosing(self._replicas.submit(request)) as events:
                    async for event in events:
                        if passed.is_new(event):
                            yield event
                        if isinstance(event, Finish):
                            return
                raise ReplicaLostError("the replica ended the request without an answer.")
            except (ReplicaLostError, EngineRestartedError, EngineDeadError) as error:
                if attempt == _MAX_ATTEMPTS:
                    raise EngineFailureError(f"{attempt} replicas were lost with this request.") from error
                _LOG.warning("a request begins again on another replica: %s", error)

    def stats(self) -> EngineStats:
        """What was heard last; the replicas are asked again in the background."""
        if time.monotonic() - self._polled > self._poll_s and self._polling is None:
            self._polling = asyncio.create_task(self._poll())
        return self._stats

    async def fresh_stats(self) -> EngineStats:
        if self._polling is not None:  # it may have been answered before now
            await asyncio.wait({self._polling})
        polling = self._polling = self._polling or asyncio.create_task(self._poll())
        await asyncio.wait({polling})  # and not the task itself: others may wait for it too
        return self._stats

    async def _poll(self) -> None:
        try:
            found = await self._replicas.stats()
            if found:
                self.num_replicas, self._stats = len(found), total(found)
        finally:
            self._polled, self._polling = time.monotonic(), None

    async def drain(self, timeout_s: float) -> None:
        self._is_draining = True
        if self._running:
            try:
                await asyncio.wait_for(self._is_idle.wait(), timeout_s)
            except TimeoutError:
                _LOG.warning("%d requests were still running", self._running)


@dataclass
class _PassedOn:
    """What the caller has of a request, over all attempts."""

    is_accepted: bool = False
    is_scored: bool = False
    commits: list[Commit] = field(default_factory=list)
    _repeated: int = 0  # commits of this attempt that the caller has

    def is_new(self, event: EngineEvent) -> bool:
        if isinstance(event, Accepted):
            self._repeated = 0
            first, self.is_accepted = not self.is_accepted, True
            return first
        if isinstance(event, PromptScored):
            first, self.is_scored = not self.is_scored, True
            return first
        if isinstance(event, Commit):
            if self._repeated == len(self.commits):
                self.commits.append(event)
                self._repeated += 1
                return True
            before = self.commits[self._repeated]
            if (event.tokens, event.text) != (before.tokens, before.text):
                raise EngineFailureError(
                    "the replica was lost, and another one came to another text than was sent already."
                )
            self._repeated += 1
            return False
        if isinstance(event, Draft | CanvasStep):
            return self._repeated == len(self.commits)
        return True


def total(stats: Sequence[EngineStats]) -> EngineStats:
    """Of all replicas together. They have failed if all have."""
    found = EngineStats()
    for each in stats:
        sums = {
            name: getattr(found, name) + getattr(each, name)
            for name in (
                "slots_used", "slots_total", "full_blocks_used", "full_blocks_total", "window_blocks_used",
                "window_blocks_total", "num_waiting", "prefix_hit_tokens", "restarts",
            )
        }  # fmt: skip
        counters = {
            name: found.counters.get(name, 0) + each.counters.get(name, 0)
            for name in {**found.counters, **each.counters}
        }
        found = replace(found, **sums, counters=counters)
    failures = [each.failure for each in stats if each.failure is not None]
    return replace(
        found,
        failure=failures[0] if failures and len(failures) == len(stats) else None,
        is_stalled=bool(stats) and all(each.is_stalled for each in stats),
    )
