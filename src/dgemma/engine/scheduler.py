"""Which sequences compute what in the next step. Imports no torch, reads no clock.

Continuous batching: every admitted sequence takes part in every step, until it is finished. Where a step
takes as long as its rows one after the other, a tenant that has had much leaves every second step to those
that have had less. Canvases are denoised whole; prompts are read by chunked prefill, in chunks that share a
budget of tokens. Tenants take turns at it; within a tenant the order is that of admission. A sequence is
admitted when a slot is free and the blocks for its longest possible context can be reserved. Of the tenants
with waiting requests, the one with the fewest running sequences is next (fair share). Within a tenant, and
between equals, requests are admitted in the order of the queue: none starves.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dgemma.engine.kv_cache_manager import BlockTable, KVCacheManager
from dgemma.engine.prefix_cache import BlockHashChain
from dgemma.images.preprocess import PlacedImage


@dataclass(frozen=True)
class Phase:
    """What a step does for a sequence. The scheduler depends only on `extends`."""

    name: str
    extends: bool
    """Whether tokens join the context: these can be computed in chunks."""
    is_draft: bool = False
    """Whether only some of the tokens may join it: `keep` says which."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _phase, (self.name,)  # on another rank it is the same object


def _phase(name: str) -> Phase:
    return next(phase for phase in (PREFILL, DENOISE, COMMIT, VERIFY) if phase.name == name)


PREFILL = Phase("prefill", extends=True)
DENOISE = Phase("denoise", extends=False)
COMMIT = Phase("commit", extends=True)
VERIFY = Phase("verify", extends=True, is_draft=True)


@dataclass(frozen=True, kw_only=True)
class QueuedRequest:
    """A request as the scheduler sees it."""

    request_id: int
    tokens: Sequence[int]  # of the prompt
    images: tuple[PlacedImage, ...] = ()  # none is cut: each is computed in one step
    max_len: int  # the most tokens its context may ever hold
    root: bytes = b""  # names the adapter: prefixes are reused only under the same weights
    reusable: int | None = None  # leading tokens that may come from the prefix cache; None: all but one
    turns: Sequence[int] = ()  # prompt lengths at which a turn ends: other requests may continue there
    priority: int = 0  # higher is sooner
    deadline: float | None = None
    tenant: str = ""
    max_tenant_seqs: int | None = None  # sequences of this tenant that may run at once


@dataclass(frozen=True)
class ScheduledSequence:
    """A sequence's part of a step; where its phase extends the context, positions `start` to `stop`."""

    request_id: int
    slot: int
    phase: Phase
    start: int
    stop: int
    is_last: bool  # the last chunk of a phase that extends the context


@dataclass(frozen=True)
class SchedulerOutput:
    admitted: tuple[int, ...]
    expired: tuple[int, ...]  # past their deadline: the caller removes them now
    scheduled: tuple[ScheduledSequence, ...]


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """max_num_seqs: sequences at a time. chunk_size: prompt tokens per step, over all sequences; an image is
      read in one step, though it has more.

    encode_block: chunks end at its multiples, so that exact mode computes the same bits for any chunk size.
    patience_s: what one step of priority is worth. A request is overtaken only by requests that arrive
    within this time per step of priority, so that none waits forever.
    rows_add_up: a step takes as long as its rows one after the other (exact mode).
    """

    max_num_seqs: int
    chunk_size: int
    encode_block: int
    patience_s: float = 10.0
    rows_add_up: bool = False


@dataclass
class _Running:
    request: QueuedRequest
    slot: int
    block_table: BlockTable
    phase: Phase
    target: int  # the context length at which the phase ends


# A tenant has had much if it was in so many times as many rows as another, lately: by half in this time.
_MUCH = 2.0
_HALF_LIFE_S = 30.0


