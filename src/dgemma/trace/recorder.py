"""Records the engine's events as a trace, and passes on those that the caller asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dgemma.engine.request import EngineRequest
from dgemma.errors import InputError
from dgemma.events import Answer, CanvasStep, Commit, Event, Finish
from dgemma.trace.trace import (
    Trace,
    TraceAnswer,
    TraceCommit,
    TraceConstraint,
    TraceRequest,
    TraceStep,
)

Run = Callable[[Sequence[EngineRequest]], Iterator[Event]]


@dataclass
class _Recording:
    """A request as far as it is recorded."""

    request: TraceRequest
    steps: list[TraceStep] = field(default_factory=list)
    commits: list[TraceCommit] = field(default_factory=list)
    answer: Answer | None = None


class Recorder:
    """Everything that an engine computes for a caller.

    run: submits requests. about: the header of the trace. text_of: of a token.
    max_steps: beyond it nothing more is recorded, and the trace is marked as cut.
    """

    def __init__(
        self, about: Mapping[str, Any], text_of: Callable[[int], str], *, max_steps: int | None = None
    ) -> None:
        self._about, self._text_of, self._max_steps = dict(about), text_of, max_steps
        self._requests: list[_Recording] = []
        self._rounds = 0
        self._num_steps = 0

    def run(self, requests: Sequence[EngineRequest], run: Run) -> Iterator[Event]:
        """The events of a round of requests, steps left out."""
        return self.follow(requests, run([replace(request, trace=True) for request in requests]))

    def follow(self, requests: Sequence[EngineRequest], events: Iterable[Event]) -> Iterator[Event]:
        """The same for requests that are already submitted with `trace`."""
        own = {request.row: _Recording(traced_request(request, self._rounds)) for request in requests}
        self._rounds += 1
        self._requests += own.values()
        for event in events:
            self.add(own[event.row], event)
            if not isinstance(event, CanvasStep):
                yield event

    def add(self, running: _Recording, event: Event) -> None:
        if isinstance(event, CanvasStep):
            self._num_steps += 1
            if self._max_steps is None or self._num_steps <= self._max_steps:
                running.steps.append(TraceStep.of(event))
        elif isinstance(event, Commit):
            running.commits.append(TraceCommit.of(event))
        elif isinstance(event, Finish):
            running.answer = event.answer

    def trace(self) -> Trace:
        """What is recorded so far."""
        requests = tuple(_finished(running) for running in self._requests)
        about = dict(self._about)
        if self._max_steps is not None and self._num_steps > self._max_steps:
            about["cut"] = f"{self._num_steps} steps were taken, the first {self._max_steps} are recorded"
        return Trace(
            about=about,
            requests=requests,
            texts={token: self._text_of(token) for token in sorted(_tokens(requests))},
        )


def traced_request(request: EngineRequest, number: int) -> TraceRequest:
    if request.images:
        raise InputError.about("images", "are given, and a trace cannot hold them. Do not record it.")
    constraint, source = request.constraint, None
    if constraint is not None and constraint.source is not None:
        source = TraceConstraint(source=constraint.source, begin=constraint.begin, end=constraint.end)
    return TraceRequest(
        round=number,
        request=replace(
            request, constraint=None, sampler=None, drafts=False, trace=False, tenant="", cache_salt="", id=""
        ),
        constraint=source,
        own_sampler=None if request.sampler is None else repr(request.sampler),
    )


def traced_answer(answer: Answer) -> TraceAnswer:
    return TraceAnswer(
        text=answer.text,
        tokens=answer.tokens,
        finish_reason=str(answer.finish_reason),
        seconds=round(answer.timings.total_s, 4),
    )


def _finished(running: _Recording) -> TraceRequest:
    return replace(
        running.request,
        steps=tuple(running.steps),
        commits=tuple(running.commits),
        answer=None if running.answer is None else traced_answer(running.answer),
    )


def _tokens(requests: Iterable[TraceRequest]) -> set[int]:
    found: set[int] = set()
    for request in requests:
        found.update(request.request.prompt)
        for step in request.steps:
            found.update(step.argmax, step.drawn)
            for pairs in step.logprobs or ():
                found.update(token for token, _ in pairs)
        for commit in request.commits:
            found.update(commit.tokens)
    return found
