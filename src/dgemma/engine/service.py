"""What a server may ask of an engine: take a request, tell what happens, stop, drain. Imports no torch.

Whoever serves (HTTP, a queue, a test) is written against this file alone, and so is a fake engine.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from dgemma.constraint.constraint import Constraint
from dgemma.errors import DgemmaError
from dgemma.events import Commit, Draft, Finish
from dgemma.given import Given
from dgemma.params import GenerationParams

if TYPE_CHECKING:
    from dgemma.diffusion.step import Sampler

# Each bias is looked at in every walk over the vocabulary, so there is a limit to how many a request has.
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0


class BusyError(DgemmaError):
    """The queue is full; the request was not taken."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DrainingError(DgemmaError):
    """The engine is shutting down and takes nothing new."""


class EngineFailureError(DgemmaError):
    """This one request failed inside a step; the others go on."""


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One answer to be written."""

    prompt: tuple[int, ...]  # token ids
    seed: int  # the one that counts: params.seed is None
    params: GenerationParams  # deadline_s counts from submit, waiting included
    id: str = ""  # for logs
    row: int = 0  # what its events call it
    adapter: str | None = None  # by served name; None: the base alone
    drafts: bool = False  # also yield Draft events
    priority: int = 0  # higher first; equal ones in the order they came
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, number added to its logit; ids ascending
    sampler: Sampler | None = None  # in place of the one that `params` describe
    given: Given | None = None  # what is fixed of the answer, and what is to be told of it
    constraint: Constraint | None = None  # the language its text keeps to
    score_from: int | None = None  # writes nothing: how likely are the prompt's tokens from here on, causally


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The last event of a request that failed inside a step; the others go on."""

    row: int
    error: Exception


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """The first event of a request: it is valid and has its place in the queue.

    Without it a server could not tell "wait" from "no" before the first canvas is settled, and a stream's
    status line would have to wait as long.
    """

    num_waiting: int = 0  # requests before it


EngineEvent = Accepted | Draft | Commit | Finish


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What a caller must know of the model to form a request."""

    max_positions: int  # prompt and answer, as served: at most the checkpoint's
    canvas_len: int
    vocab_size: int
    defaults: GenerationParams = field(default_factory=GenerationParams)  # the checkpoint's
    adapters: tuple[str, ...] = ()  # served names
    fingerprint: str = ""  # changes when the same seed may give another text

    def room_behind(self, prompt_len: int) -> int:
        """How many tokens may be written behind a prompt: only whole canvases fit."""
        return max(0, self.max_positions - prompt_len) // self.canvas_len * self.canvas_len


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A look at the engine; cheap enough for every scrape of /metrics."""

    slots_used: int = 0
    slots_total: int = 0
    full_pages_used: int = 0  # of layers that see the whole context
    full_pages_total: int = 0
    window_pages_used: int = 0  # of layers that see a window
    window_pages_total: int = 0
    num_waiting: int = 0
    prefix_hit_tokens: int = 0  # prompt tokens that were not read again, since the start
    counters: Mapping[str, int] = field(default_factory=dict)  # others, only growing: {"denoise_forwards": 9}
    failure: str | None = None  # why the engine as a whole works no more


class EngineService(Protocol):
    """An engine behind its thread and queue. All methods are called from one event loop."""

    @property
    def model(self) -> ServedModel: ...

    def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """Events of one request: Accepted, then Draft and Commit, then Finish.

        The first step of the iterator gives Accepted or raises BusyError, DrainingError or InputError; later
        ones may raise EngineFailureError. Closing the iterator (`aclose`) or cancelling a step of it ends the
        request and gives its slot and pages back. Who reads slowly may miss drafts, never a commit, and
        delays nobody: the engine does not wait for its readers. `row` is 0 in all events.
        """
        ...

    def stats(self) -> EngineStats: ...

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, and return when all that was accepted is finished, or when the time is up."""
        ...
