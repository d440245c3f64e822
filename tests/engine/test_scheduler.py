"""Lives of many requests: nothing lost, nothing computed twice, nobody starves, all is given back.

What every step is checked for stands in `block_contents`.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from block_contents import Life, Request, Setting
from dgemma.engine.block_pool import BlockPool
from dgemma.engine.kv_cache_manager import BlockTable, KVCacheManager
from dgemma.engine.prefix_cache import BlockHashChain
from dgemma.engine.scheduler import COMMIT, DENOISE, PREFILL, QueuedRequest, Scheduler, SchedulerConfig
from random_life import random_request, random_setting, run_life

STABLE = settings(derandomize=True, database=None, deadline=None)
chances = st.randoms(use_true_random=False)


class LivesOfRequests(RuleBasedStateMachine):
    """Whatever comes in whatever order. Hypothesis shrinks what fails."""

    plans = 0  # of all lives together

    @initialize(rng=chances)
    def begin(self, rng: random.Random) -> None:
        self.life = Life(random_setting(rng))

    @rule(rng=chances, count=st.integers(1, 3))
    def requests_come(self, rng: random.Random, count: int) -> None:
        for _ in range(count):
            self.life.submit(random_request(rng, self.life))

    @rule(count=st.integers(1, 8), quarters=st.integers(0, 8))
    def plans_are_computed(self, count: int, quarters: int) -> None:
        for _ in range(count):
            self.life.step(quarters / 4)

    @precondition(lambda self: self.life.running)
    @rule(which=st.integers(0, 5))
    def one_rests(self, which: int) -> None:
        self.life.step(paused=[[*self.life.running][which % len(self.life.running)]])

    @precondition(lambda self: self.life.running)
    @rule(which=st.integers(0, 5))
    def one_fails(self, which: int) -> None:
        self.life.step(failing=[[*self.life.running][which % len(self.life.running)]])

    @precondition(lambda self: self.life.running or self.life.waiting)
    @rule(which=st.integers(0, 20))
    def one_is_cancelled(self, which: int) -> None:
        live = [*self.life.running, *self.life.waiting]
        self.life.cancel(live[which % len(live)])

    @precondition(lambda self: self.life.setting.max_gathered is None)
    @rule(length=st.integers(1, 80))
    def memory_grows(self, length: int) -> None:
        self.life.ensure([length])

    def teardown(self) -> None:
        if hasattr(self, "life"):
            self.life.drain()
            self.life.check_rest()
            LivesOfRequests.plans += self.life.plans


def test_any_life_loses_nothing_repeats_nothing_and_gives_everything_back() -> None:
    LivesOfRequests.plans = 0
    few_long = settings(STABLE, max_examples=120, stateful_step_count=50)
    run_state_machine_as_test(LivesOfRequests, settings=few_long)
    assert LivesOfRequests.plans >= 10_000


def test_long_lives_under_pressure_do_so_too() -> None:
    lives = [run_life(seed, plans=250) for seed in range(40)]
    assert sum(life.plans for life in lives) >= 10_000
    met = sum((life.met for life in lives), Counter[str]())
    # What the lives never met they would not have tested.
    for what, least in {
        "finished": 500,
        "cancelled": 100,
        "expired in the queue": 100,
        "expired in a slot": 20,
        "failed in prefill": 20,
        "failed in denoise": 20,
        "failed in commit": 10,
        "waits for memory": 1000,
        "waits for a slot": 1000,
        "found tokens": 1000,
        "branches": 100,
        "forgotten blocks": 100,
        "forgotten tails": 100,
        "grown": 5,
        "refused": 5,
    }.items():
        assert met[what] >= least, (what, met)


init_chain, add_to_chain = BlockHashChain.__init__, BlockHashChain.add
grow, first_seen = KVCacheManager.extend, KVCacheManager._first_visible
remove = Scheduler.remove


def forget_root(self: BlockHashChain, block_size: int, root: bytes = b"", images: Any = ()) -> None:
    init_chain(self, block_size, images=images)


def forget_what_is_before(self: BlockHashChain, tokens: Sequence[int]) -> None:
    for token in tokens:
        if not self._rest:
            self._last = b""
        add_to_chain(self, [token])


def remember_too_soon(self: KVCacheManager, block_table: BlockTable, length: int) -> None:
    grow(self, block_table, length)
    self.cache_blocks(block_table, tail=True)


def free_what_is_kept(self: BlockPool, block: int) -> None:
    if not self.in_use(block):
        self._free.append(block)


def write_shared_blocks(self: KVCacheManager, block_table: BlockTable, length: int) -> None:
    """Go on in the last block that was found, as if it were one's own."""
    if block_table.full and len(block_table.full) == block_table.num_shared_full:
        block_table.full.append(block_table.full[-1])
    grow(self, block_table, length)


