"""The state of one request from admission to its finish."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import Tensor

from dgemma.engine.constraint_state import ConstraintState
from dgemma.engine.decode_cost import DecodeChooser
from dgemma.engine.output import OutputBuilder
from dgemma.engine.request import EngineRequest, auto_canvas_len
from dgemma.events import CanvasStep, Finish, LogProbs, Timings
from dgemma.images.preprocess import PlacedImage
from dgemma.model.kv_cache import NewKeysValues, PastKeysValues
from dgemma.sampling.constrained import CanvasConstraint
from dgemma.sampling.pinned import CanvasPins
from dgemma.sampling.sampler import CanvasState, Sampler
from dgemma.sampling.top_k import TopK


@dataclass(frozen=True)
class Encoded:
    """The result of a chunk: row `row` of `fresh`, after `skip` tokens of padding."""

    hidden: Tensor  # [tokens, hidden]
    fresh: NewKeysValues
    row: int
    skip: int


@dataclass(frozen=True)
class SampleOutput:
    """What sampling returned for one sequence: a canvas; the next token; or what replaces a draft."""

    guess: Tensor  # [positions]
    entropy: Tensor  # [positions]
    top_k: TopK | None  # both [positions, n]
    settled: bool
    watched: tuple[tuple[int, LogProbs], ...] = ()  # by position of the canvas, once it is settled
    accepted: int | None = None  # of a draft that was verified

    def logprobs(self) -> list[LogProbs] | None:
        if self.top_k is None:
            return None
        pairs = zip(*(part.tolist() for part in self.top_k), strict=True)
        # Forbidden tokens are dropped, so there may be fewer than requested.
        return [
            tuple(pair for pair in zip(tokens, values, strict=True) if pair[1] > -math.inf)
            for tokens, values in pairs
        ]


@dataclass
class SequenceState:
    """A request that the engine has taken: its context, its output, and its running canvas."""

    request_id: int
    request: EngineRequest
    output: OutputBuilder
    sampler: Sampler
    decode: str  # of `GenerationParams`, or "score"; of "auto" the one that is chosen now
    arrived: float
    context: list[int]  # tokens that are, or are about to be, in the context
    max_canvas_len: int
    max_positions: int
    canvas_len: int = 0  # of the running canvas, or of the next one
    num_certain: int = 0  # positions that it leaves out, because they hold end tokens for certain
    cut_tail: list[int] = field(default_factory=list)  # of these, the tokens it had before it was cut
    cached: int = 0  # of these, found in the prefix cache
    constraint_state: ConstraintState | None = None  # its DFA state
    canvas_constraint: CanvasConstraint | None = None  # of the running canvas
    pins: CanvasPins | None = None  # of the running canvas
    past: PastKeysValues | None = None  # gathered for the running canvas
    steps: int = 0  # taken on the running canvas
    sample: SampleOutput | None = None  # the last one of the running canvas
    last_hidden: Tensor | None = None  # [1, hidden], of the context's last token, which predicts the next
    draft: list[int] | None = None  # while it is verified
    leftover: list[int] = field(default_factory=list)  # of the last draft, from the next position on
    verified: Encoded | None = None  # the draft, encoded; what is kept of it joins the context
    chooser: DecodeChooser | None = None  # of decode "auto"
    refines: bool = True  # False: every position of its last canvas was fixed, or it has none
    phase_s: dict[str, float] = field(default_factory=dict)  # seconds by phase
    queue_s: float = 0.0
    first_commit_s: float = 0.0

    def __post_init__(self) -> None:
        self.size_canvas()

    @property
    def sizes_canvas(self) -> bool:
        return self.request.params.canvas_len == "auto"

    def size_canvas(self) -> None:
        """Choose the length of the next canvas."""
        self.canvas_len, self.num_certain, self.cut_tail = self.max_canvas_len, 0, []
        if not self.sizes_canvas:
            return
        written = len(self.output.tokens)
        room = self.max_positions - len(self.request.prompt) - written
        left = self.output.max_tokens - written
        if self.request.pinned is not None and self.request.pinned.begin:  # may begin with more than is kept
            left = max(left, max(self.request.pinned.begin) + 1 - written)
        self.canvas_len = auto_canvas_len(left, min(self.max_canvas_len, room))
        rest = None if self.constraint_state is None else self.constraint_state.most_tokens
        if rest is not None:
            most, self.canvas_len = self.canvas_len, auto_canvas_len(rest + 1, self.canvas_len)
            self.num_certain = most - self.canvas_len

    def cut_canvas(self, state: CanvasState) -> bool:
        """Cut the running canvas behind its end token, as soon as all positions from there on hold one.

        They do if the sampler accepts them: the next step would have read them as they are. -> Whether the
        canvas is shorter now.
        """
        if not self.sizes_canvas or self.request.pinned is not None or self.sampler.unmask is not None:
            return False
        ends = () if self.request.params.ignore_end else self.request.params.end_tokens
        argmax, accepted = state.argmax[0].tolist(), state.accepted[0].tolist()
        end = self.canvas_len
        while end and accepted[end - 1] and argmax[end - 1] in ends:
            end -= 1
        length = auto_canvas_len(end + 1, self.canvas_len)
        self.cut_tail = argmax[length:] + self.cut_tail
        self.num_certain += self.canvas_len - length
        is_shorter = length < self.canvas_len
        self.canvas_len = length
        return is_shorter

    def images_from(self, start: int, stop: int) -> tuple[PlacedImage, ...]:
        """The images of the prompt that begin at positions from `start` to `stop`."""
        return tuple(image for image in self.request.images if start <= image.start < stop)

    @property
    def is_causal(self) -> bool:
        return self.decode == "causal"

    @property
    def has_canvas(self) -> bool:
        return self.decode in ("diffuse", "verified", "lossless")

    @property
    def is_verified(self) -> bool:
        """Whether the causal pass checks each canvas."""
        return self.decode in ("verified", "lossless")

    def choose_decode(self, steps: int, num_tokens: int) -> None:
        """With decode "auto": how the next tokens are written, after `num_tokens` that took `steps`."""
        if self.chooser is None:
            return
        if self.is_causal:
            self.chooser.wrote_token()
        else:
            self.chooser.wrote_canvas(steps, num_tokens)
        self.decode = self.chooser.choice
        self.refines = self.has_canvas
        if self.is_causal:
            self.leftover, self.steps = [], 0

    @property
    def has_free(self) -> bool:
        """Whether the next canvas has a position before max_tokens that is not fixed."""
        pinned = self.request.pinned
        if pinned is None or not pinned.fixed:
            return True
        begin = len(self.output.tokens)
        end = min(begin + self.canvas_len, self.output.max_tokens)
        return any(position not in pinned.fixed for position in range(begin, end))

    @property
    def deadline(self) -> float:
        seconds = self.request.params.deadline_s
        return math.inf if seconds is None else self.arrived + seconds

    @property
    def has_shown(self) -> bool:
        """Whether there is anything to return: a commit, or a guess."""
        return self.first_commit_s > 0 or (self.sample is not None and not self.is_verified)

    def sampling_key(self) -> Hashable:
        """Sequences with the same key share one vocabulary scan."""
        params, own = self.request.params, self.request.sampler
        rules = None if self.is_causal else self.sampler if own is None else id(own)
        scan = (params.temperature > 0, params.top_k, params.top_p, params.logprobs)
        return (
            self.is_causal,
            None if self.draft is None else (self.decode, params.verify_threshold),
            None if self.is_causal or self.draft is not None else self.canvas_len,
            self.sizes_canvas,
            rules if self.draft is None else None,
            scan,
            bool(self.request.logit_bias),
            self.constraint_state is not None,
        )

    def canvas_step(self, sample: SampleOutput, state: CanvasState, now: float) -> CanvasStep:
        """What a trace records of a step; `state` is that of this canvas after it."""
        pinned = () if self.pins is None else (~self.pins.free).nonzero()[:, 0].tolist()
        logprobs = sample.logprobs()
        tail = self.cut_tail
        if logprobs is not None:
            logprobs += [()] * len(tail)
        return CanvasStep(
            row=self.request.row,
            canvas=self.output.canvas,
            step=self.steps,
            at_s=now - self.arrived,
            tokens=(*state.canvas[0].tolist(), *tail),
            accepted=tuple(state.accepted[0].nonzero()[:, 0].tolist()),
            pinned=tuple(pinned),
            argmax=(*state.argmax[0].tolist(), *tail),
            entropy=(*sample.entropy.tolist(), *[0.0] * len(tail)),
            logprobs=None if logprobs is None else tuple(logprobs),
        )

    def finish(self, now: float) -> Finish:
        timings = Timings(
            queue_s=self.queue_s,
            prefill_s=self.phase_s.get("prefill", 0.0),
            denoise_s=self.phase_s.get("denoise", 0.0),
            commit_s=self.phase_s.get("commit", 0.0),
            verify_s=self.phase_s.get("verify", 0.0),
            first_commit_s=self.first_commit_s,
            total_s=now - self.arrived,
        )
        answer = self.output.answer(
            decode=self.decode if self.chooser is None else "auto",
            timings=timings,
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached,
        )
        return Finish(row=self.request.row, answer=answer)
