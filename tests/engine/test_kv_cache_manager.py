"""What was read once is found again, and no more than that; growing keeps all; who fits is let in."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from block_contents import Life, Request, Setting
from dgemma.engine.kv_cache_manager import BlockTable, KVCacheManager, max_window_blocks
from dgemma.engine.prefix_cache import BlockHashChain
from dgemma.engine.scheduler import SchedulerConfig
from random_life import live_on, random_setting

STABLE = settings(derandomize=True, database=None, deadline=None)


def new_life(**changes: Any) -> Life:
    """Blocks of 4 tokens, a window of 5: a tail is one block."""
    plain = {
        "limits": SchedulerConfig(max_num_seqs=2, chunk_size=64, encode_block=1),
        "window": 5,
        "full_blocks": 32,
        "window_blocks": 24,
    }
    return Life(Setting(**{**plain, **changes}))


def found(life: Life, request: Request) -> int:
    """How many of its tokens were not computed, once it is finished."""
    request_id = life.submit(request)
    assert request_id is not None
    life.drain()
    assert life.gone[request_id][0] == "finished"
    return life.cached[request_id]


def text(begin: int, length: int) -> list[int]:
    return list(range(begin, begin + length))


LENGTHS = range(1, 19)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_same_prompt_again_is_computed_only_after_its_last_whole_block(length: int) -> None:
    life = new_life()
    same = Request(tokens=text(0, length))
    assert found(life, same) == 0
    # The last token is computed in any case.
    assert found(life, same) == (length - 1) // 4 * 4
    assert found(life, same) == (length - 1) // 4 * 4


def test_the_next_turn_goes_on_after_the_answer() -> None:
    life = new_life()
    first = Request(tokens=text(0, 10), commits=[text(50, 4)])
    assert found(life, first) == 0
    assert found(life, Request(tokens=first.context + text(70, 5))) == 12


def test_the_next_turn_goes_on_after_the_prompt_if_the_answer_is_read_otherwise() -> None:
    life = new_life()
    first = Request(tokens=text(0, 10), commits=[text(50, 4)])
    assert found(life, first) == 0
    assert found(life, Request(tokens=[*first.tokens, *text(80, 9)])) == 8


def test_a_turn_within_a_prompt_is_where_others_go_on() -> None:
    life = new_life()
    assert found(life, Request(tokens=text(0, 20), turns=[9])) == 0
    assert found(life, Request(tokens=text(0, 9) + text(60, 9))) == 8


def test_tails_are_kept_only_where_a_turn_a_prompt_or_an_answer_ends() -> None:
    life = new_life(limits=SchedulerConfig(max_num_seqs=2, chunk_size=4, encode_block=4))
    assert found(life, Request(tokens=text(0, 26), turns=[9], commits=[text(50, 8)] * 2)) == 0
    index = life.kv_manager.prefix_cache
    keys = chain_of(text(0, 26) + text(50, 8) * 2).hashes
    assert [count for count, key in enumerate(keys, 1) if key in index._tails] == [9 // 4, 26 // 4, 42 // 4]
    assert index.num_tails == 3


def test_of_prompts_that_differ_at_their_end_the_third_goes_on_from_where_they_part() -> None:
    life = new_life()
    first, second, third = (Request(tokens=text(0, 14) + text(begin, 6)) for begin in (30, 40, 50))
    assert found(life, first) == 0
    request_id = life.submit(second)
    assert request_id is not None
    plan = life.step()
    assert [(scheduled.start, scheduled.stop) for scheduled in plan.scheduled] == [(0, 12)]
    assert life.scheduler.block_table(request_id).branch == 12
    life.drain()
    assert life.cached[request_id] == 0
    assert found(life, third) == 12


def test_a_lost_tail_costs_only_itself() -> None:
    life = new_life(window_blocks=6)
    asked = Request(tokens=text(0, 18), turns=[8])
    assert found(life, asked) == 0
    keys = chain_of(asked.tokens).hashes
    others = iter(range(100, 1000, 20))
    while life.kv_manager.prefix_cache.match(keys) == (4, 4):
        found(life, Request(tokens=text(next(others), 6)))
    assert life.kv_manager.prefix_cache.match(keys) == (2, 4)
    assert found(life, asked) == 8
    assert found(life, asked) == 16, "it is there again"


def test_a_chain_is_forgotten_from_its_end() -> None:
    life = new_life(full_blocks=9)
    asked = Request(tokens=text(0, 17), turns=[4, 8, 12])
    assert found(life, asked) == 0
    assert found(life, Request(tokens=text(100, 21))) == 0
    assert life.kv_manager.prefix_cache.match(chain_of(asked.tokens).hashes) == (3, 3), "one block was wanted"
    assert found(life, asked) == 12


def test_what_was_just_found_is_the_last_to_be_forgotten() -> None:
    life = new_life(full_blocks=10)
    older, newer = Request(tokens=text(0, 17)), Request(tokens=text(100, 17))
    assert found(life, older) == found(life, newer) == 0
    again = life.submit(older)
    assert again is not None
    life.step(paused=[again])
    assert life.cached[again] == 16
    life.cancel(again)
    assert found(life, Request(tokens=text(200, 9))) == 0
    longest = [
        life.kv_manager.prefix_cache.match(chain_of(request.tokens).hashes)[1] for request in (older, newer)
    ]
    assert longest == [4, 3], "one block was wanted"


def test_without_reuse_nothing_is_ever_found() -> None:
    life = new_life(reuse=False)
    same = Request(tokens=text(0, 18), turns=[8], commits=[text(50, 4)])
    for _ in range(3):
        assert found(life, same) == 0
    assert len(life.kv_manager.prefix_cache) == life.kv_manager.prefix_cache.num_tails == 0
    assert life.kv_manager.full.num_free == 32


def blocks_of(life: Life, request_id: int) -> tuple[set[int], set[int]]:
    block_table = life.scheduler.block_table(request_id)
    return set(block_table.full), set(block_table.window.values())


@pytest.mark.parametrize(("root", "shared"), [(b"", 4), (b"adapter a", 0)])
def test_only_the_same_text_under_the_same_weights_is_shared(root: bytes, shared: int) -> None:
    life = new_life(limits=SchedulerConfig(max_num_seqs=3, chunk_size=64, encode_block=1))
    first = life.submit(Request(tokens=text(0, 18), num_steps=9))
    life.step()
    second = life.submit(Request(tokens=text(0, 18), num_steps=9, root=root))
    third = life.submit(Request(tokens=text(1, 18), num_steps=9, root=root))
    life.step()
    assert first is not None
    assert second is not None
    assert third is not None
    (full, window), (other_full, other_window) = blocks_of(life, first), blocks_of(life, second)
    assert life.cached[second] == 4 * shared
    assert len(full & other_full) == shared
    assert len(window & other_window) == (shared > 0)
    assert life.cached[third] == 0
    for request_id in (first, second):
        assert not any(
            mine & others
            for mine, others in zip(blocks_of(life, third), blocks_of(life, request_id), strict=True)
        )


def test_a_block_outlives_its_owner_while_somebody_reads_it() -> None:
    life = new_life(full_blocks=12, window_blocks=10)
    first = life.submit(Request(tokens=text(0, 18), num_steps=9))
    life.step()
    second = life.submit(Request(tokens=text(0, 18), commits=[text(50, 4)] * 2, num_steps=3))
    life.step()
    assert first is not None
    assert second is not None
    assert life.cached[second] == 16
    life.cancel(first)
    # Others press for blocks; what `second` reads is checked at each of its steps.
    for begin in (100, 200, 300):
        life.submit(Request(tokens=text(begin, 20)))
    life.drain()
    assert life.gone[second][0] == "finished"
    assert life.met["forgotten blocks"] > 0
    life.check_rest()


def test_a_tail_that_fits_beside_no_window_is_left_alone() -> None:
    life = new_life(window_blocks=max_window_blocks(5, 4))
    same = Request(tokens=text(0, 18))
    assert [found(life, same) for _ in range(3)] == [0, 0, 0]


def chain_of(tokens: Sequence[int]) -> BlockHashChain:
    chain = BlockHashChain(4)
    chain.add(tokens)
    return chain


def test_copies_are_bounded_also_of_blocks_that_are_shared() -> None:
    life = new_life(max_gathered=50)
    assert life.kv_manager.max_len == 50
    assert not life.kv_manager.fits(51)
    assert found(life, Request(tokens=text(0, 30))) == 0
    for _ in range(2):
        life.submit(Request(tokens=text(0, 30)))
    assert len(life.step().admitted) == 1, "two copies of 30 tokens are too many"
    assert life.kv_manager.full.num_available >= 24
    assert life.step().admitted == ()
    assert len(life.step().admitted) == 1


@settings(STABLE, max_examples=60)
@given(
    block_size=st.integers(1, 9),
    window=st.integers(1, 30),
    chunks=st.lists(st.integers(1, 40), min_size=1, max_size=12),
)
def test_a_sequence_holds_its_window_and_hardly_more(block_size: int, window: int, chunks: list[int]) -> None:
    total = sum(chunks)
    most = max_window_blocks(window, block_size)
    kv_manager = KVCacheManager(
        block_size=block_size, window=window, full_blocks=-(-total // block_size), window_blocks=most
    )
    chain = BlockHashChain(block_size)
    chain.add([0] * total)
    block_table = kv_manager.allocate(chain, total, 0)
    assert block_table is not None
    for length in (sum(chunks[:count]) for count in range(1, len(chunks) + 1)):
        kv_manager.extend(block_table, length)
        seen = range(max(0, length - window + 1) // block_size, -(-length // block_size))
        assert set(seen) <= set(block_table.window)
        assert len(block_table.window) <= most
        assert len(block_table.full) == -(-length // block_size)
        assert kv_manager.window.num_used == len(block_table.window)
    kv_manager.free(block_table)
    assert kv_manager.full.num_used == kv_manager.window.num_used == 0


def open_alone(kv_manager: KVCacheManager, num_tokens: int, begin: list[int]) -> BlockTable | None:
    """A sequence that begins with what was asked before, if it is long enough."""
    chain = BlockHashChain(kv_manager.block_size)
    chain.add((begin + [0] * num_tokens)[:num_tokens])
    return kv_manager.allocate(chain, num_tokens, reusable=num_tokens - 1)


@pytest.mark.parametrize("seed", range(8))
def test_a_request_is_admitted_alone_exactly_if_it_fits(seed: int) -> None:
    rng = random.Random(seed)
    life = Life(random_setting(rng))
    live_on(rng, life, plans=60)
    life.drain()
    kv_manager = life.kv_manager
    begin = max((list(request.context) for _, request in life.gone.values()), key=len)
    for num_tokens in range(1, kv_manager.max_len + 20):
        block_table = open_alone(kv_manager, num_tokens, begin)
        assert (block_table is not None) == kv_manager.fits(num_tokens)
        if block_table is not None:
            kv_manager.extend(block_table, num_tokens)
            kv_manager.free(block_table)
    life.check_rest()


def test_a_window_that_never_fits_is_refused() -> None:
    most = max_window_blocks(9, 4)
    kv_manager = KVCacheManager(block_size=4, window=9, full_blocks=100, window_blocks=most - 1)
    assert kv_manager.fits(4 * (most - 1)), "it never holds more blocks than it has"
    assert not kv_manager.fits(4 * (most - 1) + 1)


@pytest.mark.parametrize("seed", range(8))
def test_growing_in_the_midst_of_a_life_keeps_everything(seed: int) -> None:
    rng = random.Random(seed)
    life = Life(replace(random_setting(rng), max_gathered=None))
    live_on(rng, life, plans=40)
    index, running = life.kv_manager.prefix_cache, list(life.running)
    before = [life.scheduler.block_table(request_id) for request_id in running]
    tables = [(list(block_table.full), dict(block_table.window)) for block_table in before]
    known = dict(index._full), dict(index._tails)
    lengths = [rng.randint(1, 120) for _ in range(3)]
    life.ensure(lengths)
    assert [(block_table.full, block_table.window) for block_table in before] == tables
    assert (dict(index._full), dict(index._tails)) == known
    for request_id in running:
        life.check_blocks(request_id)
    # There is room for all of them at once, beside those who are in.
    assert all(map(life.kv_manager.fits, lengths))
    block_tables = [open_alone(life.kv_manager, length, list(range(length))) for length in lengths]
    for block_table, length in zip(block_tables, lengths, strict=True):
        assert block_table is not None
        life.kv_manager.extend(block_table, length)
    for block_table in block_tables:
        assert block_table is not None
        life.kv_manager.free(block_table)
    live_on(rng, life, plans=20)
    life.drain()
    life.check_rest()


def test_memory_that_is_enough_does_not_grow() -> None:
    kv_manager = KVCacheManager(block_size=4, window=5)
    assert kv_manager.max_len == 0
    kv_manager.ensure_capacity([30, 10])
    assert kv_manager.full.size == 2 * (8 + 3)
    assert kv_manager.window.size == 2 * (max_window_blocks(5, 4) + min(max_window_blocks(5, 4), 3))
    kv_manager.ensure_capacity([30])
    assert kv_manager.full.size == 22


def test_of_a_prompt_that_is_read_in_part_only_that_part_is_cached() -> None:
    memory = KVCacheManager(block_size=4, window=8, full_blocks=8, window_blocks=8)
    chain = chain_of(text(0, 12))
    table = memory.allocate(chain, 12, reusable=11)
    assert table is not None
    memory.extend(table, 4)
    memory.cache_blocks(table, tail=True)
    assert memory.prefix_cache.match(chain.hashes) == (1, 1)
    assert len(memory.prefix_cache) == 1, "no later block under a name of its own"


def test_a_tail_that_just_fits_beside_the_window_is_shared() -> None:
    """A context that is shorter than the window has a tail of its own blocks, and of no more."""
    memory = KVCacheManager(block_size=4, window=8, full_blocks=8, window_blocks=3)
    table = memory.allocate(chain_of(text(0, 5)), 5, reusable=4)
    assert table is not None
    memory.extend(table, 5)
    memory.cache_blocks(table, tail=True)
    memory.free(table)
    again = memory.allocate(chain_of(text(0, 8)), 8, reusable=7)  # two blocks of its own, one of the tail
    assert again is not None
    assert again.num_cached == 4
