"""Requests outlive their replica: the same events, once each, from another one."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import pytest

from dgemma.engine.request import EngineRequest
from dgemma.engine.service import (
    Accepted,
    BusyError,
    DrainingError,
    EngineDeadError,
    EngineEvent,
    EngineFailureError,
    EngineRestartedError,
    EngineStats,
    ServedModel,
)
from dgemma.errors import DgemmaError, InputError
from dgemma.events import Answer, Commit, Draft, Finish, FinishReason, PromptScored
from dgemma.params import GenerationParams
from dgemma.scale.replicated_engine import ReplicaLostError, ReplicatedEngine, total

MODEL = ServedModel(max_positions=100, canvas_len=4, vocab_size=10)
REQUEST = EngineRequest(prompt=(1, 2), seed=3, params=GenerationParams())


def draft(canvas: int) -> Draft:
    return Draft(row=0, canvas=canvas, step=1, tokens=(1,), entropy=(0.0,), text="?")


def commit(canvas: int, text: str = "") -> Commit:
    return Commit(row=0, canvas=canvas, tokens=(canvas,), steps=2, text=text or f"{canvas} ")


def finish() -> Finish:
    answer = Answer(text="0 1 ", tokens=(0, 1), finish_reason=FinishReason.STOP, seed=3, decode="diffuse")
    return Finish(row=0, answer=answer)


WHOLE: list[EngineEvent] = [
    Accepted(),
    PromptScored(row=0, logprobs=()),
    draft(0),
    commit(0),
    draft(1),
    commit(1),
    finish(),
]


class ScriptedReplicas:
    """Each submit plays the next script; an error in it is raised."""

    def __init__(self, *scripts: Sequence[EngineEvent | Exception]) -> None:
        self.scripts = list(scripts)
        self.num_closed = 0
        self.found = [EngineStats(slots_total=4)]

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        assert request == REQUEST  # the seed and all options stay
        try:
            for event in self.scripts.pop(0):
                await asyncio.sleep(0)
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self.num_closed += 1

    async def stats(self) -> Sequence[EngineStats]:
        return self.found


def engine_of(replicas: ScriptedReplicas) -> ReplicatedEngine:
    return ReplicatedEngine(MODEL, replicas, replicas.found, poll_s=0)


def events_of(replicas: ScriptedReplicas) -> list[EngineEvent]:
    async def collect() -> list[EngineEvent]:
        return [event async for event in engine_of(replicas).submit(REQUEST)]

    return asyncio.run(collect())


def test_the_events_of_a_replica_are_passed_on() -> None:
    assert events_of(ScriptedReplicas(WHOLE)) == WHOLE


@pytest.mark.parametrize("cut", range(len(WHOLE)))
@pytest.mark.parametrize(
    "loss", [ReplicaLostError("gone"), EngineRestartedError("hung"), EngineDeadError("dead")]
)
def test_a_request_whose_replica_is_lost_goes_on_elsewhere(cut: int, loss: Exception) -> None:
    replicas = ScriptedReplicas([*WHOLE[:cut], loss], WHOLE)
    found = events_of(replicas)
    assert [event for event in found if not isinstance(event, Draft)] == [
        event for event in WHOLE if not isinstance(event, Draft)
    ]
    committed = -1
    for event in found:  # no draft of a canvas that is settled
        committed = event.canvas if isinstance(event, Commit) else committed
        assert not isinstance(event, Draft) or event.canvas > committed
    assert replicas.num_closed == 2


def test_a_replica_that_ends_without_an_answer_counts_as_lost() -> None:
    assert events_of(ScriptedReplicas(WHOLE[:3], WHOLE))[-1] == finish()


def test_another_text_than_was_sent_already_is_an_error() -> None:
    other = [Accepted(), commit(0, "other"), finish()]
    with pytest.raises(EngineFailureError, match="another text"):
        events_of(ScriptedReplicas([*WHOLE[:4], ReplicaLostError("gone")], other))


def test_a_request_is_not_tried_for_ever() -> None:
    replicas = ScriptedReplicas(*[[Accepted(), ReplicaLostError("gone")]] * 9)
    with pytest.raises(EngineFailureError, match="5 replicas were lost"):
        events_of(replicas)
    assert len(replicas.scripts) == 4


@pytest.mark.parametrize(
    "error",
    [BusyError("full", retry_after_s=2.0), InputError("wrong", field="seed"), EngineFailureError("failed")],
)
def test_what_is_wrong_with_the_request_is_not_tried_again(error: Exception) -> None:
    replicas = ScriptedReplicas([error], WHOLE)
    with pytest.raises(type(error)) as raised:
        events_of(replicas)
    assert raised.value is error
    assert len(replicas.scripts) == 1


def test_a_caller_that_leaves_closes_its_replica() -> None:
    async def leave(replicas: ScriptedReplicas) -> None:
        events = engine_of(replicas).submit(REQUEST)
        assert isinstance(await anext(events), Accepted)
        await events.aclose()

    replicas = ScriptedReplicas(WHOLE)
    asyncio.run(leave(replicas))
    assert replicas.num_closed == 1


def test_draining_waits_for_what_runs_and_refuses_what_is_new() -> None:
    async def drain() -> None:
        engine = engine_of(ScriptedReplicas(WHOLE, WHOLE))
        events = engine.submit(REQUEST)
        await anext(events)
        draining = asyncio.create_task(engine.drain(5))
        await asyncio.sleep(0.01)
        assert not draining.done()
        with pytest.raises(DrainingError):
            await anext(engine.submit(REQUEST))
        assert [event async for event in events] == WHOLE[1:]
        await draining

    asyncio.run(drain())


def test_stats_are_sums_and_follow_the_replicas() -> None:
    busy = EngineStats(slots_used=1, slots_total=4, num_waiting=2, counters={"forwards": 3})
    dead = EngineStats(slots_total=4, counters={"forwards": 1, "other": 5}, failure="broken")
    both = total([busy, dead])
    assert (both.slots_used, both.slots_total, both.num_waiting) == (1, 8, 2)
    assert both.counters == {"forwards": 4, "other": 5}
    assert both.failure is None  # one still answers
    assert total([dead, dead]).failure == "broken"

    async def follow() -> None:
        replicas = ScriptedReplicas()
        engine = engine_of(replicas)
        assert engine.stats().slots_total == 4
        replicas.found = [busy, dead]
        engine.stats()
        await asyncio.sleep(0.01)
        assert engine.stats().slots_total == 8
        assert engine.num_replicas == 2
        replicas.found = []  # none answers for now: what was known stays
        await asyncio.sleep(0.01)
        engine.stats()
        await asyncio.sleep(0.01)
        assert engine.stats().slots_total == 8

    asyncio.run(follow())


def test_metrics_are_of_now_and_not_of_the_scrape_before() -> None:
    async def scrape() -> None:
        replicas = ScriptedReplicas()
        engine = engine_of(replicas)
        for count in (3, 5, 9):
            replicas.found = [EngineStats(counters={"forwards": count})]
            assert (await engine.fresh_stats()).counters == {"forwards": count}
        engine.stats()  # begins to ask
        replicas.found = [EngineStats(counters={"forwards": 10})]
        both = await asyncio.gather(engine.fresh_stats(), engine.fresh_stats())
        assert [found.counters["forwards"] for found in both] == [10, 10]

    asyncio.run(scrape())


MADE: list[Callable[[], DgemmaError]] = [
    lambda: BusyError("full", retry_after_s=2.0),
    lambda: InputError.about("seed", "is wrong", code="bad"),
    lambda: EngineDeadError("dead"),
]


@pytest.mark.parametrize("make", MADE)
def test_errors_come_through_processes_whole(make: Callable[[], DgemmaError]) -> None:
    error = make()
    found: Any = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert found.__dict__ == error.__dict__
