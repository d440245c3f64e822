"""Many answers at once: plan a step, compute it, say what came of it.

Whoever calls `step` calls everything else here too, between two steps, never beside one. What goes wrong for
one request ends that request: a computation that fails for several is tried again for each alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from dgemma.diffusion.noise import Use, place_at, random_tokens
from dgemma.diffusion.step import open_canvas
from dgemma.engine.answering import Answering, Look
from dgemma.engine.following import Following, check_constraint
from dgemma.engine.looking import look_at_canvases, look_at_tokens, score_tokens
from dgemma.engine.memory import Memory
from dgemma.engine.page_store import PageStore
from dgemma.engine.runner import Canvases, Encoded, Piece, forward
from dgemma.engine.scheduler import COMMIT, DENOISE, Entry, Limits, Scheduler, Work
from dgemma.engine.service import EngineRequest, EngineStats, Failed
from dgemma.engine.slots import Slots
from dgemma.errors import InputError, suggestion
from dgemma.events import Event, LogProbs
from dgemma.generation.cost import cheaper_decode
from dgemma.generation.job import check_prompt, most_tokens
from dgemma.generation.parts import pins_of, sampler_for
from dgemma.generation.writer import AnswerWriter
from dgemma.given import Given
from dgemma.model.row_contexts import RowPast
from dgemma.model.stack import Stack
from dgemma.text.tokenizer import Tokenizer

# Turns of a conversation behind which others may go on: where instructions end, and the last few.
_FIRST_TURNS, _LAST_TURNS = 1, 3

# Positions that look at the vocabulary together: what they hold at a time grows with them, and large tensors
# are slow to get on a CPU (a fifth of a step of 16 canvases, measured).
_MOST_POSITIONS = 1024

Fault = Callable[[str, Sequence[int]], None]
"""Called where something may go wrong, with the requests at stake. Raises in tests."""


@dataclass(frozen=True)
class _Computed:
    """What a forward gave to one answer: text that was read, a canvas that was refined, or both."""

    encoded: Encoded | None
    hidden: Tensor | None  # of the canvas
    past: RowPast | None  # that the canvas read


Item = TypeVar("Item")
Result = TypeVar("Result")


class Engine:
    """`stacks`: the base under None, and adapters of it by name."""

    def __init__(
        self,
        stacks: Mapping[str | None, Stack],
        memory: Memory,
        limits: Limits,
        *,
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.perf_counter,
        fault: Fault = lambda point, numbers: None,
    ) -> None:
        base = stacks[None]
        self._stacks = stacks
        self._config = base.config
        self._device = base.norm.weight.device
        self._memory = memory
        self._limits = limits
        self._scheduler = Scheduler(memory, limits)
        dtype = base.embedding.dtype
        self._store = PageStore(base.config, memory, dtype=dtype, device=self._device)
        self._slots = Slots(base.config, limits.slots, dtype=dtype, device=self._device)
        self._tokenizer = tokenizer
        self._clock = clock
        self._fault = fault
        self._answering: dict[int, Answering] = {}
        self._works: dict[int, Work] = {}  # of the step under way, by request
        self._next = 0
        self._began = 0.0
        self._last_step_s = 0.0
        self.num_computed = 0  # requests that had a part in the last step
        self._told: list[tuple[int, Event | Failed]] = []
        self._hit_tokens = 0
        names = ("steps", "prefill_tokens", "denoise_forwards", "commit_tokens")
        self._counters = dict.fromkeys(names, 0)

    @property
    def is_idle(self) -> bool:
        return not self._answering

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    @property
    def num_free_slots(self) -> int:
        return self._limits.slots - self._scheduler.num_running

    def stats(self) -> EngineStats:
        return EngineStats(
            slots_used=self._scheduler.num_running,
            slots_total=self._limits.slots,
            full_pages_used=self._memory.full.num_used,
            full_pages_total=self._memory.full.size,
            window_pages_used=self._memory.window.num_used,
            window_pages_total=self._memory.window.size,
            num_waiting=self._scheduler.num_waiting,
            prefix_hit_tokens=self._hit_tokens,
            counters=dict(self._counters),
        )

    def have_room_for(self, requests: Iterable[EngineRequest]) -> None:
        """Get memory, if there is too little, for as many of them as can run at once."""
        lengths = sorted((self._most(request)[2] for request in requests), reverse=True)
        self._memory.ensure(lengths[: self._limits.slots])
        self._store.fit()

    def check(self, request: EngineRequest) -> None:
        """Refuse what could never be answered. Changes nothing: may be called beside a step."""
        *_, length = self._most(request)
        if not self._memory.fits(length):
            raise InputError(
                f"prompt and answer may grow to {length} tokens, for which there is no memory. "
                "Lower max_tokens, shorten the prompt, or give the engine more memory."
            )

    def add(self, request: EngineRequest, *, arrived: float | None = None) -> int:
        """Queue a request -> its number. `arrived`: by the engine's clock, if not now."""
        self.check(request)
        decode, max_tokens, length = self._most(request)
        params, now = request.params, self._clock() if arrived is None else arrived
        number, self._next = self._next, self._next + 1
        ends = [at + 1 for at, token in enumerate(request.prompt) if token in params.end_tokens]
        entry = Entry(
            number=number,
            tokens=request.prompt,
            most_tokens=length,
            root=b"" if request.adapter is None else b"adapter " + request.adapter.encode(),
            reusable=None if request.score_from is None else request.score_from - 1,
            turns=(*ends[:_FIRST_TURNS], *ends[-_LAST_TURNS:]),
            priority=request.priority,
            deadline=None if params.deadline_s is None else now + params.deadline_s,
        )
        writer = AnswerWriter(
            row=request.row,
            seed=request.seed,
            max_tokens=max_tokens,
            params=params,
            tokenizer=self._tokenizer,
            given=request.given,
            whole_after=() if request.constraint is None else request.constraint.whole_after,
        )
        self._scheduler.add(entry, now)
        self._answering[number] = Answering(
            number=number,
            request=request,
            writer=writer,
            sampler=request.sampler or sampler_for(params),
            decode=decode,
            arrived=now,
            canvas_len=self._config.canvas_len,
            refines=decode == "diffuse",
            following=None
            if request.constraint is None
            else Following(request.constraint, max_tokens, request.given),
            context=list(request.prompt),
        )
        return number

    def cancel(self, number: int) -> None:
        """Nobody wants it any more. Its slot and pages are free for the next step."""
        if self._answering.pop(number, None) is not None:
            self._scheduler.remove(number)

    @torch.inference_mode()
    def step(self, paused: Collection[int] = ()) -> list[tuple[int, Event | Failed]]:
        """One step of everybody who is not paused -> what there is to say, by the request's number."""
        self._began = self._clock()
        self._told = []
        self._works = {}
        # Who has something to show stops before a step that would end too late.
        soon = self._began + self._last_step_s
        for one in [one for one in self._answering.values() if one.has_shown and one.deadline <= soon]:
            self._guarded(one, self._expire, one)
        plan = self._scheduler.plan(self._began)
        for number in plan.expired:
            one = self._answering[number]
            self._guarded(one, self._expire, one)
        for number in plan.admitted:
            one = self._answering[number]
            one.cached = self._scheduler.holding(number).cached
            self._hit_tokens += one.cached
        works = [(self._answering[w.number], w) for w in plan.work if w.number not in paused]
        self._works = {work.number: work for _, work in works}
        for group in _alike(works, lambda item: item[0].request.adapter):
            self._compute(self._stacks[group[0][0].request.adapter], group)
        self.num_computed = len(works)
        if works:
            self._counters["steps"] += 1
            self._last_step_s = self._clock() - self._began
        for one, _ in works:
            if one.number in self._answering:
                self._spend(one, self._last_step_s)
        return self._told

    def _most(self, request: EngineRequest) -> tuple[str, int, int]:
        """How it is written, how many tokens it may write, and the most its context may hold."""
        if request.adapter not in self._stacks:
            known = [name for name in self._stacks if name is not None]
            raise InputError(f"adapter is {request.adapter!r}{suggestion(str(request.adapter), known)}")
        check_prompt(request.prompt, self._config.vocab_size)
        if request.score_from is not None:
            if request.given:
                raise InputError("a request that scores writes nothing: nothing can be given of its answer.")
            return "score", 0, self._scored_len(request.prompt, request.score_from)
        max_tokens = most_tokens(self._config, len(request.prompt), request.params.max_tokens)
        decode: str = request.params.decode
        if decode == "auto":
            decode = cheaper_decode(self._stacks[request.adapter], self._device.type, max_tokens)
        if request.given:
            if request.params.decode == "causal":
                raise InputError('positions are pinned, and decode is "causal"; only a canvas can hold pins.')
            request.given.check(self._config.vocab_size, max_tokens)
            decode = "diffuse"
        if request.constraint is not None:
            check_constraint(
                request.constraint, request.params, self._config.vocab_size, max_tokens, request.given
            )
            decode = "causal" if request.params.decode == "causal" else "diffuse"
        # The last token, or the last canvas, is written and never read.
        canvas_len = self._config.canvas_len
        read = max_tokens - 1 if decode == "causal" else (max_tokens - 1) // canvas_len * canvas_len
        return decode, max_tokens, len(request.prompt) + read

    def _scored_len(self, prompt: Sequence[int], score_from: int) -> int:
        if type(score_from) is not int or not 1 <= score_from < len(prompt):
            raise InputError(
                f"score_from is {score_from} for a prompt of {len(prompt)} tokens; it must be from 1 to "
                f"{len(prompt) - 1}: what is scored stands behind something."
            )
        if len(prompt) > self._config.max_positions:
            raise InputError(
                f"the text has {len(prompt)} tokens; this model's context holds {self._config.max_positions}."
            )
        return len(prompt)

    def _compute(self, stack: Stack, works: Sequence[tuple[Answering, Work]]) -> None:
        """Everybody's part of a step under one adapter."""
        lookers: list[tuple[Answering, Work, Tensor]] = []
        for (one, work), computed in self._together(
            "forward", works, lambda items: self._forward(stack, items)
        ):
            hidden = computed.hidden
            if computed.encoded is not None:
                hidden = self._guarded(one, self._keep, one, work, computed)
            if hidden is not None:
                lookers.append((one, work, hidden))
        for alike in _alike(lookers, lambda item: item[0].options()):
            together = max(1, _MOST_POSITIONS // alike[0][2].shape[0])
            for begin in range(0, len(alike), together):
                some = alike[begin : begin + together]
                for (one, _, _), look in self._together("look", some, lambda items: self._look(stack, items)):
                    self._guarded(one, self._tell, one, look)

    def _forward(self, stack: Stack, works: Sequence[tuple[Answering, Work]]) -> list[_Computed]:
        """What each piece of text gave, and the hidden states of each canvas."""
        pieces: list[Piece] = []
        pasts: dict[int, RowPast] = {}  # of canvases, by slot
        for one, work in works:
            if work.phase is DENOISE:
                assert one.past is not None
                pasts[work.slot] = one.past
                continue
            holding, tokens = self._scheduler.holding(work.number), one.context[work.start : work.stop]
            canvas = None
            if work.is_last and one.is_diffuse and one.has_free:
                # Its canvas is opened, and refined in the same pass.
                canvas = self._store.read(holding, room=self._config.canvas_len, gap=len(tokens))
                place = place_at([one.writer.seed], [one.writer.canvas], [0], self._device)
                noise = random_tokens(place, Use.OPEN, self._config.canvas_len, self._config.vocab_size)
                self._open(one)
                noise = noise if one.pins is None else one.pins.open(noise)
                self._slots.write([work.slot], open_canvas(noise), None)
                pasts[work.slot] = canvas
            pieces.append(Piece(tokens, self._store.read(holding), canvas))
        canvases = None
        if pasts:
            state, soft = self._slots.read(list(pasts))
            canvases = Canvases(state.canvas, soft, list(pasts.values()))
        encoded, hidden = forward(stack, pieces, canvases)
        next_encoded = iter(encoded)
        hidden_of = {} if hidden is None else dict(zip(pasts, hidden, strict=True))
        return [
            _Computed(
                encoded=next(next_encoded) if work.phase.extends else None,
                hidden=hidden_of.get(work.slot),
                past=pasts.get(work.slot),
            )
            for _, work in works
        ]

    def _keep(self, one: Answering, work: Work, computed: _Computed) -> Tensor | None:
        """Let tokens join the context -> the hidden states to look at the vocabulary from, if any."""
        encoded = computed.encoded
        assert encoded is not None
        holding = self._scheduler.make_room(work)
        self._store.write(holding, work.start, work.stop, encoded.fresh, encoded.row, encoded.skip)
        self._counters[f"{work.phase.name}_tokens"] += work.stop - work.start
        over = self._scheduler.wrote(work)
        if one.request.score_from is not None:
            self._score(one, one.request.score_from, work, encoded)
        if not over or not one.is_diffuse:
            return encoded.hidden[-1:] if over and one.is_causal else None
        if not one.has_free:  # nothing to find out: as if a look had shown it
            one.refines = False
            self._settle(one, self._given_canvas(one), steps=0)
            return None
        one.past = computed.past
        one.steps, one.look = 0, None
        self._scheduler.enter(work.number, DENOISE)
        return computed.hidden

    def _look(self, stack: Stack, items: Sequence[tuple[Answering, Work, Tensor]]) -> list[Look]:
        ones = [one for one, _, _ in items]
        hidden = torch.stack([states for _, _, states in items])
        if ones[0].is_causal:
            return look_at_tokens(stack, ones, hidden)
        self._counters["denoise_forwards"] += len(items)
        return look_at_canvases(stack, self._slots, [work.slot for _, work, _ in items], ones, hidden)

    def _tell(self, one: Answering, look: Look) -> None:
        """What a look showed: a draft, perhaps a commit, perhaps the end."""
        one.look = look
        guess = look.guess.tolist() if look.settled or one.request.drafts else []
        if not one.is_causal:
            one.steps += 1
            if one.request.drafts:
                self._say(one, one.writer.draft(guess, look.entropy.tolist(), one.steps))
        if look.settled:
            self._settle(one, guess, steps=one.steps, look=look)

    def _settle(self, one: Answering, guess: list[int], *, steps: int, look: Look | None = None) -> None:
        """A canvas or token is final: perhaps the end, else it joins the context."""
        one.past = None
        logprobs: list[LogProbs] | None = [((token, 0.0),) for token in guess]  # fixed, so certain
        watched = _certain(one.request.given, one)
        if look is not None:
            logprobs, watched = look.logprobs(), look.watched
        if one.following is not None:
            one.following.advance(len(one.writer.tokens), guess)
        self._say(one, one.writer.commit(guess, steps=steps, logprobs=logprobs, watched=watched))
        one.first_commit_s = one.first_commit_s or self._clock() - one.arrived
        if one.writer.reason is not None:
            self._finish(one)
        else:
            one.context += guess
            self._scheduler.enter(one.number, COMMIT, guess)

    def _open(self, one: Answering) -> None:
        """What is given of the canvas to come, and what it may hold."""
        canvas_len, given = self._config.canvas_len, one.request.given
        begin = one.writer.canvas * canvas_len
        if one.following is not None:
            one.strings = one.following.strings(begin, canvas_len, self._device)
            # Behind the last token that is shown stands what a model knows to stand there: an end token.
            beyond = range(one.writer.max_tokens, begin + canvas_len)
            if beyond and one.following.constraint.end_tokens:
                given = given or Given()
                end = one.following.constraint.end_tokens[0]
                given = replace(given, fixed={**given.fixed, **dict.fromkeys(beyond, end)})
        one.pins, one.refines = pins_of(given, one.writer.canvas, canvas_len, self._device), True

    def _given_canvas(self, one: Answering) -> list[int]:
        """A canvas of which everything that is shown is fixed."""
        begin = len(one.writer.tokens)
        assert one.request.given is not None
        fixed = one.request.given.fixed
        return [fixed.get(position, 0) for position in range(begin, begin + self._config.canvas_len)]

    def _score(self, one: Answering, score_from: int, work: Work, encoded: Encoded) -> None:
        """How likely what follows each token of a piece is; behind the last piece the request is finished."""
        first, stop = max(work.start, score_from - 1), min(work.stop, len(one.context) - 1)
        if first < stop:
            hidden = encoded.hidden[first - work.start : stop - work.start]
            stack = self._stacks[one.request.adapter]
            one.writer.scores += score_tokens(stack, hidden, one.context[first + 1 : stop + 1], first)
        if work.stop == len(one.context):
            one.writer.end()
            self._finish(one)

    def _expire(self, one: Answering) -> None:
        """Its time is up: the best guess so far, said to be one."""
        look = one.look if one.past is not None else None
        commit = one.writer.commit(
            [] if look is None else look.guess.tolist(),
            steps=0 if look is None else one.steps,
            settled=look is None,
            is_late=True,
            logprobs=None if look is None else look.logprobs(),
        )
        if commit.tokens or commit.text or commit.thought:
            self._say(one, commit)
        self._finish(one)

    def _finish(self, one: Answering) -> None:
        now = self._clock()
        self._spend(one, now - self._began)  # the step that is not over yet was its last one
        self._leave(one, reusable=True)
        self._say(one, one.finish(now))

    def _spend(self, one: Answering, seconds: float) -> None:
        """Count a step's time; where it both read text and refined a canvas, shared out by their tokens."""
        work = self._works.get(one.number)
        if work is None:
            return
        read = work.stop - work.start
        refines = work.phase is DENOISE or (work.is_last and one.refines)
        refined = self._config.canvas_len if refines else 0
        for phase, tokens in ((work.phase.name, read), (DENOISE.name, refined)):
            one.laps[phase] = one.laps.get(phase, 0.0) + seconds * tokens / (read + refined)

    def _leave(self, one: Answering, *, reusable: bool) -> None:
        del self._answering[one.number]
        self._scheduler.remove(one.number, reusable=reusable)

    def _say(self, one: Answering, event: Event | Failed) -> None:
        self._told.append((one.number, event))

    def _fail(self, one: Answering, error: Exception) -> None:
        if one.number in self._answering:
            self._leave(one, reusable=False)
        self._say(one, Failed(row=one.request.row, error=error))

    def _together(
        self,
        point: str,
        items: Sequence[tuple[Answering, *tuple[Any, ...]]],
        compute: Callable[[Any], Sequence[Result]],
    ) -> list[tuple[Any, Result]]:
        """`compute` for all at once; if that fails, for each alone: whoever fails alone is at fault.

        So `compute` changes nothing before it is sure to end well.
        """
        try:
            self._fault(point, [item[0].number for item in items])
            return list(zip(items, compute(items), strict=True))
        except Exception as error:
            if len(items) == 1:
                self._fail(items[0][0], error)
                return []
        return [pair for item in items for pair in self._together(point, [item], compute)]

    def _guarded(self, one: Answering, act: Callable[..., Result], *args: Any) -> Result | None:
        """What `act` gives; if it fails, only `one` does."""
        try:
            self._fault(act.__name__, [one.number])
            return act(*args)
        except Exception as error:
            self._fail(one, error)
            return None


def _certain(given: Given | None, one: Answering) -> tuple[tuple[int, LogProbs], ...]:
    """What was to be told of a canvas that is fixed as a whole."""
    begin = len(one.writer.tokens)
    watched = {} if given is None else given.watch
    return tuple(
        (at - begin, tuple((word, 0.0 if word == given.fixed[at] else -math.inf) for word in words))
        for at, words in sorted(watched.items())
        if given is not None and begin <= at < begin + one.canvas_len and at in given.fixed
    )


def _alike(items: Sequence[Item], key: Callable[[Item], Hashable]) -> Iterator[list[Item]]:
    """Items with the same key, in the order in which keys first appear."""
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return iter(groups.values())
