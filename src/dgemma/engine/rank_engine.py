"""The engine of one rank of several, which compute one model together.

Each rank has an engine with the same requests, blocks and canvases. The first decides: before a step it
shares what was called since the last one, and the plan. After it all compare what they have come to. The
other ranks either only `follow`, or run the same program, which makes the same calls of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dgemma.engine.engine import Engine
from dgemma.engine.request import ValidatedRequest
from dgemma.engine.scheduler import SchedulerOutput
from dgemma.engine.service import Failed
from dgemma.errors import RankError
from dgemma.events import Event
from dgemma.model.transformer import Transformer


@dataclass(frozen=True)
class SharedPlan:
    """A step as the first rank decides it."""

    calls: tuple[tuple[str, tuple[Any, ...]], ...]  # of the engine, by name, since the last step
    late: tuple[int, ...]  # requests that finish before it, at their deadline
    output: SchedulerOutput
    paused: frozenset[int]


class RankEngine(Engine):
    heartbeat_s = 5.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ranks = self._models[None].ranks
        self._calls: list[tuple[str, tuple[Any, ...]]] = []  # since the last step
        self._is_told = False  # while the first rank's calls are made here
        self._costs = self._ranks.share(self._costs)  # parts differ in size, and a cost decides

    def reserve(self, requests: Iterable[ValidatedRequest]) -> None:
        requests = tuple(requests)
        if self._decides:
            super().reserve(requests)
        self._record("reserve", requests)

    def add(self, validated: ValidatedRequest, *, arrived: float | None = None) -> int:
        if self._decides:
            request_id = super().add(validated, arrived=arrived)
        else:
            request_id = self._next + sum(name == "add" for name, _ in self._calls)
        self._record("add", validated)
        return request_id

    def cancel(self, request_id: int) -> None:
        if self._decides:
            super().cancel(request_id)
        self._record("cancel", request_id)

    @property
    def is_idle(self) -> bool:
        return super().is_idle and all(name != "add" for name, _ in self._calls)

    def step(self, paused: Collection[int] = ()) -> list[tuple[int, Event | Failed]]:
        outputs = super().step(paused)
        self._compare(outputs)
        return outputs

    def follow(self) -> bool:
        """A step of a rank that is not the first, as soon as that begins one -> False: there are no more."""
        try:
            self.step()
        except LastStepError:
            return False
        return True

    def close(self) -> None:
        """Of the first rank: the others need not wait for another step."""
        self._ranks.share(None)

    @property
    def _decides(self) -> bool:
        """Whether a call is carried out at once; else with the next plan, as the first rank was called."""
        return self._ranks.leads or self._is_told

    def _record(self, name: str, *arguments: Any) -> None:
        if not self._is_told:
            self._calls.append((name, arguments))

    def _plan(self, paused: Collection[int]) -> tuple[SchedulerOutput, Collection[int]]:
        calls, self._calls = tuple(self._calls), []
        if self._ranks.leads:
            late = tuple(self._late())
            output, paused = super()._plan(paused)
            self._ranks.share(SharedPlan(calls, late, output, frozenset(paused)))
            return output, paused
        plan = self._next_plan(is_waited_for=bool(calls or self._sequences))
        if calls and [name for name, _ in calls] != [name for name, _ in plan.calls]:
            raise self._parted("was called otherwise than the first")
        self._is_told = True
        for name, arguments in plan.calls:
            getattr(self, name)(*arguments)
        self._is_told = False
        self._expire_all(plan.late)
        self._scheduler.follow(plan.output)
        return plan.output, plan.paused

    def _next_plan(self, *, is_waited_for: bool) -> SharedPlan:
        try:
            plan = self._ranks.share(None)
        except RankError:
            if is_waited_for:
                raise
            raise LastStepError from None  # the first rank has ended, and had nothing left to do
        if plan is None:
            raise LastStepError
        assert isinstance(plan, SharedPlan)
        return plan

    def _compare(self, outputs: list[tuple[int, Event | Failed]]) -> None:
        """End the group if a rank has come to another result: its next steps would be others, too."""
        said = [(number, type(event).__name__, getattr(event, "tokens", ())) for number, event in outputs]
        state = f"{said} {sorted(self._sequences)} {self._kv_manager.full.num_used}"
        found = self._ranks.gather(torch.tensor([zlib.crc32(state.encode())], device=self._device))
        if len({int(each) for each in found}) > 1:
            raise self._parted("has come to another result than the others")

    def _parted(self, what: str) -> RankError:
        return RankError(
            f"rank {self._ranks.rank} of {self._ranks.size} {what}. "
            "All processes of this model end; start it again."
        )


class LastStepError(Exception):
    """The first rank makes no more steps."""


def make_engine(models: Mapping[str | None, Transformer], *args: Any, **options: Any) -> Engine:
    """An `Engine`, or this rank's."""
    kind = RankEngine if models[None].ranks.size > 1 else Engine
    return kind(models, *args, **options)
