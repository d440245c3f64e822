"""A trace: requests, and for each what its canvases were after every step.

Noise is not recorded: it is a function of the request's seed, the canvas, the step and the position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgemma.engine.request import EngineRequest
from dgemma.events import CanvasStep, Commit, LogProbs
from dgemma.structured_output.constraint import ConstraintSource

if TYPE_CHECKING:
    from dgemma.trace.compare import TraceDiff

CENTINATS = 100  # entropies are recorded in hundredths of a nat


@dataclass(frozen=True, kw_only=True)
class TraceStep:
    """A canvas after one step."""

    canvas: int
    step: int  # from 1
    at_ms: float  # since the request was submitted
    argmax: tuple[int, ...]  # what a commit would write
    entropy: tuple[int, ...]  # of each position, in hundredths of a nat
    accepted: tuple[int, ...]  # positions whose token was drawn and kept; the others are noise, or pinned
    drawn: tuple[int, ...]  # the tokens at these positions
    pinned: tuple[int, ...] = ()  # positions
    logprobs: tuple[LogProbs, ...] | None = None  # of each position, if the request had them

    @classmethod
    def of(cls, event: CanvasStep) -> TraceStep:
        return cls(
            canvas=event.canvas,
            step=event.step,
            at_ms=round(1000 * event.at_s, 1),
            argmax=event.argmax,
            entropy=tuple(round(CENTINATS * value) for value in event.entropy),
            accepted=event.accepted,
            drawn=tuple(event.tokens[position] for position in event.accepted),
            pinned=event.pinned,
            logprobs=None
            if event.logprobs is None
            else tuple(tuple((token, round(value, 4)) for token, value in pairs) for pairs in event.logprobs),
        )


@dataclass(frozen=True, kw_only=True)
class TraceCommit:
    """Tokens that became final: a canvas, what was accepted of one, or one token left to right."""

    canvas: int
    tokens: tuple[int, ...]
    steps: int
    accepted: int | None = None  # of a verified draft: its first tokens that were kept
    settled: bool = True  # False: the deadline cut the canvas short

    @classmethod
    def of(cls, event: Commit) -> TraceCommit:
        return cls(
            canvas=event.canvas,
            tokens=event.tokens,
            steps=event.steps,
            accepted=event.accepted,
            settled=event.settled,
        )


@dataclass(frozen=True, kw_only=True)
class TraceAnswer:
    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TraceConstraint:
    """The response format of a request."""

    source: ConstraintSource
    begin: int = 0
    end: int | None = None


@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """One request to the engine. A fill or an edit has several, in rounds; those of a round ran together."""

    round: int
    request: EngineRequest  # without its constraint and its sampler
    constraint: TraceConstraint | None = None
    own_sampler: str | None = None  # the sampler of a caller's own, which a file cannot hold
    steps: tuple[TraceStep, ...] = ()
    commits: tuple[TraceCommit, ...] = ()
    answer: TraceAnswer | None = None  # None: it failed, or was not read to its end

    @property
    def canvases(self) -> Iterator[tuple[TraceStep, ...]]:
        """The steps of each canvas."""
        for _, steps in groupby(self.steps, key=lambda step: step.canvas):
            yield tuple(steps)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What a generation did.

    about: when and by which command it was made, the model (name, fingerprints of weights and tokenizer,
      dtype, device), versions, machine.
    texts: of every token that occurs, so that a trace can be shown without its model.
    """

    about: Mapping[str, Any] = field(default_factory=dict)
    requests: tuple[TraceRequest, ...] = ()
    texts: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace file; it may come from anyone."""
        from dgemma.trace.trace_reader import read_trace  # which reads these classes

        return read_trace(path)

    def save(self, path: str | Path) -> int:
        """Write a trace file -> its size in bytes."""
        from dgemma.trace.trace_writer import write_trace

        return write_trace(self, path)

    def compare(self, other: Trace) -> TraceDiff:
        """Where the two part."""
        from dgemma.trace.compare import compare

        return compare(self, other)

    @property
    def num_steps(self) -> int:
        return sum(len(request.steps) for request in self.requests)

    @property
    def longest(self) -> TraceRequest:
        """The request with most steps: the one to look at first."""
        return max(self.requests, key=lambda request: len(request.steps))

    def text(self, token: int) -> str:
        return self.texts.get(token, f"<{token}>")
