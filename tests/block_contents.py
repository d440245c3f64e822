"""The engine without tensors: a block holds, in place of keys and values, a number for each of its tokens.

The number stands for the adapter and all text up to the token, as keys and values depend on both. A `Life`
drives a scheduler and a memory as the engine does and checks every step of it: what is planned, what lies in
the blocks that a step is about to read, and who has which block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from dgemma.engine.kv_cache_manager import BlockTable, KVCacheManager
from dgemma.engine.prefix_cache import BlockHash
from dgemma.engine.scheduler import (
    COMMIT,
    DENOISE,
    PREFILL,
    Phase,
    QueuedRequest,
    ScheduledSequence,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    limits: SchedulerConfig
    block_size: int = 4
    window: int = 5
    full_blocks: int = 32
    window_blocks: int = 16
    max_gathered: int | None = None
    reuse: bool = True


@dataclass(frozen=True, kw_only=True)
class Request:
    tokens: Sequence[int]
    commits: Sequence[Sequence[int]] = ()  # what joins the context later; behind it one canvas more
    num_steps: int = 1  # steps of a canvas; 0: token by token, no canvas
    spare: int = 0  # tokens it might have written and does not
    root: bytes = b""
    turns: Sequence[int] = ()
    priority: int = 0
    deadline: float | None = None

    @property
    def max_len(self) -> int:
        return len(self.tokens) + sum(map(len, self.commits)) + self.spare

    @property
    def context(self) -> list[int]:
        return [*self.tokens, *(token for commit in self.commits for token in commit)]

    @property
    def max_plans(self) -> int:
        """Computed alone, one token at a time, it would be ready after so many."""
        return self.max_len + (len(self.commits) + 1) * self.num_steps + 2


@dataclass
class Progress:
    """What we know of a request that is in, apart from what the scheduler thinks."""

    request: Request
    slot: int
    length: int
    cached: int
    text: list[int]  # for each token of its context, the number in the blocks
    phase: Phase = PREFILL
    computed: list[int] = field(default_factory=list)  # positions
    committed: int = 0
    steps_done: int = 0


def numbers_of(root: bytes, tokens: Sequence[int]) -> list[int]:
    found, last = [], hash(tuple(root))
    for token in tokens:
        last = hash((last, token))
        found.append(last)
    return found


class Life:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.kv_manager = KVCacheManager(
            block_size=setting.block_size,
            window=setting.window,
            full_blocks=setting.full_blocks,
            window_blocks=setting.window_blocks,
            max_gathered=setting.max_gathered,
            reuse=setting.reuse,
        )
        self.scheduler = Scheduler(self.kv_manager, setting.limits)
        self.now = 0.0
        self.plans = 0
        self.met: Counter[str] = Counter()
        self.waiting: dict[int, tuple[float, Request]] = {}  # with the time of arrival
        self.running: dict[int, Progress] = {}
        self.gone: dict[int, tuple[str, Request]] = {}  # how it ended
        self.cached: dict[int, int] = {}
        self._full: list[list[int | None]] = []
        self._window: list[list[int | None]] = []
        self._named: dict[
            BlockHash, tuple[list[int], int]
        ] = {}  # the text a key stands for, and which block of it
        self._next = 0
        self._fit()

    def submit(self, request: Request) -> int | None:
        """-> Its number; None if there could never be room."""
        if not self.kv_manager.fits(request.max_len):
            return None
        request_id, self._next = self._next, self._next + 1
        entry = QueuedRequest(
            request_id=request_id,
            tokens=request.tokens,
            max_len=request.max_len,
            root=request.root,
            turns=request.turns,
            priority=request.priority,
            deadline=request.deadline,
        )
        self.scheduler.add(entry, self.now)
        self.waiting[request_id] = self.now, request
        return request_id

    def cancel(self, request_id: int) -> None:
        self._remove(request_id, "cancelled", reusable=False)

    def ensure(self, lengths: Sequence[int]) -> None:
        self.kv_manager.ensure_capacity(lengths)
        self._fit()
        self.check_ledger()

    def step(
        self, seconds: float = 1.0, *, paused: Collection[int] = (), failing: Collection[int] = ()
    ) -> SchedulerOutput:
        """paused: not computed although planned. failing: removed in the midst of writing what they got."""
        known, tails = set(self.kv_manager.prefix_cache._full), set(self.kv_manager.prefix_cache._tails)
        self.now += seconds
        self.plans += 1
        plan = self.scheduler.schedule(self.now)
        self._check_plan(plan)
        for request_id in plan.expired:
            self.met["expired in the queue" if request_id in self.waiting else "expired in a slot"] += 1
            self._remove(request_id, "expired", reusable=True)
        for request_id in plan.admitted:
            self._let_in(request_id)
        self._check_work(plan)
        by_root: dict[bytes, list[ScheduledSequence]] = {}
        for scheduled in plan.scheduled:
            if scheduled.request_id not in paused:
                by_root.setdefault(self.running[scheduled.request_id].request.root, []).append(scheduled)
        for group in by_root.values():
            for scheduled in group:
                self.check_blocks(scheduled.request_id)
            for scheduled in group:
                self._compute(scheduled, fails=scheduled.request_id in failing)
        self.check_ledger()
        self.met["forgotten blocks"] += len(known - set(self.kv_manager.prefix_cache._full))
        self.met["forgotten tails"] += len(tails - set(self.kv_manager.prefix_cache._tails))
        return plan

    def drain(self) -> None:
        """Until everybody is gone. Every plan brings somebody on, so there is a bound."""
        live = [request for _, request in self.waiting.values()]
        live += [progress.request for progress in self.running.values()]
        bound = sum(request.max_plans for request in live)
        begin = self.plans
        while self.waiting or self.running:
            self.step()
            assert self.plans - begin <= bound, "somebody is never ready"

    def check_rest(self) -> None:
        """Everybody is gone: nothing was lost, and all is given back."""
        assert sorted(self.gone) == list(range(self._next))
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0
        assert sorted(self.scheduler._free_slots) == list(range(self.setting.limits.max_num_seqs))
        assert self.kv_manager._num_gathered == 0
        for pool in (self.kv_manager.full, self.kv_manager.window):
            assert pool.num_available == pool.size
            assert pool.num_used == 0
            kept = sum(1 for count in pool._num_cache_refs if count)
            assert kept + pool.num_free == pool.size
        self.check_ledger()

    def check_blocks(self, request_id: int) -> None:
        """What a step is about to read: the whole text in full blocks, the window in the others."""
        progress, block_table = self.running[request_id], self.scheduler.block_table(request_id)
        block_size, length = self.setting.block_size, progress.length
        assert block_table.length == length
        written = [value for block in block_table.full for value in self._full[block]]
        assert written[:length] == progress.text[:length], f"{request_id}: full blocks were overwritten"
        for at in range(max(0, length - self.setting.window + 1), length):
            assert at // block_size in block_table.window, f"{request_id}: {at} slid out too soon"
            value = self._window[block_table.window[at // block_size]][at % block_size]
            assert value == progress.text[at], f"{request_id}: the window was overwritten at {at}"

    def check_ledger(self) -> None:
        """Who has which block, counted anew from block_tables and index, is what the pools think."""
        kv_manager, block_tables = (
            self.kv_manager,
            [self.scheduler.block_table(request_id) for request_id in self.running],
        )
        index = kv_manager.prefix_cache
        tails = [block for blocks in index._tails.values() for block in blocks]
        for pool, kept, tables, claims in (
            (kv_manager.full, [*index._full.values()], [*map(_full_table, block_tables)], "full_reserved"),
            (kv_manager.window, tails, [*map(_window_table, block_tables)], "window_reserved"),
        ):
            owners = Counter(block for owned, _ in tables for block in owned)
            sharers = Counter(block for _, shared in tables for block in shared)
            keepers, blocks = Counter(kept), range(pool.size)
            assert max(owners.values(), default=0) <= 1, "a block has two owners"
            assert pool._owned == [owners[block] == 1 for block in blocks]
            assert pool._num_sharers == [sharers[block] for block in blocks]
            assert pool._num_cache_refs == [keepers[block] for block in blocks]
            wanted = owners.keys() | sharers.keys() | keepers.keys()
            assert sorted(pool._free) == [block for block in blocks if block not in wanted], "free blocks"
            claimed = [getattr(block_table, claims) for block_table in block_tables]
            assert all(len(owned) <= claim for (owned, _), claim in zip(tables, claimed, strict=True))
            assert 0 <= pool.num_available == pool.size - sum(claimed) - len(sharers), "room"
            assert pool.num_used == len(owners.keys() | sharers.keys())
        gathered = sum(block_table.max_len for block_table in block_tables)
        assert gathered <= (self.setting.max_gathered or gathered)
        self._check_index()

    def _check_index(self) -> None:
        """Every block that others may find has the text of its name."""
        block_size, index = self.setting.block_size, self.kv_manager.prefix_cache
        assert self.setting.reuse or not (index._full or index._tails)
        for key, block in index._full.items():
            text, at = self._named[key]
            assert self._full[block] == text[at * block_size : (at + 1) * block_size], (
                "a kept block was overwritten"
            )
        for key, blocks in index._tails.items():
            assert key in index._full
            text, at = self._named[key]
            end = (at + 1) * block_size
            begin = end - len(blocks) * block_size
            assert begin <= max(0, end - self.setting.window + 1), "a tail is too short"
            assert [v for block in blocks for v in self._window[block]] == text[begin:end], (
                "a tail was overwritten"
            )

    def _check_plan(self, plan: SchedulerOutput) -> None:
        for request_ids in (
            plan.admitted,
            plan.expired,
            [scheduled.request_id for scheduled in plan.scheduled],
        ):
            assert len(set(request_ids)) == len(request_ids), "planned twice"
        deadlines = {request_id: request.deadline for request_id, (_, request) in self.waiting.items()}
        deadlines |= {request_id: progress.request.deadline for request_id, progress in self.running.items()}
        late = {n for n, deadline in deadlines.items() if deadline is not None and deadline <= self.now}
        assert set(plan.expired) == late, "at the first plan at or behind its deadline, and only then"
        assert not late & {*plan.admitted, *(scheduled.request_id for scheduled in plan.scheduled)}
        patience = self.setting.limits.patience_s
        keys = {n: (at - r.priority * patience, n) for n, (at, r) in self.waiting.items() if n not in late}
        queue = sorted(keys, key=keys.__getitem__)
        assert list(plan.admitted) == queue[: len(plan.admitted)], "somebody was overtaken"
        if len(plan.admitted) < len(queue):
            self.met["waits for memory" if self.scheduler._free_slots else "waits for a slot"] += 1
        if (self.running.keys() - late) or (queue and not self.running):
            assert plan.scheduled, "nobody was brought on"

    def _check_work(self, plan: SchedulerOutput) -> None:
        limits = self.setting.limits
        slots = [progress.slot for progress in self.running.values()]
        assert len(set(slots)) == len(slots), "two have one slot"
        assert set(slots) <= set(range(limits.max_num_seqs))
        scheduled_by_id = {scheduled.request_id: scheduled for scheduled in plan.scheduled}
        reading = [request_id for request_id, progress in self.running.items() if progress.phase is PREFILL]
        assert scheduled_by_id.keys() >= self.running.keys() - set(reading), (
            "canvases and commits take part in every step"
        )
        assert scheduled_by_id.keys() >= set(reading[:1]), "the first prompt is read on"
        assert (
            sum(scheduled_by_id[n].stop - scheduled_by_id[n].start for n in reading if n in scheduled_by_id)
            <= limits.chunk_size
        )
        for request_id, scheduled in scheduled_by_id.items():
            progress = self.running[request_id]
            assert (scheduled.slot, scheduled.phase, scheduled.start) == (
                progress.slot,
                progress.phase,
                progress.length,
            )
            stop = len(progress.text) if scheduled.phase.extends else scheduled.start
            if scheduled.phase is PREFILL and scheduled.stop < stop:
                assert (
                    scheduled.stop % limits.encode_block == 0 or scheduled.stop % self.setting.block_size == 0
                )
                assert scheduled.start < scheduled.stop
            else:
                assert scheduled.stop == stop

    def _let_in(self, request_id: int) -> None:
        _, request = self.waiting.pop(request_id)
        block_table = self.scheduler.block_table(request_id)
        text = numbers_of(request.root, request.tokens)
        assert block_table.num_cached == block_table.length < len(request.tokens)
        self.cached[request_id] = block_table.num_cached
        slot = self.scheduler.slot(request_id)
        self.running[request_id] = Progress(request, slot, block_table.length, block_table.num_cached, text)
        self._name(request_id)
        self.met["found tokens"] += block_table.num_cached
        self.met["branches"] += block_table.branch > block_table.num_cached

    def _compute(self, scheduled: ScheduledSequence, *, fails: bool) -> None:
        progress = self.running[scheduled.request_id]
        if not scheduled.phase.extends:
            progress.steps_done += 1
            if fails:
                self._fail(scheduled)
            elif progress.steps_done == progress.request.num_steps:
                self._go_on(scheduled.request_id)
            return
        block_table = self.scheduler.allocate(scheduled)
        stop = (scheduled.start + scheduled.stop) // 2 if fails else scheduled.stop
        for at in range(scheduled.start, stop):
            index, place = divmod(at, self.setting.block_size)
            assert not self.kv_manager.full.is_shared(block_table.full[index]), (
                "somebody reads what is written"
            )
            self._full[block_table.full[index]][place] = progress.text[at]
            if index in block_table.window:
                assert not self.kv_manager.window.is_shared(block_table.window[index])
                self._window[block_table.window[index]][place] = progress.text[at]
        if fails:
            self._fail(scheduled)
            return
        progress.computed += range(scheduled.start, scheduled.stop)
        progress.length = scheduled.stop
        over = self.scheduler.mark_computed(scheduled)
        assert over == (scheduled.stop == len(progress.text))
        if over and progress.request.num_steps:
            self.scheduler.set_phase(scheduled.request_id, DENOISE)
            progress.phase, progress.steps_done = DENOISE, 0
        elif over:
            self._go_on(scheduled.request_id)

    def _fail(self, scheduled: ScheduledSequence) -> None:
        self.met[f"failed in {scheduled.phase.name}"] += 1
        self._remove(scheduled.request_id, "failed", reusable=False)

    def _go_on(self, request_id: int) -> None:
        """A canvas or a token is chosen: it joins the context, or was the last."""
        progress = self.running[request_id]
        request = progress.request
        if progress.committed == len(request.commits):
            assert progress.computed == list(range(progress.cached, len(progress.text))), "each token once"
            self._remove(request_id, "finished", reusable=True)
            return
        commit = request.commits[progress.committed]
        progress.committed += 1
        progress.text = numbers_of(request.root, request.context)[: len(progress.text) + len(commit)]
        progress.phase = COMMIT
        self.scheduler.set_phase(request_id, COMMIT, commit)
        self._name(request_id)

    def _name(self, request_id: int) -> None:
        text = self.running[request_id].text
        for at, key in enumerate(self.scheduler.block_table(request_id).chain.hashes):
            self._named.setdefault(key, (text, at))

    def _remove(self, request_id: int, why: str, *, reusable: bool) -> None:
        was_waiting = self.scheduler.is_waiting(request_id)
        assert was_waiting == (request_id in self.waiting)
        self.scheduler.remove(request_id, reusable=reusable)
        request = self.waiting.pop(request_id)[1] if was_waiting else self.running.pop(request_id).request
        assert request_id not in self.gone
        self.gone[request_id] = why, request
        self.met[why] += 1

    def _fit(self) -> None:
        for contents, pool in ((self._full, self.kv_manager.full), (self._window, self.kv_manager.window)):
            contents += [[None] * self.setting.block_size for _ in range(pool.size - len(contents))]


def _full_table(block_table: BlockTable) -> tuple[list[int], list[int]]:
    return block_table.full[block_table.num_shared_full :], block_table.full[: block_table.num_shared_full]


def _window_table(block_table: BlockTable) -> tuple[list[int], list[int]]:
    shared = [block_table.window[request_id] for request_id in block_table.shared_window]
    return [
        block
        for request_id, block in block_table.window.items()
        if request_id not in block_table.shared_window
    ], shared
