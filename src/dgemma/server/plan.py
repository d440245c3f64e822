"""The plan of one request: rounds of engine requests, and the writer of its response.

A plain completion is one round whose answers are the response's choices. Infill, edit and decisions are tasks
of several rounds (`dgemma.tasks`), whose answers are intermediate results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar

from dgemma.engine.request import EngineRequest
from dgemma.engine.service import EngineEvent
from dgemma.events import Answer
from dgemma.server.http.errors import ApiError
from dgemma.server.protocol import ResponseModel
from dgemma.server.response_format import RequestedFormat
from dgemma.structured_output.constraint import Constraint
from dgemma.tasks.rounds import Rounds

Result = TypeVar("Result")


@dataclass
class EngineUsage:
    """What the engine spent on one task."""

    canvases: int = 0
    forwards: int = 0
    cached_tokens: int | None = None  # prefix cache hits of the first request; later ones hit its prompt
    prefill_s: float = 0.0  # of the first request

    def add(self, answer: Answer) -> None:
        self.canvases += len(answer.steps)
        self.forwards += sum(answer.steps)

    def add_first(self, answer: Answer) -> None:
        if self.cached_tokens is None:
            self.cached_tokens, self.prefill_s = answer.cached_tokens, answer.timings.prefill_s


@dataclass(frozen=True, kw_only=True)
class TaskOutcome(Generic[Result]):
    """The result of one task of a plan."""

    result: Result | None  # None: the deadline came first
    usage: EngineUsage
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TaskCounts:
    """A finished task as log and metrics count it."""

    prompt_tokens: int
    completion_tokens: int = 0
    reason: str = "stop"
    text: str | None = None


class ResponseWriter(ABC, Generic[Result]):
    """Writes the response of one endpoint family: whole, or as chunks of a stream."""

    # `event_chunks` is given the events in either case: the whole response is made from them too.
    reads_events: ClassVar[bool] = False

    @abstractmethod
    def response(self, outcomes: Sequence[TaskOutcome[Result]]) -> ResponseModel: ...

    def counts(self, outcome: TaskOutcome[Result]) -> TaskCounts:
        """Counts of one finished task; not called for plans whose answers are the choices."""
        raise NotImplementedError

    def opening_chunks(self) -> Iterator[ResponseModel]:
        """Chunks that are sent as soon as the engine has accepted the request."""
        yield from ()

    def event_chunks(self, index: int, event: EngineEvent) -> Iterator[ResponseModel]:
        """Chunks for one event of answer `index`, in plans whose answers are the choices."""
        yield from ()

    def task_chunks(self, index: int, outcome: TaskOutcome[Result]) -> Iterator[ResponseModel]:
        """Chunks for the finished task `index`."""
        yield from ()

    def error_chunk(self, error: ApiError) -> ResponseModel | None:
        """The last chunk of a stream that failed; None: OpenAI's error object."""
        return None

    def usage_chunk(self, outcomes: Sequence[TaskOutcome[Result]]) -> ResponseModel:
        """The last chunk, with `stream_options.include_usage`. Endpoints without streaming have none."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ServingPlan(Generic[Result]):
    """A validated request, ready for the engine."""

    model: str  # as the client named it
    start: Callable[[Constraint | None], tuple[Rounds[Result], ...]]  # the tasks, run one after another
    num_choices: int
    writer: ResponseWriter[Result]
    deadline_s: float  # for all tasks
    # The engine's answers are the response's choices: their events are streamed, all of them must be accepted
    # at once, and a deadline ends them with the text so far.
    answers_are_choices: bool = False
    prompt_tokens: int | None = None  # None: known when the first task is done
    stream: bool = False
    include_usage: bool = False
    response_format: RequestedFormat | None = None  # compiled before the plan starts
    # How an InputError of the engine or a task names a field: the client's spelling of parameters, and the
    # field of all other errors.
    field_names: Mapping[str, str] = field(default_factory=dict)
    default_field: str | None = None


AnyServingPlan = ServingPlan[Any]


def single_round(
    requests: Sequence[EngineRequest], constraint: Constraint | None
) -> tuple[Rounds[list[Answer]], ...]:
    """One task of one round: all requests at once, constrained if there is a constraint."""
    if constraint is not None:
        requests = [replace(request, constraint=constraint) for request in requests]
    return (_single_round(list(requests)),)


def _single_round(requests: list[EngineRequest]) -> Rounds[list[Answer]]:
    return (yield requests)
