"""Events of a running generation, and the answer it ends with. Imports no torch."""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

LogProbs = tuple[tuple[int, float], ...]
"""The most likely tokens at one position, with their log-probabilities."""


class ScoredToken(NamedTuple):
    """A token of a prompt, as likely as the causal pass finds it after those before it."""

    token: int
    logprob: float
    rank: int  # 1: no other token is likelier
    top: LogProbs


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_tokens
    DEADLINE = "deadline"


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A running canvas after one step. Nothing of it is final."""

    row: int  # which prompt of the call
    canvas: int  # number of the canvas in its answer, from 0
    step: int  # steps taken on this canvas
    tokens: tuple[int, ...]  # the best guess, up to its end token
    entropy: tuple[float, ...]  # how unsure each of them is, in nats
    text: str  # the guess as text
    pinned: tuple[int, ...] = ()  # positions of `tokens` that were pinned


@dataclass(frozen=True, kw_only=True)
class CanvasStep:
    """A running canvas after one step, in full: what a trace records."""

    row: int
    canvas: int
    step: int  # steps taken on this canvas
    at_s: float  # since the request was submitted
    tokens: tuple[int, ...]  # what the next step reads: drawn where accepted, as given where pinned, or noise
    accepted: tuple[int, ...]  # positions
    pinned: tuple[int, ...]  # positions
    argmax: tuple[int, ...]
    entropy: tuple[float, ...]
    logprobs: tuple[LogProbs, ...] | None = None  # per position, if requested


@dataclass(frozen=True, kw_only=True)
class PromptScored:
    """The prompt was read, and each of its tokens after the first was scored, as requested."""

    row: int
    logprobs: tuple[ScoredToken, ...]


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call the model asks for; `error` says what is wrong with one that cannot be read."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def arguments_json(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True)
class Commit:
    """Tokens that are final: a settled canvas, or one token of a causal answer."""

    row: int
    canvas: int
    tokens: tuple[int, ...]
    steps: int  # denoise forwards it took; 0 when written causally
    text: str  # what this adds to the answer's text
    thought: str = ""  # what this adds to the answer's thought
    tool_calls: tuple[ToolCall, ...] = ()  # that this completes
    logprobs: tuple[LogProbs, ...] | None = None  # per token of `tokens`, if requested
    settled: bool = True  # False: the argmax of a canvas that the deadline cut short
    pinned: tuple[int, ...] = ()  # positions of `tokens` that were pinned; the model chose the others
    accepted: int | None = None
    """Of a verified draft: its first tokens that were kept; the causal pass chose the last."""


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds, of the whole batch the answer was part of."""

    queue_s: float = 0.0  # from the call to the first step
    prefill_s: float = 0.0
    denoise_s: float = 0.0  # forwards and steps
    commit_s: float = 0.0  # encoding finished canvases, or causal tokens
    verify_s: float = 0.0  # encoding drafts, and the vocabulary at each of their tokens
    first_commit_s: float = 0.0  # from the call to the first final text
    total_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A finished generation."""

    text: str
    tokens: tuple[int, ...]  # up to and including the end token
    finish_reason: FinishReason
    seed: int
    decode: str  # "diffuse", "verified", "lossless", "causal" or "auto"
    thought: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    stop_string: str | None = None  # the one that ended it
    steps: tuple[int, ...] = ()  # denoise forwards per canvas
    accepted: tuple[int, ...] = ()  # tokens per canvas that the causal pass accepted, if it verified them
    causal_tokens: int = 0  # that were written left to right, one forward each
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, taken from an earlier turn's cache
    provisional_tokens: int = 0  # at the end: a best guess that the deadline cut short
    logprobs: tuple[LogProbs, ...] | None = None  # per token
    pinned: tuple[int, ...] = ()  # positions of `tokens` that were pinned; the model chose the others
    watched: tuple[tuple[int, LogProbs], ...] = ()  # position, and the requested log-probabilities there
    scores: tuple[float, ...] = ()  # of a request that only scores, without prompt_logprobs: of each token
    prompt_logprobs: tuple[ScoredToken, ...] | None = None  # after the prompt's first token, if requested
    timings: Timings = Timings()

    @property
    def forwards(self) -> int:
        """Forwards that wrote tokens: denoise steps, one that verifies a canvas, one per causal token."""
        return sum(self.steps) + len(self.accepted) + self.causal_tokens

    @property
    def tokens_per_forward(self) -> float:
        return len(self.tokens) / self.forwards if self.forwards else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Committed tokens over the whole time, prompt included."""
        return len(self.tokens) / self.timings.total_s if self.timings.total_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """A dictionary for `json.dumps`."""
        return {
            **asdict(self),
            "finish_reason": str(self.finish_reason),
            "forwards": self.forwards,
            "tokens_per_forward": round(self.tokens_per_forward, 3),
            "tokens_per_second": round(self.tokens_per_second, 2),
        }


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The last event of a row."""

    row: int
    answer: Answer


Event = Draft | CanvasStep | PromptScored | Commit | Finish
