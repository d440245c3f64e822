"""What was read once is found again, and no more than that; growing keeps all; who fits is let in."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.engine.capacity import window_pages_of
from dgemma.engine.memory import Holding, Memory
from dgemma.engine.prefix import KeyChain
from dgemma.engine.scheduler import Limits
from page_contents import Life, Request, Setting
from random_life import live_on, random_setting

STABLE = settings(derandomize=True, database=None, deadline=None)


def new_life(**changes: Any) -> Life:
    """Pages of 4 tokens, a window of 5: a tail is one page."""
    plain = {"limits": Limits(slots=2, piece=64, block=1), "window": 5, "full_pages": 32, "window_pages": 24}
    return Life(Setting(**{**plain, **changes}))


def found(life: Life, request: Request) -> int:
    """How many of its tokens were not computed, once it is finished."""
    number = life.submit(request)
    assert number is not None
    life.drain()
    assert life.gone[number][0] == "finished"
    return life.cached[number]


def text(begin: int, length: int) -> list[int]:
    return list(range(begin, begin + length))


LENGTHS = range(1, 19)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_same_prompt_again_is_computed_only_behind_its_last_whole_page(length: int) -> None:
    life = new_life()
    same = Request(tokens=text(0, length))
    assert found(life, same) == 0
    # The last token is computed in any case.
    assert found(life, same) == (length - 1) // 4 * 4
    assert found(life, same) == (length - 1) // 4 * 4


def test_the_next_turn_goes_on_behind_the_answer() -> None:
    life = new_life()
    first = Request(tokens=text(0, 10), commits=[text(50, 4)])
    assert found(life, first) == 0
    assert found(life, Request(tokens=first.context + text(70, 5))) == 12


def test_the_next_turn_goes_on_behind_the_prompt_if_the_answer_is_read_otherwise() -> None:
    life = new_life()
    first = Request(tokens=text(0, 10), commits=[text(50, 4)])
    assert found(life, first) == 0
    assert found(life, Request(tokens=[*first.tokens, *text(80, 9)])) == 8


def test_a_turn_within_a_prompt_is_where_others_go_on() -> None:
    life = new_life()
    assert found(life, Request(tokens=text(0, 20), turns=[9])) == 0
    assert found(life, Request(tokens=text(0, 9) + text(60, 9))) == 8


def test_tails_are_kept_only_where_a_turn_a_prompt_or_an_answer_ends() -> None:
    life = new_life(limits=Limits(slots=2, piece=4, block=4))
    assert found(life, Request(tokens=text(0, 26), turns=[9], commits=[text(50, 8)] * 2)) == 0
    index = life.memory.index
    keys = chain_of(text(0, 26) + text(50, 8) * 2).keys
    assert [count for count, key in enumerate(keys, 1) if key in index._tails] == [9 // 4, 26 // 4, 42 // 4]
    assert index.num_tails == 3


def test_of_prompts_that_differ_at_their_end_the_third_goes_on_from_where_they_part() -> None:
    life = new_life()
    first, second, third = (Request(tokens=text(0, 14) + text(begin, 6)) for begin in (30, 40, 50))
    assert found(life, first) == 0
    number = life.submit(second)
    assert number is not None
    plan = life.step()
    assert [(work.start, work.stop) for work in plan.work] == [(0, 12)]
    assert life.scheduler.holding(number).branch == 12
    life.drain()
    assert life.cached[number] == 0
    assert found(life, third) == 12


def test_a_lost_tail_costs_only_itself() -> None:
    life = new_life(window_pages=6)
    asked = Request(tokens=text(0, 18), turns=[8])
    assert found(life, asked) == 0
    keys = chain_of(asked.tokens).keys
    others = iter(range(100, 1000, 20))
    while life.memory.index.longest(keys) == (4, 4):
        found(life, Request(tokens=text(next(others), 6)))
    assert life.memory.index.longest(keys) == (2, 4)
    assert found(life, asked) == 8
    assert found(life, asked) == 16, "it is there again"


def test_a_chain_is_forgotten_from_its_end() -> None:
    life = new_life(full_pages=9)
    asked = Request(tokens=text(0, 17), turns=[4, 8, 12])
    assert found(life, asked) == 0
    assert found(life, Request(tokens=text(100, 21))) == 0
    assert life.memory.index.longest(chain_of(asked.tokens).keys) == (3, 3), "one page was wanted"
    assert found(life, asked) == 12


def test_what_was_just_found_is_the_last_to_be_forgotten() -> None:
    life = new_life(full_pages=10)
    older, newer = Request(tokens=text(0, 17)), Request(tokens=text(100, 17))
    assert found(life, older) == found(life, newer) == 0
    again = life.submit(older)
    assert again is not None
    life.step(paused=[again])
    assert life.cached[again] == 16
    life.cancel(again)
    assert found(life, Request(tokens=text(200, 9))) == 0
    longest = [life.memory.index.longest(chain_of(request.tokens).keys)[1] for request in (older, newer)]
    assert longest == [4, 3], "one page was wanted"


def test_without_reuse_nothing_is_ever_found() -> None:
    life = new_life(reuse=False)
    same = Request(tokens=text(0, 18), turns=[8], commits=[text(50, 4)])
    for _ in range(3):
        assert found(life, same) == 0
    assert len(life.memory.index) == life.memory.index.num_tails == 0
    assert life.memory.full.num_free == 32


def pages_of(life: Life, number: int) -> tuple[set[int], set[int]]:
    holding = life.scheduler.holding(number)
    return set(holding.full), set(holding.window.values())


@pytest.mark.parametrize(("root", "shared"), [(b"", 4), (b"adapter a", 0)])
def test_only_the_same_text_under_the_same_weights_is_shared(root: bytes, shared: int) -> None:
    life = new_life(limits=Limits(slots=3, piece=64, block=1))
    first = life.submit(Request(tokens=text(0, 18), looks=9))
    life.step()
    second = life.submit(Request(tokens=text(0, 18), looks=9, root=root))
    third = life.submit(Request(tokens=text(1, 18), looks=9, root=root))
    life.step()
    assert first is not None
    assert second is not None
    assert third is not None
    (full, window), (other_full, other_window) = pages_of(life, first), pages_of(life, second)
    assert life.cached[second] == 4 * shared
    assert len(full & other_full) == shared
    assert len(window & other_window) == (shared > 0)
    assert life.cached[third] == 0
    for number in (first, second):
        assert not any(
            mine & others for mine, others in zip(pages_of(life, third), pages_of(life, number), strict=True)
        )


def test_a_page_outlives_its_owner_while_somebody_reads_it() -> None:
    life = new_life(full_pages=12, window_pages=10)
    first = life.submit(Request(tokens=text(0, 18), looks=9))
    life.step()
    second = life.submit(Request(tokens=text(0, 18), commits=[text(50, 4)] * 2, looks=3))
    life.step()
    assert first is not None
    assert second is not None
    assert life.cached[second] == 16
    life.cancel(first)
    # Others press for pages; what `second` reads is checked at each of its steps.
    for begin in (100, 200, 300):
        life.submit(Request(tokens=text(begin, 20)))
    life.drain()
    assert life.gone[second][0] == "finished"
    assert life.met["forgotten pages"] > 0
    life.check_rest()


def test_a_tail_that_fits_beside_no_window_is_left_alone() -> None:
    life = new_life(window_pages=window_pages_of(5, 4))
    same = Request(tokens=text(0, 18))
    assert [found(life, same) for _ in range(3)] == [0, 0, 0]


def chain_of(tokens: Sequence[int]) -> KeyChain:
    chain = KeyChain(4)
    chain.add(tokens)
    return chain


def test_copies_are_bounded_also_of_pages_that_are_shared() -> None:
    life = new_life(most_gathered=50)
    assert life.memory.longest == 50
    assert not life.memory.fits(51)
    assert found(life, Request(tokens=text(0, 30))) == 0
    for _ in range(2):
        life.submit(Request(tokens=text(0, 30)))
    assert len(life.step().admitted) == 1, "two copies of 30 tokens are too many"
    assert life.memory.full.room >= 24
    assert life.step().admitted == ()
    assert len(life.step().admitted) == 1


@settings(STABLE, max_examples=60)
@given(
    page_len=st.integers(1, 9),
    window=st.integers(1, 30),
    pieces=st.lists(st.integers(1, 40), min_size=1, max_size=12),
)
def test_a_sequence_holds_its_window_and_hardly_more(page_len: int, window: int, pieces: list[int]) -> None:
    total = sum(pieces)
    most = window_pages_of(window, page_len)
    memory = Memory(page_len=page_len, window=window, full_pages=-(-total // page_len), window_pages=most)
    chain = KeyChain(page_len)
    chain.add([0] * total)
    holding = memory.open(chain, total, 0)
    assert holding is not None
    for length in (sum(pieces[:count]) for count in range(1, len(pieces) + 1)):
        memory.grow(holding, length)
        seen = range(max(0, length - window + 1) // page_len, -(-length // page_len))
        assert set(seen) <= set(holding.window)
        assert len(holding.window) <= most
        assert len(holding.full) == -(-length // page_len)
        assert memory.window.num_used == len(holding.window)
    memory.close(holding)
    assert memory.full.num_used == memory.window.num_used == 0


def open_alone(memory: Memory, num_tokens: int, begin: list[int]) -> Holding | None:
    """A sequence that begins with what was asked before, if it is long enough."""
    chain = KeyChain(memory.page_len)
    chain.add((begin + [0] * num_tokens)[:num_tokens])
    return memory.open(chain, num_tokens, reusable=num_tokens - 1)


@pytest.mark.parametrize("seed", range(8))
def test_whoever_fits_is_let_in_when_alone_and_nobody_else(seed: int) -> None:
    rng = random.Random(seed)
    life = Life(random_setting(rng))
    live_on(rng, life, plans=60)
    life.drain()
    memory = life.memory
    begin = max((list(request.context) for _, request in life.gone.values()), key=len)
    for num_tokens in range(1, memory.longest + 20):
        holding = open_alone(memory, num_tokens, begin)
        assert (holding is not None) == memory.fits(num_tokens)
        if holding is not None:
            memory.grow(holding, num_tokens)
            memory.close(holding)
    life.check_rest()


def test_a_window_that_never_fits_is_refused() -> None:
    most = window_pages_of(9, 4)
    memory = Memory(page_len=4, window=9, full_pages=100, window_pages=most - 1)
    assert memory.fits(4 * (most - 1)), "it never holds more pages than it has"
    assert not memory.fits(4 * (most - 1) + 1)


@pytest.mark.parametrize("seed", range(8))
def test_growing_in_the_midst_of_a_life_keeps_everything(seed: int) -> None:
    rng = random.Random(seed)
    life = Life(replace(random_setting(rng), most_gathered=None))
    live_on(rng, life, plans=40)
    index, running = life.memory.index, list(life.running)
    before = [life.scheduler.holding(number) for number in running]
    tables = [(list(holding.full), dict(holding.window)) for holding in before]
    known = dict(index._full), dict(index._tails)
    lengths = [rng.randint(1, 120) for _ in range(3)]
    life.ensure(lengths)
    assert [(holding.full, holding.window) for holding in before] == tables
    assert (dict(index._full), dict(index._tails)) == known
    for number in running:
        life.check_pages(number)
    # There is room for all of them at once, beside those who are in.
    assert all(map(life.memory.fits, lengths))
    holdings = [open_alone(life.memory, length, list(range(length))) for length in lengths]
    for holding, length in zip(holdings, lengths, strict=True):
        assert holding is not None
        life.memory.grow(holding, length)
    for holding in holdings:
        assert holding is not None
        life.memory.close(holding)
    live_on(rng, life, plans=20)
    life.drain()
    life.check_rest()


def test_memory_that_is_enough_does_not_grow() -> None:
    memory = Memory(page_len=4, window=5)
    assert memory.longest == 0
    memory.ensure([30, 10])
    assert memory.full.size == 2 * (8 + 3)
    assert memory.window.size == 2 * (window_pages_of(5, 4) + min(window_pages_of(5, 4), 3))
    memory.ensure([30])
    assert memory.full.size == 22
