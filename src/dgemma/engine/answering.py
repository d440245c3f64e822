"""A request on its way to an answer."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import Tensor

from dgemma.diffusion.language import Strings
from dgemma.diffusion.pins import CanvasPins
from dgemma.diffusion.reading import Likeliest
from dgemma.diffusion.step import Sampler
from dgemma.engine.following import Following
from dgemma.engine.service import EngineRequest
from dgemma.events import Finish, LogProbs, Timings
from dgemma.generation.writer import AnswerWriter
from dgemma.model.row_contexts import RowPast


@dataclass(frozen=True)
class Look:
    """What one look at the vocabulary showed: of a canvas, or of the token behind a causal context."""

    guess: Tensor  # [positions]
    entropy: Tensor  # [positions]
    likeliest: Likeliest | None  # both [positions, n]
    settled: bool
    watched: tuple[tuple[int, LogProbs], ...] = ()  # by position of the canvas, once it is settled

    def logprobs(self) -> list[LogProbs] | None:
        if self.likeliest is None:
            return None
        pairs = zip(*(part.tolist() for part in self.likeliest), strict=True)
        # Where words are forbidden there may be fewer than were asked for.
        return [
            tuple(pair for pair in zip(words, values, strict=True) if pair[1] > -math.inf)
            for words, values in pairs
        ]


@dataclass
class Answering:
    number: int
    request: EngineRequest
    writer: AnswerWriter
    sampler: Sampler
    decode: str  # "diffuse", "causal" or "score"
    arrived: float
    canvas_len: int
    context: list[int]  # tokens that are, or are about to be, in the context
    cached: int = 0  # of these, found in memory
    following: Following | None = None  # where it stands in the language it keeps to
    strings: Strings | None = None  # what the running canvas may hold of it
    pins: CanvasPins | None = None  # what is given of the running canvas
    past: RowPast | None = None  # gathered for the running canvas
    steps: int = 0  # taken on the running canvas
    look: Look | None = None  # the last one at the running canvas
    refines: bool = True  # False: its last canvas was fixed as a whole, or there is none
    laps: dict[str, float] = field(default_factory=dict)  # seconds by phase
    first_commit_s: float = 0.0

    @property
    def is_causal(self) -> bool:
        return self.decode == "causal"

    @property
    def is_diffuse(self) -> bool:
        return self.decode == "diffuse"

    @property
    def has_free(self) -> bool:
        """Whether the canvas to come has a position that is shown and not fixed."""
        given = self.request.given
        if given is None or not given.fixed:
            return True
        begin = len(self.writer.tokens)
        end = min(begin + self.canvas_len, self.writer.max_tokens)
        return any(position not in given.fixed for position in range(begin, end))

    @property
    def deadline(self) -> float:
        seconds = self.request.params.deadline_s
        return math.inf if seconds is None else self.arrived + seconds

    @property
    def has_shown(self) -> bool:
        """Whether there is anything to answer with: a commit, or a guess."""
        return self.first_commit_s > 0 or self.look is not None

    def options(self) -> Hashable:
        """Answers with the same options look at the vocabulary together."""
        params, own = self.request.params, self.request.sampler
        rules = None if self.is_causal else self.sampler if own is None else id(own)
        narrow = (params.temperature > 0, params.top_k, params.top_p, params.logprobs)
        return (self.is_causal, rules, narrow, bool(self.request.logit_bias), self.following is not None)

    def finish(self, now: float) -> Finish:
        timings = Timings(
            prefill_s=self.laps.get("prefill", 0.0),
            denoise_s=self.laps.get("denoise", 0.0),
            commit_s=self.laps.get("commit", 0.0),
            first_commit_s=self.first_commit_s,
            total_s=now - self.arrived,
        )
        answer = self.writer.answer(
            decode=self.decode,
            timings=timings,
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached,
        )
        return Finish(row=self.request.row, answer=answer)
