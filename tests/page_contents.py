"""The engine without tensors: a page holds, in place of keys and values, a number for each of its tokens.

The number stands for the adapter and all text up to the token, as keys and values depend on both. A `Life`
drives a scheduler and a memory as the engine does and checks every step of it: what is planned, what lies in
the pages that a step is about to read, and who has which page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from dgemma.engine.memory import Holding, Memory
from dgemma.engine.prefix import Key
from dgemma.engine.scheduler import COMMIT, DENOISE, PREFILL, Entry, Limits, Phase, Plan, Scheduler, Work


@dataclass(frozen=True, kw_only=True)
class Setting:
    limits: Limits
    page_len: int = 4
    window: int = 5
    full_pages: int = 32
    window_pages: int = 16
    most_gathered: int | None = None
    reuse: bool = True


@dataclass(frozen=True, kw_only=True)
class Request:
    tokens: Sequence[int]
    commits: Sequence[Sequence[int]] = ()  # what joins the context later; behind it one canvas more
    looks: int = 1  # steps of a canvas; 0: token by token, no canvas
    spare: int = 0  # tokens it might have written and does not
    root: bytes = b""
    turns: Sequence[int] = ()
    priority: int = 0
    deadline: float | None = None

    @property
    def most_tokens(self) -> int:
        return len(self.tokens) + sum(map(len, self.commits)) + self.spare

    @property
    def context(self) -> list[int]:
        return [*self.tokens, *(token for commit in self.commits for token in commit)]

    @property
    def most_plans(self) -> int:
        """Computed alone, one token at a time, it would be ready after so many."""
        return self.most_tokens + (len(self.commits) + 1) * self.looks + 2


@dataclass
class Progress:
    """What we know of a request that is in, apart from what the scheduler thinks."""

    request: Request
    slot: int
    length: int
    cached: int
    text: list[int]  # for each token of its context, the number in the pages
    phase: Phase = PREFILL
    computed: list[int] = field(default_factory=list)  # positions
    committed: int = 0
    looked: int = 0


def numbers_of(root: bytes, tokens: Sequence[int]) -> list[int]:
    found, last = [], hash(tuple(root))
    for token in tokens:
        last = hash((last, token))
        found.append(last)
    return found


class Life:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.memory = Memory(
            page_len=setting.page_len,
            window=setting.window,
            full_pages=setting.full_pages,
            window_pages=setting.window_pages,
            most_gathered=setting.most_gathered,
            reuse=setting.reuse,
        )
        self.scheduler = Scheduler(self.memory, setting.limits)
        self.now = 0.0
        self.plans = 0
        self.met: Counter[str] = Counter()
        self.waiting: dict[int, tuple[float, Request]] = {}  # with the time of arrival
        self.running: dict[int, Progress] = {}
        self.gone: dict[int, tuple[str, Request]] = {}  # how it ended
        self.cached: dict[int, int] = {}
        self._full: list[list[int | None]] = []
        self._window: list[list[int | None]] = []
        self._named: dict[Key, tuple[list[int], int]] = {}  # the text a key stands for, and which page of it
        self._next = 0
        self._fit()

    def submit(self, request: Request) -> int | None:
        """-> Its number; None if there could never be room."""
        if not self.memory.fits(request.most_tokens):
            return None
        number, self._next = self._next, self._next + 1
        entry = Entry(
            number=number,
            tokens=request.tokens,
            most_tokens=request.most_tokens,
            root=request.root,
            turns=request.turns,
            priority=request.priority,
            deadline=request.deadline,
        )
        self.scheduler.add(entry, self.now)
        self.waiting[number] = self.now, request
        return number

    def cancel(self, number: int) -> None:
        self._remove(number, "cancelled", reusable=False)

    def ensure(self, lengths: Sequence[int]) -> None:
        self.memory.ensure(lengths)
        self._fit()
        self.check_ledger()

    def step(
        self, seconds: float = 1.0, *, paused: Collection[int] = (), failing: Collection[int] = ()
    ) -> Plan:
        """paused: not computed although planned. failing: removed in the midst of writing what they got."""
        known, tails = set(self.memory.index._full), set(self.memory.index._tails)
        self.now += seconds
        self.plans += 1
        plan = self.scheduler.plan(self.now)
        self._check_plan(plan)
        for number in plan.expired:
            self.met["expired in the queue" if number in self.waiting else "expired in a slot"] += 1
            self._remove(number, "expired", reusable=True)
        for number in plan.admitted:
            self._let_in(number)
        self._check_work(plan)
        by_root: dict[bytes, list[Work]] = {}
        for work in plan.work:
            if work.number not in paused:
                by_root.setdefault(self.running[work.number].request.root, []).append(work)
        for group in by_root.values():
            for work in group:
                self.check_pages(work.number)
            for work in group:
                self._compute(work, fails=work.number in failing)
        self.check_ledger()
        self.met["forgotten pages"] += len(known - set(self.memory.index._full))
        self.met["forgotten tails"] += len(tails - set(self.memory.index._tails))
        return plan

    def drain(self) -> None:
        """Until everybody is gone. Every plan brings somebody on, so there is a bound."""
        live = [request for _, request in self.waiting.values()]
        live += [progress.request for progress in self.running.values()]
        bound = sum(request.most_plans for request in live)
        begin = self.plans
        while self.waiting or self.running:
            self.step()
            assert self.plans - begin <= bound, "somebody is never ready"

    def check_rest(self) -> None:
        """Everybody is gone: nothing was lost, and all is given back."""
        assert sorted(self.gone) == list(range(self._next))
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0
        assert sorted(self.scheduler._slots) == list(range(self.setting.limits.slots))
        assert self.memory._gathered == 0
        for pool in (self.memory.full, self.memory.window):
            assert pool.room == pool.size
            assert pool.num_used == 0
            kept = sum(1 for count in pool._keepers if count)
            assert kept + pool.num_free == pool.size
        self.check_ledger()

    def check_pages(self, number: int) -> None:
        """What a step is about to read: the whole text in full pages, the window in the others."""
        progress, holding = self.running[number], self.scheduler.holding(number)
        page_len, length = self.setting.page_len, progress.length
        assert holding.length == length
        written = [value for page in holding.full for value in self._full[page]]
        assert written[:length] == progress.text[:length], f"{number}: full pages were overwritten"
        for at in range(max(0, length - self.setting.window + 1), length):
            assert at // page_len in holding.window, f"{number}: {at} slid out too soon"
            value = self._window[holding.window[at // page_len]][at % page_len]
            assert value == progress.text[at], f"{number}: the window was overwritten at {at}"

    def check_ledger(self) -> None:
        """Who has which page, counted anew from holdings and index, is what the pools think."""
        memory, holdings = self.memory, [self.scheduler.holding(number) for number in self.running]
        index = memory.index
        tails = [page for pages in index._tails.values() for page in pages]
        for pool, kept, tables, claims in (
            (memory.full, [*index._full.values()], [*map(_full_table, holdings)], "full_claim"),
            (memory.window, tails, [*map(_window_table, holdings)], "window_claim"),
        ):
            owners = Counter(page for owned, _ in tables for page in owned)
            sharers = Counter(page for _, shared in tables for page in shared)
            keepers, pages = Counter(kept), range(pool.size)
            assert max(owners.values(), default=0) <= 1, "a page has two owners"
            assert pool._owned == [owners[page] == 1 for page in pages]
            assert pool._sharers == [sharers[page] for page in pages]
            assert pool._keepers == [keepers[page] for page in pages]
            wanted = owners.keys() | sharers.keys() | keepers.keys()
            assert sorted(pool._free) == [page for page in pages if page not in wanted], "free pages"
            claimed = [getattr(holding, claims) for holding in holdings]
            assert all(len(owned) <= claim for (owned, _), claim in zip(tables, claimed, strict=True))
            assert 0 <= pool.room == pool.size - sum(claimed) - len(sharers), "room"
            assert pool.num_used == len(owners.keys() | sharers.keys())
        gathered = sum(holding.most_tokens for holding in holdings)
        assert gathered <= (self.setting.most_gathered or gathered)
        self._check_index()

    def _check_index(self) -> None:
        """Every page that others may find has the text of its name."""
        page_len, index = self.setting.page_len, self.memory.index
        assert self.setting.reuse or not (index._full or index._tails)
        for key, page in index._full.items():
            text, at = self._named[key]
            assert self._full[page] == text[at * page_len : (at + 1) * page_len], (
                "a kept page was overwritten"
            )
        for key, pages in index._tails.items():
            assert key in index._full
            text, at = self._named[key]
            end = (at + 1) * page_len
            begin = end - len(pages) * page_len
            assert begin <= max(0, end - self.setting.window + 1), "a tail is too short"
            assert [v for page in pages for v in self._window[page]] == text[begin:end], (
                "a tail was overwritten"
            )

    def _check_plan(self, plan: Plan) -> None:
        for numbers in (plan.admitted, plan.expired, [work.number for work in plan.work]):
            assert len(set(numbers)) == len(numbers), "planned twice"
        deadlines = {number: request.deadline for number, (_, request) in self.waiting.items()}
        deadlines |= {number: progress.request.deadline for number, progress in self.running.items()}
        late = {n for n, deadline in deadlines.items() if deadline is not None and deadline <= self.now}
        assert set(plan.expired) == late, "at the first plan at or behind its deadline, and only then"
        assert not late & {*plan.admitted, *(work.number for work in plan.work)}
        patience = self.setting.limits.patience_s
        keys = {n: (at - r.priority * patience, n) for n, (at, r) in self.waiting.items() if n not in late}
        queue = sorted(keys, key=keys.__getitem__)
        assert list(plan.admitted) == queue[: len(plan.admitted)], "somebody was overtaken"
        if len(plan.admitted) < len(queue):
            self.met["waits for memory" if self.scheduler._slots else "waits for a slot"] += 1
        if (self.running.keys() - late) or (queue and not self.running):
            assert plan.work, "nobody was brought on"

    def _check_work(self, plan: Plan) -> None:
        limits = self.setting.limits
        slots = [progress.slot for progress in self.running.values()]
        assert len(set(slots)) == len(slots), "two have one slot"
        assert set(slots) <= set(range(limits.slots))
        works = {work.number: work for work in plan.work}
        reading = [number for number, progress in self.running.items() if progress.phase is PREFILL]
        assert works.keys() >= self.running.keys() - set(reading), (
            "canvases and commits take part in every step"
        )
        assert works.keys() >= set(reading[:1]), "the first prompt is read on"
        assert sum(works[n].stop - works[n].start for n in reading if n in works) <= limits.piece
        for number, work in works.items():
            progress = self.running[number]
            assert (work.slot, work.phase, work.start) == (progress.slot, progress.phase, progress.length)
            stop = len(progress.text) if work.phase.extends else work.start
            if work.phase is PREFILL and work.stop < stop:
                assert work.stop % limits.block == 0 or work.stop % self.setting.page_len == 0
                assert work.start < work.stop
            else:
                assert work.stop == stop

    def _let_in(self, number: int) -> None:
        _, request = self.waiting.pop(number)
        holding = self.scheduler.holding(number)
        text = numbers_of(request.root, request.tokens)
        assert holding.cached == holding.length < len(request.tokens)
        self.cached[number] = holding.cached
        slot = self.scheduler.slot(number)
        self.running[number] = Progress(request, slot, holding.length, holding.cached, text)
        self._name(number)
        self.met["found tokens"] += holding.cached
        self.met["branches"] += holding.branch > holding.cached

    def _compute(self, work: Work, *, fails: bool) -> None:
        progress = self.running[work.number]
        if not work.phase.extends:
            progress.looked += 1
            if fails:
                self._fail(work)
            elif progress.looked == progress.request.looks:
                self._go_on(work.number)
            return
        holding = self.scheduler.make_room(work)
        stop = (work.start + work.stop) // 2 if fails else work.stop
        for at in range(work.start, stop):
            number, place = divmod(at, self.setting.page_len)
            assert not self.memory.full.is_shared(holding.full[number]), "somebody reads what is written"
            self._full[holding.full[number]][place] = progress.text[at]
            if number in holding.window:
                assert not self.memory.window.is_shared(holding.window[number])
                self._window[holding.window[number]][place] = progress.text[at]
        if fails:
            self._fail(work)
            return
        progress.computed += range(work.start, work.stop)
        progress.length = work.stop
        over = self.scheduler.wrote(work)
        assert over == (work.stop == len(progress.text))
        if over and progress.request.looks:
            self.scheduler.enter(work.number, DENOISE)
            progress.phase, progress.looked = DENOISE, 0
        elif over:
            self._go_on(work.number)

    def _fail(self, work: Work) -> None:
        self.met[f"failed in {work.phase.name}"] += 1
        self._remove(work.number, "failed", reusable=False)

    def _go_on(self, number: int) -> None:
        """A canvas or a token is chosen: it joins the context, or was the last."""
        progress = self.running[number]
        request = progress.request
        if progress.committed == len(request.commits):
            assert progress.computed == list(range(progress.cached, len(progress.text))), "each token once"
            self._remove(number, "finished", reusable=True)
            return
        commit = request.commits[progress.committed]
        progress.committed += 1
        progress.text = numbers_of(request.root, request.context)[: len(progress.text) + len(commit)]
        progress.phase = COMMIT
        self.scheduler.enter(number, COMMIT, commit)
        self._name(number)

    def _name(self, number: int) -> None:
        text = self.running[number].text
        for at, key in enumerate(self.scheduler.holding(number).chain.keys):
            self._named.setdefault(key, (text, at))

    def _remove(self, number: int, why: str, *, reusable: bool) -> None:
        was_waiting = self.scheduler.is_waiting(number)
        assert was_waiting == (number in self.waiting)
        self.scheduler.remove(number, reusable=reusable)
        request = self.waiting.pop(number)[1] if was_waiting else self.running.pop(number).request
        assert number not in self.gone
        self.gone[number] = why, request
        self.met[why] += 1

    def _fit(self) -> None:
        for contents, pool in ((self._full, self.memory.full), (self._window, self.memory.window)):
            contents += [[None] * self.setting.page_len for _ in range(pool.size - len(contents))]


def _full_table(holding: Holding) -> tuple[list[int], list[int]]:
    return holding.full[holding.shared_full :], holding.full[: holding.shared_full]


def _window_table(holding: Holding) -> tuple[list[int], list[int]]:
    shared = [holding.window[number] for number in holding.shared_window]
    return [page for number, page in holding.window.items() if number not in holding.shared_window], shared
