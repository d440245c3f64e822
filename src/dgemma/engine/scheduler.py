"""Who computes what in the next step. Decides and counts; imports no torch, reads no clock.

A sequence waits, is let in (a slot, and memory for the longest it may grow), and goes from phase to phase
until it is finished. Everybody who is in takes part in every step: canvases whole, prompts in pieces that
share a budget of tokens, in the order in which they came in. So nobody who is in starves, and who waits is
let in strictly in the order of the queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dgemma.engine.memory import Holding, Memory
from dgemma.engine.prefix import KeyChain


@dataclass(frozen=True)
class Phase:
    """What a step does for a sequence. An open set: the scheduler asks only this."""

    name: str
    extends: bool
    """Whether tokens join the context: then they can be computed in pieces."""


PREFILL = Phase("prefill", extends=True)
DENOISE = Phase("denoise", extends=False)
COMMIT = Phase("commit", extends=True)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A request as the scheduler sees it."""

    number: int
    tokens: Sequence[int]  # of the prompt
    most_tokens: int  # that its context may ever hold
    root: bytes = b""  # names the weights, with their adapter
    reusable: int | None = None  # so many of its first tokens need not be computed again; None: all but one
    turns: Sequence[int] = ()  # lengths of the prompt at which a turn ends: others may go on from there
    priority: int = 0  # higher is sooner
    deadline: float | None = None


@dataclass(frozen=True)
class Work:
    """A sequence's part of a step; where its phase extends the context, from `start` to `stop`."""

    number: int
    slot: int
    phase: Phase
    start: int
    stop: int
    is_last: bool  # with it the phase has extended the context as far as it will


@dataclass(frozen=True)
class Plan:
    admitted: tuple[int, ...]
    expired: tuple[int, ...]  # their time is up: to be removed by the caller, now
    work: tuple[Work, ...]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """slots: sequences at a time. piece: prompt tokens per step. block: pieces end at its multiples.

    patience_s: what one priority is worth. A request is overtaken only by those that come soon enough after
    it, so that none waits forever.
    """

    slots: int
    piece: int
    block: int
    patience_s: float = 10.0


@dataclass
class _Running:
    entry: Entry
    slot: int
    holding: Holding
    phase: Phase
    target: int  # the length its phase leads to


class Scheduler:
    def __init__(self, memory: Memory, limits: Limits) -> None:
        assert limits.piece >= limits.block
        self._memory = memory
        self._limits = limits
        self._queue: list[tuple[float, int]] = []
        self._waiting: dict[int, Entry] = {}
        self._running: dict[int, _Running] = {}  # in the order of admission
        self._slots = list(range(limits.slots - 1, -1, -1))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def is_waiting(self, number: int) -> bool:
        return number in self._waiting

    def add(self, entry: Entry, now: float) -> None:
        """Queue a request. Whoever could never be let in is refused before."""
        assert self._memory.fits(entry.most_tokens)
        assert 0 < len(entry.tokens) <= entry.most_tokens
        assert entry.number not in self._waiting
        assert entry.number not in self._running
        self._waiting[entry.number] = entry
        heapq.heappush(self._queue, (now - entry.priority * self._limits.patience_s, entry.number))

    def plan(self, now: float) -> Plan:
        """Let in whom there is room for, and share out the next step."""
        expired = tuple(self._expired(now))
        admitted = tuple(self._admit(set(expired)))
        return Plan(admitted, expired, tuple(self._share_out(set(expired))))

    def holding(self, number: int) -> Holding:
        return self._running[number].holding

    def slot(self, number: int) -> int:
        return self._running[number].slot

    def make_room(self, work: Work) -> Holding:
        """Pages for what `work` computed; what it read may go."""
        holding = self._running[work.number].holding
        assert work.start == holding.length
        self._memory.grow(holding, work.stop)
        return holding

    def wrote(self, work: Work) -> bool:
        """The pages hold what `work` computed: others may find them. -> Whether its phase is over."""
        running = self._running[work.number]
        over = work.stop == running.target
        is_end = over or work.stop in self._ends(running)
        self._memory.remember(running.holding, tail=running.phase is PREFILL and is_end)
        return over

    def enter(self, number: int, phase: Phase, tokens: Sequence[int] = ()) -> None:
        """Its next phase. `tokens` are to join its context."""
        running = self._running[number]
        assert phase.extends == bool(tokens)
        running.phase = phase
        running.holding.chain.add(tokens)
        running.target = running.holding.length + len(tokens)

    def remove(self, number: int, *, reusable: bool = False) -> None:
        """Finished, failed or cancelled. Its slot and pages are free for the next plan.

        reusable: others may go on from where its context ends.
        """
        if self._waiting.pop(number, None) is not None:
            return
        running = self._running.pop(number)
        if reusable:
            self._memory.remember(running.holding, tail=True)
        self._memory.close(running.holding)
        self._slots.append(running.slot)

    def _expired(self, now: float) -> Iterator[int]:
        for entry in (*self._waiting.values(), *(running.entry for running in self._running.values())):
            if entry.deadline is not None and entry.deadline <= now:
                yield entry.number

    def _admit(self, expired: set[int]) -> Iterator[int]:
        while self._slots and self._queue:
            _, number = self._queue[0]
            entry = self._waiting.get(number)
            if entry is not None and number not in expired:
                chain = KeyChain(self._memory.page_len, entry.root)
                chain.add(entry.tokens)
                # The last token is computed in any case: something must be.
                most = len(entry.tokens) - 1
                most = most if entry.reusable is None else min(most, entry.reusable)
                holding = self._memory.open(chain, entry.most_tokens, reusable=most)
                if holding is None:
                    return  # nobody overtakes: those who are in will finish and make room
                del self._waiting[number]
                slot = self._slots.pop()
                self._running[number] = _Running(entry, slot, holding, PREFILL, len(entry.tokens))
                yield number
            heapq.heappop(self._queue)

    def _share_out(self, expired: set[int]) -> Iterator[Work]:
        left = self._limits.piece
        for number, running in self._running.items():
            if number in expired:
                continue
            start = running.holding.length
            stop = running.target
            if running.phase is PREFILL:
                stop = self._piece_end(running, left)
                if stop <= start:
                    continue
                left -= stop - start
            is_last = running.phase.extends and stop == running.target
            yield Work(number, running.slot, running.phase, start, stop, is_last)

    def _piece_end(self, running: _Running, budget: int) -> int:
        start = running.holding.length
        end = min(running.target, start + budget)
        if end < running.target:
            end = end // self._limits.block * self._limits.block
        return min([end, *(stop for stop in self._ends(running) if stop > start)])

    def _ends(self, running: _Running) -> set[int]:
        """Where a piece ends so that others may go on from there: at the last page that is whole."""
        page_len, prompt = self._memory.page_len, len(running.entry.tokens)
        # Its last token is always computed: of a prompt of whole pages, the last page is never used again.
        last = 0 if prompt % page_len else prompt - page_len
        lengths = (*running.entry.turns, running.holding.branch, last)
        return {length // page_len * page_len for length in lengths}
