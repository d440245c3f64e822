"""The protocol between a server and an engine: submit a request, its events, stats, drain. Imports no torch.

A server, a queue or a test depends on this file alone; a fake engine implements it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dgemma.engine.request import EngineRequest, canvas_unit, most_new_tokens
from dgemma.errors import DgemmaError
from dgemma.events import CanvasStep, Commit, Draft, Finish, PromptScored
from dgemma.images.preprocess import ImageSettings
from dgemma.params import CanvasLen, GenerationParams


class BusyError(DgemmaError):
    """The queue is full; the request was not taken."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DrainingError(DgemmaError):
    """The engine is shutting down and takes nothing new."""


class EngineFailureError(DgemmaError):
    """This one request failed inside a step; the others go on."""


class EngineRestartedError(DgemmaError):
    """A step failed as a whole or hung; the engine was restarted, and this request was part of the step."""


class EngineDeadError(DgemmaError):
    """The engine has stopped: every running request fails, and no new one is accepted."""


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


EngineEvent = Accepted | Draft | CanvasStep | PromptScored | Commit | Finish


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The facts of a served model that a caller needs to form a request."""

    max_positions: int  # prompt and answer, as served: at most the checkpoint's
    canvas_len: int
    vocab_size: int
    defaults: GenerationParams = field(default_factory=GenerationParams)  # the checkpoint's
    adapters: tuple[str, ...] = ()  # served names
    image_settings: ImageSettings | None = None  # None: it has no vision tower
    fingerprint: str = ""  # changes when the same seed may give another text

    def max_new_tokens(self, prompt_len: int, canvas_len: CanvasLen | None = None) -> int:
        """How many tokens may be written after a prompt, in canvases of `canvas_len` (the model's own)."""
        return most_new_tokens(self.max_positions, canvas_unit(self.canvas_len, canvas_len), prompt_len)


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot of the engine; cheap enough for every scrape of /metrics."""

    slots_used: int = 0
    slots_total: int = 0
    full_blocks_used: int = 0  # of layers that see the whole context
    full_blocks_total: int = 0
    window_blocks_used: int = 0  # of layers that see a window
    window_blocks_total: int = 0
    num_waiting: int = 0
    prefix_hit_tokens: int = 0  # prompt tokens found in the prefix cache, since the start
    counters: Mapping[str, int] = field(default_factory=dict)  # monotonic: {"denoise_forwards": 9}
    failure: str | None = None  # why the engine has stopped for good
    is_stalled: bool = False  # a step takes longer than any step should
    restarts: int = 0  # of the engine, after a step failed as a whole or hung


class EngineService(Protocol):
    """An engine with its own thread and queue. All methods are called from one event loop."""

    @property
    def model(self) -> ServedModel: ...

    def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """Events of one request: Accepted, then Draft and Commit, then Finish.

        The first step of the iterator gives Accepted or raises BusyError, DrainingError or InputError; later
        ones may raise EngineFailureError, EngineRestartedError or EngineDeadError. Closing the iterator
        (`aclose`) or cancelling a step of it ends the request and frees its slot and blocks. A slow reader
        may miss drafts, never a commit. The engine never waits for a reader. `row` is 0 in all events.
        """
        ...

    def stats(self) -> EngineStats:
        """At once. Of engines elsewhere: what they last said."""
        ...

    async def fresh_stats(self) -> EngineStats:
        """As of now: engines elsewhere are asked."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and return when all accepted ones are finished, or after `timeout_s`."""
        ...
