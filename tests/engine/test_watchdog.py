"""After a step that hangs or fails as a whole the engine goes on: who was part of it is told, others wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dgemma.engine.async_engine import AsyncEngine, StepOutputs
from dgemma.engine.engine import Engine
from dgemma.engine.kv_cache_manager import KVCacheManager
from dgemma.engine.request import EngineRequest
from dgemma.engine.scheduler import SchedulerConfig
from dgemma.engine.service import EngineDeadError, EngineRestartedError
from dgemma.errors import RankError
from dgemma.events import Finish
from dgemma.params import GenerationParams
from engine_life import CONFIG, ENCODE_BLOCK, answer_alone, make_engine, serve

PARAMS = GenerationParams(max_tokens=8, max_denoising_steps=3, ignore_end=True)
ASKED = EngineRequest(prompt=(2, 300, 301, 106, 9, 10), seed=1, params=PARAMS)


def new_engine(slots: int = 1, **options: Any) -> Engine:
    memory = KVCacheManager(block_size=4, window=CONFIG.window, full_blocks=120, window_blocks=40)
    limits = SchedulerConfig(max_num_seqs=slots, chunk_size=16, encode_block=ENCODE_BLOCK)
    return make_engine(memory, limits, **options)


def run(main: Callable[[AsyncEngine], Coroutine[Any, Any, None]], first: Engine, **options: Any) -> None:
    service: AsyncEngine

    def after_a_restart() -> Engine:
        if service._step_timeout_s is not None:  # a step on a busy machine is not taken for another hung one
            service._step_timeout_s = 600.0
        return new_engine()

    async def within() -> None:
        nonlocal service
        service = serve(first, max_waiting=8, **{"make_engine": after_a_restart, **options})
        try:
            async with asyncio.timeout(600):
                await main(service)
        finally:
            await service.close()

    asyncio.run(within())


async def outcome(service: AsyncEngine, request: EngineRequest) -> Any:
    """The tokens, or the type of the error."""
    try:
        async for event in service.submit(request):
            if isinstance(event, Finish):
                return event.answer.tokens
    except Exception as error:
        return type(error)
    raise AssertionError("the stream ended without a word")


class Failing(Engine):
    def step(self, paused: Sequence[int] = ()) -> StepOutputs:  # type: ignore[override]
        super().step(paused)
        raise OSError("the device is gone")


def test_who_leaves_an_answer_of_the_old_engine_cancels_nobody_of_the_new_one() -> None:
    """Its last event was delivered and not yet read; the new engine gives its id to another."""
    fails = threading.Event()

    class FailingLater(Engine):
        def step(self, paused: Sequence[int] = ()) -> StepOutputs:  # type: ignore[override]
            outputs = super().step(paused)
            if fails.is_set():
                raise OSError("the device is gone")
            return outputs

    async def main(service: AsyncEngine) -> None:
        unread = service.submit(ASKED)
        await anext(unread)
        while service.stats().slots_used or service._callers or service._new:
            await asyncio.sleep(0.01)
        fails.set()
        assert await outcome(service, replace(ASKED, seed=2)) is EngineRestartedError
        third = service.submit(replace(ASKED, seed=3))
        await anext(third)
        while not service._callers:
            await asyncio.sleep(0.001)
        await unread.aclose()
        events = [event async for event in third]
        assert isinstance(events[-1], Finish)
        assert events[-1].answer.tokens == answer_alone(replace(ASKED, seed=3)).tokens

    run(main, new_engine(kind=FailingLater))


def test_a_hung_step_is_noticed_told_to_its_request_and_followed_by_a_new_engine() -> None:
    release, hangs = threading.Event(), threading.Event()

    def hang(point: str, request_ids: Sequence[int]) -> None:
        if point == "forward":
            hangs.set()
            release.wait(600)

    async def main(service: AsyncEngine) -> None:
        first = asyncio.create_task(outcome(service, ASKED))
        await asyncio.to_thread(hangs.wait, 600)
        # The second comes while the first hangs, so it was not part of the step.
        second = asyncio.create_task(outcome(service, replace(ASKED, seed=2)))
        assert await first is EngineRestartedError
        assert await second == answer_alone(replace(ASKED, seed=2)).tokens
        stats = service.stats()
        assert (stats.restarts, stats.is_stalled, stats.failure) == (1, False, None)
        # The old thread comes back: nobody listens to it.
        release.set()
        assert await outcome(service, ASKED) == answer_alone(ASKED).tokens
        assert service.stats().restarts == 1

    run(main, new_engine(fault=hang), step_timeout_s=3.0)


def test_a_step_that_fails_as_a_whole_costs_its_own_requests_alone() -> None:
    async def main(service: AsyncEngine) -> None:
        requests = [replace(ASKED, seed=seed) for seed in range(3)]  # one slot: two of them wait
        tasks = [asyncio.create_task(outcome(service, request)) for request in requests]
        found = [await task for task in tasks]
        assert found[0] is EngineRestartedError
        assert found[1:] == [answer_alone(request).tokens for request in requests[1:]]
        assert service.stats().restarts == 1

    run(main, new_engine(kind=Failing))


def test_counters_go_on_over_a_restart() -> None:
    """A counter that falls is read as a restart of the whole process."""

    async def main(service: AsyncEngine) -> None:
        assert await outcome(service, ASKED) is EngineRestartedError
        before = service.stats()
        assert before.counters["prefill_tokens"] > 0, "of the engine that is gone"
        assert await outcome(service, ASKED) == answer_alone(ASKED).tokens
        assert await outcome(service, ASKED) == answer_alone(ASKED).tokens
        after = service.stats()
        assert after.counters["prefill_tokens"] > before.counters["prefill_tokens"]
        assert all(after.counters[name] >= count for name, count in before.counters.items())

    run(main, new_engine(kind=Failing))


def test_an_engine_that_fails_again_and_again_stops_for_good() -> None:
    async def main(service: AsyncEngine) -> None:
        found = [await outcome(service, ASKED) for _ in range(5)]
        assert found == [EngineRestartedError] * 3 + [EngineDeadError] * 2
        assert service.stats().failure == "OSError: the device is gone"

    run(main, new_engine(kind=Failing), make_engine=lambda: new_engine(kind=Failing))


def test_an_engine_that_cannot_be_made_anew_has_stopped() -> None:
    def refused() -> Engine:
        raise MemoryError

    async def main(service: AsyncEngine) -> None:
        assert await outcome(service, ASKED) is EngineRestartedError
        assert await outcome(service, ASKED) is EngineDeadError

    run(main, new_engine(kind=Failing), make_engine=refused)


def test_the_watchdogs_bound_grows_with_the_longest_step() -> None:
    async def main(service: AsyncEngine) -> None:
        assert service._step_limit_s() == 5.0
        service._longest_step_s = 2.0
        assert service._step_limit_s() == 20.0

    run(main, new_engine(), step_timeout_s=5.0)


def test_a_timeout_inside_a_step_is_not_taken_for_the_watchdogs(caplog: pytest.LogCaptureFixture) -> None:
    class TimingOut(Engine):
        def step(self, paused: Sequence[int] = ()) -> StepOutputs:  # type: ignore[override]
            raise TimeoutError("a collective operation")

    async def main(service: AsyncEngine) -> None:
        assert await outcome(service, ASKED) is EngineDeadError
        assert service.stats().failure == "TimeoutError: a collective operation"
        assert not service.stats().is_stalled

    run(main, new_engine(kind=TimingOut), make_engine=None, step_timeout_s=600.0)
    assert "the engine has stopped" in caplog.text


def test_who_leaves_a_hung_step_cancels_nobody_of_the_new_engine() -> None:
    """The new engine counts its requests from zero again, as the old one did."""
    hangs = threading.Event()

    def hang(point: str, request_ids: Sequence[int]) -> None:
        if point == "forward":
            hangs.set()
            threading.Event().wait()

    async def main(service: AsyncEngine) -> None:
        leaving = service.submit(ASKED)
        await anext(leaving)
        await asyncio.to_thread(hangs.wait, 600)
        await leaving.aclose()
        assert await outcome(service, replace(ASKED, seed=2)) == answer_alone(replace(ASKED, seed=2)).tokens

    run(main, new_engine(fault=hang), step_timeout_s=3.0)


# Engines of several ranks


def test_a_lost_rank_stops_the_engine_for_good() -> None:
    """The other ranks have no new engine."""

    class Parted(Engine):
        def step(self, paused: Sequence[int] = ()) -> StepOutputs:  # type: ignore[override]
            raise RankError("rank 0 of 2 lost the others")

    async def main(service: AsyncEngine) -> None:
        assert await outcome(service, ASKED) is EngineDeadError
        assert service.stats().restarts == 0
        assert "lost the others" in (service.stats().failure or "")

    run(main, new_engine(kind=Parted))


def test_an_engine_with_a_heartbeat_steps_though_there_is_nothing_to_do() -> None:
    steps = []

    class Beating(Engine):
        heartbeat_s = 0.01

        def step(self, paused: Sequence[int] = ()) -> StepOutputs:  # type: ignore[override]
            steps.append(self.is_idle)
            if len(steps) > 100:
                raise RankError("rank 0 of 2 lost the others")
            return super().step(paused)

    async def main(service: AsyncEngine) -> None:
        assert await outcome(service, ASKED) == answer_alone(ASKED).tokens
        while service.stats().failure is None:
            await asyncio.sleep(0.01)
        assert steps[-1]

    run(main, new_engine(kind=Beating))
