"""Work in rounds: whoever drives it, the same requests go out and the same result comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgemma.engine.request import EngineRequest
from dgemma.events import Answer, FinishReason
from dgemma.params import GenerationParams
from dgemma.tasks.infill import FillOptions, fill
from dgemma.tasks.rounds import Rounds, drive, drive_async
from tasks.scripted import ByHeart, encode, task_context

Sizes = list[int]


def request_for(number: int) -> EngineRequest:
    return EngineRequest(prompt=(number,), seed=number, params=GenerationParams())


def answer_to(request: EngineRequest) -> Answer:
    return Answer(
        text=str(request.seed),
        tokens=(),
        finish_reason=FinishReason.STOP,
        seed=request.seed,
        decode="diffuse",
    )


def work(sizes: Sizes) -> Rounds[list[list[str]]]:
    """Rounds of so many requests each; tells what came back in each."""
    told: list[list[str]] = []
    number = 0
    for size in sizes:
        answers = yield [request_for(number + at) for at in range(size)]
        number += size
        told.append([answer.text for answer in answers])
    return told


class Asked:
    def __init__(self) -> None:
        self.sizes: Sizes = []

    def __call__(self, requests: Sequence[EngineRequest]) -> list[Answer]:
        self.sizes.append(len(requests))
        return [answer_to(request) for request in requests]

    async def later(self, requests: Sequence[EngineRequest]) -> list[Answer]:
        await asyncio.sleep(0)
        return self(requests)


@given(st.lists(st.integers(0, 3), max_size=6))
def test_both_drivers_ask_the_same_and_give_the_same(sizes: Sizes) -> None:
    now, later = Asked(), Asked()
    told = drive(work(sizes), now)
    assert told == asyncio.run(drive_async(work(sizes), later.later))
    assert now.sizes == later.sizes == [size for size in sizes if size], "empty rounds are not asked"
    numbers = iter(range(sum(sizes)))
    assert told == [[str(next(numbers)) for _ in range(size)] for size in sizes]


def test_real_work_is_the_same_under_both_drivers() -> None:
    task = task_context()
    text = encode("The function returns the number of bytes in the file.")

    def once(run: Callable[[ByHeart], object]) -> tuple[object, object]:
        model = ByHeart(task, text)
        return run(model), model.rounds

    async def later(model: ByHeart, requests: Sequence[EngineRequest]) -> list[Answer]:
        return model(requests)

    def start() -> Rounds[object]:
        return fill(task, "The function returns", " in the file.", FillOptions(max_tokens=5, heal=False))

    now = once(lambda model: drive(start(), model))
    assert now == once(lambda model: asyncio.run(drive_async(start(), lambda r: later(model, r))))


@pytest.mark.parametrize("kind", [ValueError, KeyError, KeyboardInterrupt])
def test_what_goes_wrong_in_an_ask_reaches_the_caller(kind: type[BaseException]) -> None:
    def fails(requests: Sequence[EngineRequest]) -> list[Answer]:
        raise kind("no engine")

    async def fails_later(requests: Sequence[EngineRequest]) -> list[Answer]:
        raise kind("no engine")

    with pytest.raises(kind, match="no engine"):
        drive(work([1]), fails)
    with pytest.raises(kind, match="no engine"):
        asyncio.run(drive_async(work([1]), fails_later))


def test_an_ask_that_runs_out_of_answers_is_not_the_end_of_the_work() -> None:
    answers = iter([answer_to(request_for(0))])
    with pytest.raises((StopIteration, RuntimeError)):
        drive(work([1, 1]), lambda requests: [next(answers)])


def test_what_goes_wrong_in_the_work_reaches_the_caller() -> None:
    def broken() -> Rounds[None]:
        yield [request_for(0)]
        raise LookupError("no such word")

    with pytest.raises(LookupError, match="no such word"):
        drive(broken(), Asked())
    with pytest.raises(LookupError, match="no such word"):
        asyncio.run(drive_async(broken(), Asked().later))
