"""Fill, edit and decide as the server does them: work in rounds, planned, done, and told of by a writer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from dgemma.canvas.rounds import Rounds
from dgemma.server.form_fields import AskedForm
from dgemma.server.in_flight import Tally
from dgemma.server.replies import Reply

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Done(Generic[Result]):
    """What came of a piece of work."""

    result: Result | None  # None: the deadline came first
    tally: Tally
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Counts:
    """A finished piece of work as logs and metrics have it."""

    prompt_tokens: int
    completion_tokens: int = 0
    reason: str = "stop"
    text: str | None = None


class WorkWriter(ABC, Generic[Result]):
    """Finished work as replies, in the form of one endpoint."""

    @abstractmethod
    def counts(self, done: Done[Result]) -> Counts: ...

    @abstractmethod
    def whole(self, done: Sequence[Done[Result]]) -> Reply: ...

    def chunks(self, index: int, done: Done[Result]) -> Iterator[Reply]:
        """In a stream: what one choice is. An endpoint that does not stream refuses to, long before."""
        yield from ()

    def usage_chunk(self, done: Sequence[Done[Result]]) -> Reply:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class WorkPlan(Generic[Result]):
    """A request, ready to be worked on."""

    model: str  # as the caller named it
    works: tuple[Rounds[Result], ...]  # one per choice, done one after another
    writer: WorkWriter[Result]
    deadline_s: float
    about: str  # the field that an InputError in the middle of the work is about
    stream: bool = False
    include_usage: bool = False
    form: AskedForm | None = None  # that the text keeps to

    @property
    def num_choices(self) -> int:
        return len(self.works)


AnyWorkPlan = WorkPlan[Any]
