"""The engine behind its thread: what callers in an event loop are promised, on a tiny model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from dgemma.engine import engine as engine_module
from dgemma.engine.async_engine import AsyncEngine, StepOutputs, _Caller
from dgemma.engine.engine import Engine
from dgemma.engine.kv_cache_manager import KVCacheManager
from dgemma.engine.request import EngineRequest, ValidatedRequest
from dgemma.engine.scheduler import SchedulerConfig
from dgemma.engine.service import (
    Accepted,
    BusyError,
    DrainingError,
    EngineDeadError,
    EngineEvent,
    EngineFailureError,
    EngineStats,
)
from dgemma.events import Answer, Commit, Draft, Finish, FinishReason
from dgemma.params import GenerationParams
from engine_life import CONFIG, ENCODE_BLOCK, answer_alone, as_alone, make_engine, question, serve
from virtual_time import VirtualLoop, run_virtually

Result = TypeVar("Result")

PARAMS = GenerationParams(max_tokens=8, max_denoising_steps=3, ignore_end=True)
ASKED = EngineRequest(prompt=(2, 300, 301, 106, 9, 10), seed=1, params=PARAMS)
LONG = replace(ASKED, params=replace(PARAMS, max_tokens=100), drafts=True)  # a hundred steps


def open_service(slots: int = 4, kind: type[Engine] = Engine, **options: Any) -> AsyncEngine:
    memory = KVCacheManager(block_size=4, window=CONFIG.window, full_blocks=120, window_blocks=40)
    engine = make_engine(
        memory, SchedulerConfig(max_num_seqs=slots, chunk_size=16, encode_block=ENCODE_BLOCK), kind
    )
    return serve(engine, **{"max_waiting": 8, **options})


def run(main: Callable[[AsyncEngine], Coroutine[Any, Any, Result]], **options: Any) -> Result:
    """`main` with a service that is closed behind it."""

    async def within() -> Result:
        service = open_service(**options)
        try:
            async with asyncio.timeout(600):  # nobody waits so long but for a bug, on the slowest machine
                return await main(service)
        finally:
            await service.close()

    return asyncio.run(within())


async def finished(stream: AsyncGenerator[EngineEvent, None]) -> Answer:
    events = [event async for event in stream]
    assert isinstance(events[-1], Finish)
    return events[-1].answer


async def answers(service: AsyncEngine, requests: list[EngineRequest]) -> list[Answer]:
    """Of all of them, asked at once."""
    found = await asyncio.gather(*(finished(service.submit(request)) for request in requests))
    return [as_alone(answer) for answer in found]


async def until_told(service: AsyncEngine) -> None:
    """All that was asked is answered, whether it is read or not."""
    while service._callers or service._new:
        await asyncio.sleep(0.001)


def test_every_request_is_answered_as_if_alone() -> None:
    asked = [replace(question(number), drafts=number % 2 == 0) for number in range(8)]

    async def main(service: AsyncEngine) -> list[Answer]:
        return await answers(service, asked)

    assert run(main, slots=3) == [answer_alone(request) for request in asked]


def test_adapters_in_one_batch_do_not_touch_each_other() -> None:
    """Nor does one go on from what the other has read, though the words are the same."""
    base = [ASKED, replace(ASKED, seed=2, params=replace(PARAMS, decode="causal"))]
    asked = [replace(request, adapter=adapter) for request in base for adapter in (None, "other")]
    alone = [answer_alone(request) for request in asked]
    assert alone[0].tokens != alone[1].tokens
    assert alone[2].tokens != alone[3].tokens

    async def main(service: AsyncEngine) -> tuple[list[Answer], list[Answer], EngineStats]:
        return await answers(service, asked), await answers(service, asked), service.stats()

    first, again, stats = run(main)
    assert first == again == alone
    assert stats.prefix_hit_tokens >= 4 * len(asked), "the second time each goes on from its own first block"


@pytest.mark.parametrize("decode", ["diffuse", "causal"])
def test_a_bias_forbids_a_word_or_forces_it_and_is_its_owners_alone(decode: Any) -> None:
    plain = replace(ASKED, params=replace(PARAMS, decode=decode))
    usual = answer_alone(plain)
    word = usual.tokens[0]
    never = replace(plain, logit_bias=((word, -100.0),))
    always = replace(plain, logit_bias=((3, -1.0), (7, 100.0)))

    async def main(service: AsyncEngine) -> list[Answer]:
        return await answers(service, [never, plain, always])

    without, same, only = run(main)
    assert word not in without.tokens
    assert without == answer_alone(never)
    assert same == usual
    assert only.tokens == (7,) * 8


class Watched(Engine):
    """Remembers how things stood right before and right behind a cancellation."""

    cancellations: list[tuple[EngineStats, EngineStats]]

    def cancel(self, number: int) -> None:
        before = self.stats()
        super().cancel(number)
        self.cancellations.append((before, self.stats()))


def test_who_leaves_frees_slot_and_blocks_before_the_next_step() -> None:
    async def main(service: AsyncEngine) -> None:
        engine = service._engine
        assert isinstance(engine, Watched)
        engine.cancellations = []
        stays, leaves = service.submit(LONG), service.submit(replace(LONG, prompt=(5, *LONG.prompt)))
        assert isinstance(await anext(stays), Accepted)
        assert isinstance(await anext(leaves), Accepted)
        assert isinstance(await anext(leaves), Draft)
        steps = service.stats().counters["steps"]
        await leaves.aclose()
        while not engine.cancellations:
            await anext(stays)
        await stays.aclose()
        before, behind = engine.cancellations[0]
        assert before.counters["steps"] <= steps + 1, "only the step that was under way came between"
        assert (before.slots_used, behind.slots_used) == (2, 1)
        assert 0 < behind.full_blocks_used < before.full_blocks_used
        assert 0 < behind.window_blocks_used < before.window_blocks_used

    run(main, kind=Watched)


def test_who_leaves_before_the_engine_has_heard_of_it_costs_no_step() -> None:
    async def main(service: AsyncEngine) -> None:
        stream = service.submit(replace(LONG, prompt=(5, *LONG.prompt)))
        await anext(stream)
        await stream.aclose()
        assert await answers(service, [ASKED]) == [answer_alone(ASKED)]
        assert service.stats().counters["prefill_tokens"] == len(ASKED.prompt)

    run(main)


def test_an_idle_engine_rests_and_wakes_for_a_request() -> None:
    async def main(service: AsyncEngine) -> None:
        for _ in range(2):
            assert await answers(service, [ASKED]) == [answer_alone(ASKED)]
            stats = service.stats()
            assert (stats.slots_used, stats.num_waiting, stats.full_blocks_used) == (0, 0, 0)
            await asyncio.sleep(0.05)
            assert service.stats() == stats

    run(main)


def test_one_too_many_is_told_when_to_come_back() -> None:
    async def main(service: AsyncEngine) -> None:
        streams = [service.submit(replace(LONG, seed=seed)) for seed in range(3)]
        accepted = [await anext(stream) for stream in streams]
        assert accepted == [Accepted(num_waiting=number) for number in range(3)]
        with pytest.raises(BusyError, match="3 requests are waiting, and no more may") as refused:
            await anext(service.submit(ASKED))
        assert 1 <= refused.value.retry_after_s <= 60
        for stream in streams:
            await stream.aclose()
        while service.stats().num_waiting:
            await asyncio.sleep(0.001)
        assert await answers(service, [ASKED]) == [answer_alone(ASKED)], "there is room again"

    run(main, slots=1, max_waiting=2)


def test_a_drain_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    asked = [replace(ASKED, seed=seed) for seed in range(3)]

    async def main(service: AsyncEngine) -> None:
        streams = [service.submit(request) for request in asked]
        for stream in streams:
            await anext(stream)
        await service.drain(500)
        stats = service.stats()
        assert (stats.slots_used, stats.num_waiting) == (0, 0)
        told = [await finished(stream) for stream in streams]  # nobody had listened meanwhile
        assert [answer.tokens for answer in told] == [answer_alone(request).tokens for request in asked]
        with pytest.raises(DrainingError, match="is shutting down"):
            await anext(service.submit(ASKED))
        await service.drain(500)  # again: at once

    run(main, slots=2)


def test_a_drain_returns_when_its_time_is_up() -> None:
    async def main(service: AsyncEngine) -> None:
        stream = service.submit(LONG)
        await anext(stream)
        await service.drain(0.0)
        assert not service._task or not service._task.done()
        await stream.aclose()

    run(main)


def test_close_ends_the_thread_and_refuses_from_then_on() -> None:
    before = set(threading.enumerate())

    async def main(service: AsyncEngine) -> None:
        await answers(service, [ASKED])
        started = set(threading.enumerate()) - before
        assert [thread.name for thread in started] == ["engine"]
        await service.close()
        for thread in started:
            thread.join(60)
            assert not thread.is_alive()
        with pytest.raises(DrainingError):
            await anext(service.submit(ASKED))

    run(main)


def test_a_slow_reader_misses_drafts_but_no_commit() -> None:
    asked = replace(ASKED, drafts=True)
    alone = answer_alone(asked)

    async def main(service: AsyncEngine) -> list[EngineEvent]:
        stream = service.submit(asked)
        assert isinstance(await anext(stream), Accepted)
        await until_told(service)
        return [event async for event in stream]

    events = run(main)
    assert [type(event) for event in events] == [Draft, Commit, Draft, Commit, Finish]
    drafts = [event for event in events if isinstance(event, Draft)]
    commits = [event for event in events if isinstance(event, Commit)]
    assert [(draft.canvas, draft.step, draft.tokens) for draft in drafts] == [
        (commit.canvas, commit.steps, commit.tokens) for commit in commits
    ]
    assert [commit.tokens for commit in commits] == [alone.tokens[:4], alone.tokens[4:]]


class Broken(Engine):
    def step(self, paused: Any = ()) -> list[tuple[int, Any]]:
        if self.stats().counters["steps"] == 2:
            raise OSError("the device is gone")
        return super().step(paused)


def test_an_engine_that_fails_as_a_whole_says_so_to_all(caplog: pytest.LogCaptureFixture) -> None:
    async def main(service: AsyncEngine) -> None:
        streams = [service.submit(replace(LONG, seed=seed)) for seed in range(3)]  # the third waits
        ends = await asyncio.gather(*map(finished, streams), return_exceptions=True)
        assert [type(end) for end in ends] == [EngineDeadError] * 3
        assert service.stats().failure == "OSError: the device is gone"
        with pytest.raises(EngineDeadError, match="the engine has stopped: OSError"):
            await anext(service.submit(ASKED))

    run(main, slots=2, kind=Broken)
    assert "the device is gone" in caplog.text, "with where it happened, once"
    assert caplog.text.count("the engine has stopped") == 1


class Refusing(Engine):
    """Cannot take a request of seed 13, which its check did not foresee."""

    def add(self, validated: ValidatedRequest, *, arrived: float | None = None) -> int:
        if validated.request.seed == 13:
            raise OSError("no memory for its bookkeeping")
        return super().add(validated, arrived=arrived)


def test_a_request_that_cannot_be_added_fails_alone() -> None:
    async def main(service: AsyncEngine) -> None:
        seeds = [1, 13, 2, 13, 3]
        streams = [service.submit(replace(ASKED, seed=seed)) for seed in seeds]
        ends = await asyncio.gather(*map(finished, streams), return_exceptions=True)
        for seed, end in zip(seeds, ends, strict=True):
            if seed == 13:
                assert isinstance(end, EngineFailureError)
                assert str(end) == "this request failed: OSError: no memory for its bookkeeping"
                assert isinstance(end.__cause__, OSError)
            else:
                assert isinstance(end, Answer)
                assert end.tokens == answer_alone(replace(ASKED, seed=seed)).tokens
        stats = service.stats()
        assert stats.failure is None
        assert stats.num_waiting == stats.slots_used == stats.full_blocks_used == 0

    run(main, kind=Refusing)


def test_a_client_that_leaves_before_its_refusal_stops_no_other() -> None:
    async def main(service: AsyncEngine) -> None:
        stream = service.submit(replace(ASKED, seed=13))
        assert isinstance(await anext(stream), Accepted)
        await until_told(service)
        await stream.aclose()
        assert (await answers(service, [ASKED])) == [answer_alone(ASKED)]

    run(main, kind=Refusing)


@pytest.mark.parametrize("name", ["SequenceState", "make_sampler", "OutputBuilder", "QueuedRequest"])
def test_an_add_that_fails_halfway_leaves_nothing_in_the_engine(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    whole = getattr(engine_module, name)

    def broken(*args: Any, **options: Any) -> Any:
        raise KeyError(name)

    async def main(service: AsyncEngine) -> None:
        monkeypatch.setattr(engine_module, name, broken)
        with pytest.raises(EngineFailureError, match="this request failed: KeyError"):
            await finished(service.submit(ASKED))
        monkeypatch.setattr(engine_module, name, whole)
        assert service.stats().num_waiting == 0
        assert (await answers(service, [ASKED])) == [answer_alone(ASKED)]

    run(main)


def in_place(loop: VirtualLoop, **options: Any) -> AsyncEngine:
    """Without a thread, in virtual time: a hundredth of a second per step."""

    async def run_step(step: Callable[[], StepOutputs]) -> StepOutputs:
        await asyncio.sleep(0.01)
        return step()

    return open_service(run_step=run_step, clock=loop.time, **options)


def test_close_fails_the_requests_that_are_still_read() -> None:
    async def main(loop: VirtualLoop) -> None:
        service = in_place(loop, slots=1)
        readers = [asyncio.create_task(finished(service.submit(replace(LONG, seed=s)))) for s in range(2)]
        await asyncio.sleep(0.1)
        await service.close()
        ends = await asyncio.gather(*readers, return_exceptions=True)
        assert [type(end) for end in ends] in ([EngineFailureError] * 2, [DrainingError] * 2)

    run_virtually(main)


def test_the_failure_of_an_engine_is_not_left_to_the_garbage_collector() -> None:
    async def main(loop: VirtualLoop) -> list[str]:
        service = in_place(loop, kind=Broken)
        with pytest.raises(EngineDeadError, match="the engine has stopped"):
            await finished(service.submit(LONG))
        await service.drain(10)
        return loop.leftovers()

    assert run_virtually(main) == []


def test_one_slow_step_does_not_end_those_who_come_after_it() -> None:
    async def main(loop: VirtualLoop) -> None:
        service = in_place(loop, slots=1)
        service._engine._clock = loop.time
        service._engine._last_step_s = 0.6  # as behind a long prompt, or on a busy machine
        hurried = replace(ASKED, params=replace(ASKED.params, deadline_s=0.5))
        answer = await finished(service.submit(hurried))
        assert answer.tokens == (await finished(service.submit(ASKED))).tokens
        assert answer.finish_reason is not FinishReason.DEADLINE
        await service.close()

    run_virtually(main)


def test_the_queue_lasts_until_the_answer_before_it_ends() -> None:
    async def main(loop: VirtualLoop) -> None:
        service = in_place(loop, slots=1)
        service._engine._clock = loop.time
        first, second = await asyncio.gather(
            *(finished(service.submit(replace(ASKED, seed=seed))) for seed in range(2))
        )
        assert first.timings.queue_s == pytest.approx(0.01)  # the pause before its first step
        assert first.timings.total_s < second.timings.queue_s < second.timings.first_commit_s
        await service.close()

    run_virtually(main)


@pytest.mark.parametrize("decode", ["diffuse", "causal"])
def test_a_bias_holds_beside_a_request_without_one_that_came_first(decode: Any) -> None:
    """The first of a batch does not decide for the others whether there is a bias."""
    plain = replace(ASKED, params=replace(PARAMS, decode=decode))
    forced = replace(plain, logit_bias=((7, 100.0),))

    async def main(service: AsyncEngine) -> list[Answer]:
        return await answers(service, [plain, forced])

    without, only = run(main)
    assert without == answer_alone(plain)
    assert only.tokens == (7,) * 8


def test_the_advised_wait_follows_the_duration_of_answers() -> None:
    async def main(service: AsyncEngine) -> None:
        advised = [service._wait_s(0), service._wait_s(4), service._wait_s(8)]
        assert advised == [1.0, 1.0, 2.0], "four slots; a second each, as long as nothing is known"
        caller = _Caller(service._engine.validate(ASKED), 0.0)
        answer = answer_alone(ASKED)
        for total_s in (11.0, 2.0, 1000.0):  # the mean goes a tenth of the way: 2, 2, 101.8
            service._callers[0] = caller
            finish = Finish(row=0, answer=replace(answer, timings=replace(answer.timings, total_s=total_s)))
            service._deliver([(0, finish)])
            advised += [service._wait_s(4), service._wait_s(6)]
        assert advised[3:] == pytest.approx([2.0, 3.0, 2.0, 3.0, 60.0, 60.0])

    run(main)