def slide_too_soon(self: KVCacheManager, length: int) -> int:
    return min(first_seen(self, length) + 1, length // self.block_size)


def claim_too_little(self: BlockPool, count: int) -> None:
    self._num_reserved += max(0, count - 1)


def keep_the_claim(self: BlockPool, count: int) -> None:
    pass


def expire_late(self: Scheduler, now: float) -> Iterator[int]:
    for entry in (*self._waiting.values(), *(running.request for running in self._running.values())):
        if entry.deadline is not None and entry.deadline < now:
            yield entry.request_id


def give_a_slot_twice(self: Scheduler, request_id: int, *, reusable: bool = False) -> None:
    slots = [] if self.is_waiting(request_id) else [self.slot(request_id)]
    remove(self, request_id, reusable=reusable)
    self._free_slots += slots


def queue_by_number(queue: list[tuple[float, int]], item: tuple[float, int]) -> None:
    queue.append((0.0, item[1]))
    queue.sort()


MUTANTS: list[tuple[object, str, Callable[..., object], str]] = [
    (BlockHashChain, "__init__", forget_root, "overwritten"),
    (BlockHashChain, "add", forget_what_is_before, "overwritten"),
    (KVCacheManager, "extend", remember_too_soon, "a kept block was overwritten"),
    (KVCacheManager, "extend", write_shared_blocks, "somebody reads what is written"),
    (KVCacheManager, "_first_visible", slide_too_soon, "too short|too soon"),
    (BlockPool, "_free_if_unreferenced", free_what_is_kept, "free blocks"),
    (BlockPool, "reserve", claim_too_little, "room|more blocks than were reserved"),
    (BlockPool, "unreserve", keep_the_claim, "room"),
    (Scheduler, "_expired", expire_late, "at or behind its deadline"),
    (Scheduler, "remove", give_a_slot_twice, "two have one slot"),
    (heapq, "heappush", queue_by_number, "somebody was overtaken"),
]


@pytest.mark.parametrize(
    ("where", "name", "mutant", "message"), MUTANTS, ids=[mutant.__name__ for _, _, mutant, _ in MUTANTS]
)
def test_the_checks_can_fail(where: object, name: str, mutant: Callable[..., object], message: str) -> None:
    def lives() -> None:
        for seed in range(20):
            run_life(seed, plans=60)

    with mock.patch.object(where, name, mutant), pytest.raises(AssertionError, match=message):
        lives()


def roomy(limits: SchedulerConfig, *, full_blocks: int = 64) -> Life:
    return Life(Setting(limits=limits, full_blocks=full_blocks, window_blocks=64))


@settings(STABLE, max_examples=25)
@given(
    above=st.integers(1, 3),
    patience=st.integers(1, 5),
    slots=st.integers(1, 3),
    num_steps=st.integers(1, 3),
    backlog=st.integers(0, 4),
    rush=st.integers(1, 2),
)
def test_no_request_starves_after_a_stream_of_higher_priorities(
    above: int, patience: int, slots: int, num_steps: int, backlog: int, rush: int
) -> None:
    """The bound: one of priority p that came at t is overtaken only by those of priority q that came before
    t + (q - p) * patience_s. With one plan a second and `rush` arrivals before each that is no more than
    rush * (q - p) * patience_s of them; each has a slot for 1 + looks plans.
    """
    life = roomy(SchedulerConfig(max_num_seqs=slots, chunk_size=1000, encode_block=1, patience_s=patience))
    for _ in range(backlog):
        life.submit(Request(tokens=[1, 2, 3], num_steps=num_steps))
    low = life.submit(Request(tokens=[1, 2, 3], num_steps=num_steps))
    assert low is not None
    soon = above * patience
    max_plans = 1 + (backlog + rush * soon) // slots * (1 + num_steps)
    came: dict[int, float] = {}
    admitted: list[int] = []
    while low not in admitted:
        for _ in range(rush):
            request_id = life.submit(Request(tokens=[4, 5], num_steps=num_steps, priority=above))
            assert request_id is not None
            came[request_id] = life.now
        admitted += life.step(1.0).admitted
        assert life.plans <= max_plans
    before = admitted[: admitted.index(low)]
    assert all(came[request_id] < soon for request_id in before if request_id in came)
    assert len(before) <= backlog + rush * soon


def test_the_bound_is_patience_and_nothing_else() -> None:
    life = roomy(SchedulerConfig(max_num_seqs=1, chunk_size=10, encode_block=1, patience_s=1e6))
    low = life.submit(Request(tokens=[1]))
    for _ in range(100):
        life.submit(Request(tokens=[2], priority=1))
        assert low not in life.step().admitted


def test_equal_priorities_are_let_in_in_the_order_they_came() -> None:
    life = roomy(SchedulerConfig(max_num_seqs=1, chunk_size=10, encode_block=1))
    request_ids = [life.submit(Request(tokens=[1])) for _ in range(5)]
    admitted = [request_id for _ in range(10) for request_id in life.step(0).admitted]
    assert admitted == request_ids


def test_a_higher_priority_is_sooner_and_a_lower_one_later() -> None:
    life = roomy(SchedulerConfig(max_num_seqs=1, chunk_size=10, encode_block=1))
    for priority in (0, -1, 2, 1):
        life.submit(Request(tokens=[1], priority=priority))
    assert [request_id for _ in range(8) for request_id in life.step(0).admitted] == [2, 3, 0, 1]


def test_a_large_request_is_not_overtaken_by_small_ones_for_which_there_is_room() -> None:
    life = roomy(SchedulerConfig(max_num_seqs=4, chunk_size=100, encode_block=1), full_blocks=10)
    life.submit(Request(tokens=[1] * 19, num_steps=3))
    life.step()
    large = life.submit(Request(tokens=[2] * 30))
    small = life.submit(Request(tokens=[3]))
    for _ in range(3):
        assert life.step().admitted == ()
    assert life.step().admitted == (large, small)


def test_a_deadline_is_kept_at_the_first_plan_at_or_after_it() -> None:
    life = roomy(SchedulerConfig(max_num_seqs=1, chunk_size=10, encode_block=1))
    first = life.submit(Request(tokens=[1], num_steps=50, deadline=3.0))
    second = life.submit(Request(tokens=[2], deadline=2.0))
    third = life.submit(Request(tokens=[3]))
    assert life.step().expired == ()
    assert life.step().expired == (second,), "also one that still waits"
    plan = life.step()
    assert plan.expired == (first,)
    assert not plan.scheduled
    assert life.step().admitted == (third,), "the slot is free for the next plan"


def test_who_is_late_before_it_was_let_in_is_never_let_in() -> None:
    life = roomy(SchedulerConfig(max_num_seqs=1, chunk_size=10, encode_block=1))
    late = life.submit(Request(tokens=[1], deadline=0.5))
    other = life.submit(Request(tokens=[2]))
    plan = life.step()
    assert plan.expired == (late,)
    assert plan.admitted == (other,)


def test_an_expired_request_is_reported_until_it_is_removed() -> None:
    scheduler = Scheduler(
        KVCacheManager(block_size=4, window=5, full_blocks=8, window_blocks=8),
        SchedulerConfig(max_num_seqs=1, chunk_size=8, encode_block=1),
    )
    scheduler.add(QueuedRequest(request_id=7, tokens=[1], max_len=1, deadline=1.0), 0.0)
    assert scheduler.schedule(1.0).expired == scheduler.schedule(1.0).expired == (7,)
    assert scheduler.num_waiting == 1
    scheduler.remove(7)
    assert scheduler.schedule(1.0).expired == ()
    assert scheduler.num_waiting == scheduler.num_running == 0


def spans(life: Life) -> list[tuple[int, int, int]]:
    return [
        (scheduled.request_id, scheduled.start, scheduled.stop)
        for scheduled in life.step().scheduled
        if scheduled.phase is PREFILL
    ]


def test_prompts_share_a_budget_in_the_order_in_which_they_came_in() -> None:
    life = roomy(SchedulerConfig(max_num_seqs=3, chunk_size=8, encode_block=2))
    for token, length in enumerate((9, 5, 7)):
        life.submit(Request(tokens=[token] * length, num_steps=50))
    assert spans(life) == [(0, 0, 8)]
    assert spans(life) == [(0, 8, 9), (1, 0, 5), (2, 0, 2)]
    assert spans(life) == [(2, 2, 7)]


def test_canvases_and_commits_take_no_budget() -> None:
    life = roomy(SchedulerConfig(max_num_seqs=3, chunk_size=4, encode_block=4))
    life.submit(Request(tokens=[1] * 4, commits=[[5] * 6], num_steps=1))
    life.step()
    life.submit(Request(tokens=[2] * 12))
    phases = [
        {
            scheduled.request_id: (scheduled.phase, scheduled.stop - scheduled.start)
            for scheduled in life.step().scheduled
        }
        for _ in range(3)
    ]
    assert phases == [
        {0: (DENOISE, 0), 1: (PREFILL, 4)},
        {0: (COMMIT, 6), 1: (PREFILL, 4)},
        {0: (DENOISE, 0), 1: (PREFILL, 4)},
    ]


def test_chunks_end_at_blocks_and_where_others_may_go_on() -> None:
    life = roomy(SchedulerConfig(max_num_seqs=1, chunk_size=10, encode_block=4))
    life.submit(Request(tokens=[1] * 30, turns=[14, 3, 30]))
    ends = [stop for _ in range(5) for _, _, stop in spans(life)]
    assert ends == [8, 12, 20, 28, 30], "a turn that ends in block 3 ends for others with block 2"


def test_what_can_never_be_let_in_is_not_queued() -> None:
    scheduler = Scheduler(
        KVCacheManager(block_size=4, window=5, full_blocks=8, window_blocks=8),
        SchedulerConfig(max_num_seqs=1, chunk_size=8, encode_block=1),
    )
    with pytest.raises(AssertionError):
        scheduler.add(QueuedRequest(request_id=0, tokens=[1], max_len=33), 0.0)
    scheduler.add(QueuedRequest(request_id=0, tokens=[1], max_len=32), 0.0)
    with pytest.raises(AssertionError):
        scheduler.add(QueuedRequest(request_id=0, tokens=[1], max_len=1), 0.0)


def test_a_slot_is_kept_for_life_and_then_given_to_the_next() -> None:
    life = roomy(SchedulerConfig(max_num_seqs=2, chunk_size=10, encode_block=1))
    first, second = (
        life.submit(Request(tokens=[1], num_steps=9)),
        life.submit(Request(tokens=[2], num_steps=1)),
    )
    life.submit(Request(tokens=[3], num_steps=9))
    slots = [{scheduled.request_id: scheduled.slot for scheduled in life.step().scheduled} for _ in range(3)]
    assert slots == [{first: 0, second: 1}, {first: 0, second: 1}, {first: 0, 2: 1}]


# Tenants


def queued(number: int, tenant: str, *, limit: int | None = None, tokens: int = 4) -> QueuedRequest:
    return QueuedRequest(
        request_id=number, tokens=[1] * tokens, max_len=tokens, tenant=tenant, max_tenant_seqs=limit
    )


def shared_scheduler(slots: int, chunk_size: int = 64, *, rows_add_up: bool = False) -> Scheduler:
    manager = KVCacheManager(block_size=4, window=8, full_blocks=64, window_blocks=64)
    config = SchedulerConfig(
        max_num_seqs=slots, chunk_size=chunk_size, encode_block=4, rows_add_up=rows_add_up
    )
    return Scheduler(manager, config)


def prefilled(scheduler: Scheduler, now: float) -> list[tuple[int, int, int]]:
    """Plan and compute a step -> what it reads of which prompt."""
    plan = scheduler.schedule(now).scheduled
    for scheduled in plan:
        scheduler.allocate(scheduled)
        scheduler.mark_computed(scheduled)
    return [(scheduled.request_id, scheduled.start, scheduled.stop) for scheduled in plan]


def test_a_tenant_with_many_requests_leaves_half_of_the_slots_to_another() -> None:
    scheduler = shared_scheduler(4)
    for number in range(10):
        scheduler.add(queued(number, "greedy"), float(number))
    for number in (20, 21, 22):
        scheduler.add(queued(number, "modest"), 100.0)
    assert scheduler.schedule(200.0).admitted == (0, 20, 1, 21)
    # A slot that becomes free goes to the tenant with fewer, not to the one that waits longer.
    scheduler.remove(20)
    assert scheduler.schedule(201.0).admitted == (22,)
    scheduler.remove(0)
    assert scheduler.schedule(202.0).admitted == (2,)  # the modest one wants no more
    assert scheduler.num_waiting_of("greedy") == 7
    assert scheduler.num_waiting_of("modest") == 0


def test_a_tenants_long_prompt_does_not_hold_up_anothers() -> None:
    """They take turns where the budget is for one of them."""
    scheduler = shared_scheduler(3, chunk_size=4)
    scheduler.add(queued(0, "long", tokens=20), 0.0)
    scheduler.add(queued(1, "long", tokens=8), 0.0)
    assert prefilled(scheduler, 1.0) == [(0, 0, 4)]
    assert prefilled(scheduler, 2.0) == [(0, 4, 8)]
    scheduler.add(queued(2, "other", tokens=9), 2.0)
    assert prefilled(scheduler, 3.0) == [(2, 0, 4)]
    assert prefilled(scheduler, 4.0) == [(0, 8, 12)]  # within a tenant in the order of admission
    assert prefilled(scheduler, 5.0) == [(2, 4, 8)]
    assert prefilled(scheduler, 6.0) == [(0, 12, 16)]
    assert prefilled(scheduler, 7.0) == [(2, 8, 9)]


def denoised(scheduler: Scheduler, now: float = 0.0) -> list[int]:
    """Plan a step of canvases -> whose."""
    for scheduled in (plan := scheduler.schedule(now).scheduled):
        if scheduled.phase is PREFILL:
            scheduler.allocate(scheduled)
            scheduler.mark_computed(scheduled)
            scheduler.set_phase(scheduled.request_id, DENOISE)
    return [scheduled.request_id for scheduled in plan]


def test_where_rows_add_up_a_tenant_that_has_had_much_leaves_every_second_step() -> None:
    scheduler = shared_scheduler(4, rows_add_up=True)
    scheduler.add(queued(0, "heavy"), 0.0)
    scheduler.add(queued(1, "heavy"), 0.0)
    assert [denoised(scheduler) for _ in range(20)] == [[0, 1]] * 20, "alone it leaves none"
    scheduler.add(queued(2, "light"), 0.0)
    steps = [denoised(scheduler) for _ in range(10)]
    assert sorted(map(tuple, steps)) == [(0, 1, 2)] * 5 + [(2,)] * 5
    assert steps[0] != steps[1]
    # Once it has had about as much, they share every step; and nobody is held to what was long ago.
    steps = [denoised(scheduler) for _ in range(200)]
    assert steps[-2:] == [[0, 1, 2]] * 2
    scheduler.remove(2)
    assert denoised(scheduler) == [0, 1]
    assert denoised(scheduler) == [0, 1]


def test_what_a_tenant_has_had_is_forgotten() -> None:
    scheduler = shared_scheduler(4, rows_add_up=True)
    scheduler.add(queued(0, "heavy"), 0.0)
    for _ in range(50):
        denoised(scheduler)
    scheduler.remove(0)
    for now in range(0, 600, 31):
        denoised(scheduler, float(now))
    assert scheduler._rows == {}
    scheduler.add(queued(1, "heavy"), 600.0)
    scheduler.add(queued(2, "light"), 600.0)
    assert [denoised(scheduler, 600.0) for _ in range(4)] == [[1, 2]] * 4


def test_tenants_that_have_had_as_much_share_every_step() -> None:
    scheduler = shared_scheduler(4, rows_add_up=True)
    scheduler.add(queued(0, "a"), 0.0)
    scheduler.add(queued(1, "b"), 0.0)
    assert [denoised(scheduler) for _ in range(50)] == [[0, 1]] * 50


def test_where_rows_share_a_step_every_tenant_is_in_every_step() -> None:
    scheduler = shared_scheduler(4)
    scheduler.add(queued(0, "heavy"), 0.0)
    for _ in range(20):
        denoised(scheduler)
    scheduler.add(queued(1, "light"), 0.0)
    assert [denoised(scheduler) for _ in range(4)] == [[0, 1]] * 4


def test_what_one_tenant_leaves_of_the_budget_is_the_others() -> None:
    scheduler = shared_scheduler(3, chunk_size=12)
    scheduler.add(queued(0, "long", tokens=40), 0.0)
    assert prefilled(scheduler, 1.0) == [(0, 0, 12)]
    scheduler.add(queued(1, "other", tokens=4), 1.0)
    assert prefilled(scheduler, 2.0) == [(0, 12, 20), (1, 0, 4)]


def test_a_tenant_alone_uses_every_slot() -> None:
    scheduler = shared_scheduler(3)
    for number in range(5):
        scheduler.add(queued(number, "greedy"), float(number))
    assert scheduler.schedule(9.0).admitted == (0, 1, 2)


def test_a_tenants_limit_is_kept_and_does_not_hold_up_others() -> None:
    scheduler = shared_scheduler(4)
    for number in range(4):
        scheduler.add(queued(number, "limited", limit=2), float(number))
    assert scheduler.schedule(9.0).admitted == (0, 1)
    scheduler.add(queued(9, "other"), 10.0)
    assert scheduler.schedule(11.0).admitted == (9,)
    scheduler.remove(1)
    assert scheduler.schedule(12.0).admitted == (2,)


def test_counts_of_waiting_requests_follow_every_way_out_of_the_queue() -> None:
    scheduler = shared_scheduler(1)
    for number in range(3):
        scheduler.add(queued(number, "a"), float(number))
    assert scheduler.num_waiting_of("a") == 3
    scheduler.remove(2)  # cancelled before it began
    assert scheduler.num_waiting_of("a") == 2
    scheduler.schedule(5.0)
    assert scheduler.num_waiting_of("a") == 1
    scheduler.remove(0)
    scheduler.schedule(6.0)
    assert scheduler.num_waiting_of("a") == 0


def scheduler_of(*, chunk_size: int = 16, slots: int = 4) -> tuple[Scheduler, KVCacheManager]:
    memory = KVCacheManager(block_size=4, window=8, full_blocks=64, window_blocks=32)
    limits = SchedulerConfig(max_num_seqs=slots, chunk_size=chunk_size, encode_block=8)
    return Scheduler(memory, limits), memory


def compute(scheduler: Scheduler) -> dict[int, tuple[int, int, bool]]:
    """One step -> start, stop and whether it is the last chunk, by request."""
    scheduled = scheduler.schedule(0.0).scheduled
    for part in scheduled:
        if part.phase.extends:
            scheduler.allocate(part)
            scheduler.mark_computed(part)
    return {part.request_id: (part.start, part.stop, part.is_last) for part in scheduled}


def test_a_chunk_takes_its_own_tokens_from_the_budget_and_not_those_before_it() -> None:
    """The second chunk of a prompt leaves the others as much as its first chunk did."""
    scheduler, _ = scheduler_of(chunk_size=16)
    scheduler.add(QueuedRequest(request_id=0, tokens=range(100, 122), max_len=40), 0.0)
    assert compute(scheduler) == {0: (0, 16, False)}
    scheduler.add(QueuedRequest(request_id=1, tokens=range(200, 210), max_len=40), 0.0)
    # 6 tokens finish the first prompt. Of the 10 that are left the second one takes all it has.
    assert compute(scheduler) == {0: (16, 22, True), 1: (0, 10, True)}


def test_the_last_chunk_is_marked_and_a_canvas_has_none() -> None:
    scheduler, _ = scheduler_of(chunk_size=8)
    scheduler.add(QueuedRequest(request_id=0, tokens=range(100, 117), max_len=40), 0.0)
    assert [compute(scheduler)[0] for _ in range(3)] == [(0, 8, False), (8, 16, False), (16, 17, True)]
    scheduler.set_phase(0, DENOISE)
    assert compute(scheduler) == {0: (17, 17, False)}
    scheduler.set_phase(0, COMMIT, [1, 2, 3])
    assert compute(scheduler) == {0: (17, 20, True)}


def test_a_request_that_names_no_priority_has_priority_0() -> None:
    scheduler, _ = scheduler_of(slots=1)
    for number, options in enumerate(({"priority": 0}, {}, {"priority": 0})):
        scheduler.add(QueuedRequest(request_id=number, tokens=[1], max_len=4, **options), float(number))
    order = []
    for _ in range(3):
        order += scheduler.schedule(0.0).admitted
        scheduler.remove(order[-1])
    assert order == [0, 1, 2]


@pytest.mark.parametrize(("options", "tails"), [({}, 1), ({"reusable": True}, 2)])
def test_only_a_request_that_is_removed_as_reusable_leaves_its_end_behind(
    options: dict[str, bool], tails: int
) -> None:
    scheduler, memory = scheduler_of()
    scheduler.add(QueuedRequest(request_id=0, tokens=range(100, 105), max_len=40), 0.0)
    compute(scheduler)
    scheduler.set_phase(0, COMMIT, range(7))
    compute(scheduler)
    assert memory.prefix_cache.num_tails == 1, "the end of the prompt"
    scheduler.remove(0, **options)
    assert memory.prefix_cache.num_tails == tails
