"""Work in rounds: which requests go out, and what comes back or goes wrong."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgemma.engine.request import EngineRequest
from dgemma.events import Answer, FinishReason
from dgemma.params import GenerationParams
from dgemma.tasks.rounds import Rounds, drive

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


@given(st.lists(st.integers(0, 3), max_size=6))
def test_each_round_gets_the_answers_of_its_requests(sizes: Sizes) -> None:
    asked = Asked()
    told = drive(work(sizes), asked)
    assert asked.sizes == [size for size in sizes if size], "empty rounds are not asked"
    numbers = iter(range(sum(sizes)))
    assert told == [[str(next(numbers)) for _ in range(size)] for size in sizes]


@pytest.mark.parametrize("kind", [ValueError, KeyError, KeyboardInterrupt])
def test_what_goes_wrong_in_an_ask_reaches_the_caller(kind: type[BaseException]) -> None:
    def fails(requests: Sequence[EngineRequest]) -> list[Answer]:
        raise kind("no engine")

    with pytest.raises(kind, match="no engine"):
        drive(work([1]), fails)


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