class Scheduler:
    def __init__(self, kv_manager: KVCacheManager, config: SchedulerConfig) -> None:
        assert config.chunk_size >= config.encode_block
        self._kv_manager = kv_manager
        self._config = config
        self._queues: dict[str, list[tuple[float, int]]] = {}  # a heap per tenant
        self._num_waiting: Counter[str] = Counter()  # by tenant
        self._num_running: Counter[str] = Counter()
        self._waiting: dict[int, QueuedRequest] = {}
        self._running: dict[int, _Running] = {}  # in the order of admission
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._num_prefills = 0
        self._prefill_turns: Counter[str] = Counter()  # by tenant: the number of its last chunk
        self._num_steps = 0
        self._rows: dict[str, float] = {}  # by tenant: rows of steps, lately
        self._halved_at = 0.0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def num_waiting_of(self, tenant: str) -> int:
        return self._num_waiting[tenant]

    def is_waiting(self, request_id: int) -> bool:
        return request_id in self._waiting

    def add(self, request: QueuedRequest, now: float) -> None:
        """Queue a request. The caller has rejected requests that could never be admitted."""
        assert self._kv_manager.fits(request.max_len)
        assert 0 < len(request.tokens) <= request.max_len
        assert request.request_id not in self._waiting
        assert request.request_id not in self._running
        self._waiting[request.request_id] = request
        rank = now - request.priority * self._config.patience_s
        heapq.heappush(self._queues.setdefault(request.tenant, []), (rank, request.request_id))
        self._num_waiting[request.tenant] += 1

    def schedule(self, now: float) -> SchedulerOutput:
        """Admit waiting requests for which there is capacity, and plan the next step."""
        expired = tuple(self._expired(now))
        admitted = tuple(self._admit(set(expired)))
        left_out = {*expired, *(self._left_out(set(expired), now) if self._config.rows_add_up else ())}
        return SchedulerOutput(admitted, expired, tuple(self._schedule_running(left_out)))

    def follow(self, output: SchedulerOutput) -> None:
        """Admit what another rank's scheduler, with the same requests and blocks, has admitted."""
        for request_id in output.admitted:
            request = self._waiting[request_id]
            has_begun = self._begin(request)
            assert has_begun, request_id
            queue = self._queues[request.tenant]
            while queue and queue[0][1] not in self._waiting:
                heapq.heappop(queue)

    def block_table(self, request_id: int) -> BlockTable:
        return self._running[request_id].block_table

    def slot(self, request_id: int) -> int:
        return self._running[request_id].slot

    def allocate(self, scheduled: ScheduledSequence) -> BlockTable:
        """Blocks for the tokens that were computed; blocks that only this step read may be freed."""
        table = self._running[scheduled.request_id].block_table
        assert scheduled.start == table.length
        self._kv_manager.extend(table, scheduled.stop)
        return table

    def mark_computed(self, scheduled: ScheduledSequence) -> bool:
        """The blocks are written: other requests may reuse them. -> Whether the phase is over."""
        running = self._running[scheduled.request_id]
        is_over = scheduled.stop == running.target
        is_end = is_over or scheduled.stop in self._reuse_points(running)
        self._kv_manager.cache_blocks(running.block_table, tail=running.phase is PREFILL and is_end)
        return is_over

    def set_phase(self, request_id: int, phase: Phase, tokens: Sequence[int] = ()) -> None:
        """Begin the next phase. `tokens` are to join the context, or may do so."""
        running = self._running[request_id]
        assert phase.extends == bool(tokens)
        running.phase = phase
        if not phase.is_draft:
            running.block_table.chain.add(tokens)
        running.target = running.block_table.length + len(tokens)

    def keep(self, scheduled: ScheduledSequence, tokens: Sequence[int]) -> ScheduledSequence:
        """Of a draft, these first tokens join the context -> what was computed of it."""
        running = self._running[scheduled.request_id]
        assert running.phase.is_draft
        running.block_table.chain.add(tokens)
        running.target = scheduled.start + len(tokens)
        return replace(scheduled, stop=running.target)

    def remove(self, request_id: int, *, reusable: bool = False) -> None:
        """A request finished, failed or was cancelled. Its slot and blocks are free for the next step.

        reusable: other requests may continue from the end of its context.
        """
        if (waiting := self._waiting.pop(request_id, None)) is not None:
            self._num_waiting[waiting.tenant] -= 1
            return
        running = self._running.pop(request_id)
        self._num_running[running.request.tenant] -= 1
        if reusable:
            self._kv_manager.cache_blocks(running.block_table, tail=True)
        self._kv_manager.free(running.block_table)
        self._free_slots.append(running.slot)

    def _expired(self, now: float) -> Iterator[int]:
        for request in (*self._waiting.values(), *(running.request for running in self._running.values())):
            if request.deadline is not None and request.deadline <= now:
                yield request.request_id

    def _admit(self, expired: set[int]) -> Iterator[int]:
        while self._free_slots and (request := self._next_waiting(expired)) is not None:
            if not self._begin(request):
                return  # no overtaking: running sequences will finish and free their blocks
            heapq.heappop(self._queues[request.tenant])
            yield request.request_id

    def _begin(self, request: QueuedRequest) -> bool:
        """Give a waiting request a slot and blocks -> whether there are enough blocks."""
        chain = BlockHashChain(self._kv_manager.block_size, request.root, request.images)
        chain.add(request.tokens)
        # The last token is always computed: sampling needs its hidden state.
        reusable = len(request.tokens) - 1
        reusable = reusable if request.reusable is None else min(reusable, request.reusable)
        table = self._kv_manager.allocate(chain, request.max_len, reusable=reusable)
        if table is None:
            return False
        del self._waiting[request.request_id]
        self._num_waiting[request.tenant] -= 1
        self._num_running[request.tenant] += 1
        slot = self._free_slots.pop()
        self._running[request.request_id] = _Running(request, slot, table, PREFILL, len(request.tokens))
        return True

    def _next_waiting(self, expired: set[int]) -> QueuedRequest | None:
        """The first request of the tenant with the fewest running sequences; None: none may run now."""
        heads: list[tuple[int, float, QueuedRequest]] = []
        for tenant, queue in list(self._queues.items()):
            while queue and (queue[0][1] not in self._waiting or queue[0][1] in expired):
                heapq.heappop(queue)
            if not queue:
                del self._queues[tenant]
                continue
            rank, request_id = queue[0]
            request, running = self._waiting[request_id], self._num_running[tenant]
            if request.max_tenant_seqs is None or running < request.max_tenant_seqs:
                heads.append((running, rank, request))
        return min(heads, key=lambda head: head[:2])[2] if heads else None

    def _left_out(self, expired: set[int], now: float) -> Iterator[int]:
        """The sequences of tenants that leave this step to those that have had less."""
        if abs(now - self._halved_at) >= _HALF_LIFE_S:  # a clock may jump
            self._halved_at = now
            self._rows = {tenant: rows / 2 for tenant, rows in self._rows.items() if rows >= 1}
        self._num_steps += 1
        by_tenant: dict[str, list[int]] = {}
        for request_id, running in self._running.items():
            if request_id not in expired:
                by_tenant.setdefault(running.request.tenant, []).append(request_id)
        least = min((self._rows.get(tenant, 0.0) for tenant in by_tenant), default=0.0)
        for tenant, request_ids in by_tenant.items():
            if self._num_steps % 2 and self._rows.get(tenant, 0.0) > _MUCH * (least + 1):
                yield from request_ids
            else:
                self._rows[tenant] = self._rows.get(tenant, 0.0) + len(request_ids)

    def _schedule_running(self, left_out: set[int]) -> Iterator[ScheduledSequence]:
        prefill_ends = self._share_prefill(left_out)
        for request_id, running in self._running.items():
            if request_id in left_out:
                continue
            start = running.block_table.length
            stop = running.target
            if running.phase is PREFILL:
                stop = prefill_ends[request_id]
                if stop <= start:
                    continue
            is_last = running.phase.extends and stop == running.target
            yield ScheduledSequence(request_id, running.slot, running.phase, start, stop, is_last)

    def _share_prefill(self, left_out: set[int]) -> dict[int, int]:
        """How far each prompt is read in this step. A tenant's long prompt must not hold up another's."""
        budget, ends = self._config.chunk_size, dict[int, int]()
        prefills = {
            request_id: running
            for request_id, running in self._running.items()
            if running.phase is PREFILL and request_id not in left_out
        }
        by_turn = sorted(prefills.items(), key=lambda item: self._prefill_turns[item[1].request.tenant])
        for request_id, running in by_turn:  # within a tenant in the order of admission: the sort is stable
            start = running.block_table.length
            ends[request_id] = self._chunk_end(running, budget)
            if ends[request_id] > start:
                budget -= ends[request_id] - start
                self._num_prefills += 1
                self._prefill_turns[running.request.tenant] = self._num_prefills
        return ends

    def _chunk_end(self, running: _Running, budget: int) -> int:
        start = running.block_table.length
        end = min(running.target, start + budget)
        if end < running.target:
            end = end // self._config.encode_block * self._config.encode_block
        end = min([end, *(stop for stop in self._reuse_points(running) if stop > start)])
        image = running.block_table.chain.image_around(end)
        if image is None or end <= start:
            return end
        # A chunk ends before an image or, if it begins with it, after it: then it may exceed the budget.
        return image.start if image.start > start else image.stop

    def _reuse_points(self, running: _Running) -> set[int]:
        """Lengths at which a chunk ends so that others may continue there: ends of complete blocks."""
        block_size, prompt_len = self._kv_manager.block_size, len(running.request.tokens)
        # The last token is always computed: of a prompt of complete blocks, the last one is never reused.
        last = 0 if prompt_len % block_size else prompt_len - block_size
        lengths = (*running.request.turns, running.block_table.branch, last)
        complete = {length // block_size * block_size for length in lengths}
        return {length for length in complete if running.block_table.chain.image_around(length) is None}
