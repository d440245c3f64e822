"""One pool of pages: whoever has a claim finds a page, and a page somebody wants is never given away."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.engine.pages import PagePool


def owned(pool: PagePool, count: int) -> list[int]:
    pool.claim(count)
    return [pool.take() for _ in range(count)]


def test_a_new_pool_is_all_room() -> None:
    pool = PagePool(5)
    assert (pool.room, pool.num_free, pool.num_used) == (5, 5, 0)
    assert sorted(owned(pool, 5)) == [0, 1, 2, 3, 4]
    assert (pool.room, pool.num_free, pool.num_used) == (0, 0, 5)


def test_a_claim_takes_room_before_any_page_is_taken() -> None:
    pool = PagePool(5)
    pool.claim(3)
    assert (pool.room, pool.num_free) == (2, 5)
    with pytest.raises(AssertionError, match="could not be met"):
        pool.claim(3)
    pool.unclaim(3)
    assert pool.room == 5


def test_nobody_takes_more_than_was_claimed() -> None:
    pool = PagePool(5)
    owned(pool, 2)
    with pytest.raises(AssertionError, match="more than was claimed"):
        pool.take()


def test_a_claim_is_not_given_back_while_its_pages_are_owned() -> None:
    pool = PagePool(5)
    pages = owned(pool, 2)
    with pytest.raises(AssertionError, match="still owned"):
        pool.unclaim(1)
    pool.drop(pages[0])
    pool.unclaim(1)
    assert pool.room == 4


def test_a_shared_page_counts_once_whoever_shares_it() -> None:
    pool = PagePool(5)
    (page,) = owned(pool, 1)
    pool.share(page)
    pool.share(page)
    assert pool.room == 3, "one for the claim, one for the page"
    pool.unshare(page)
    assert pool.room == 3
    assert pool.is_shared(page)
    pool.unshare(page)
    assert pool.room == 4
    assert not pool.is_shared(page)


def test_there_must_be_room_for_a_page_that_nobody_shared() -> None:
    pool = PagePool(2)
    first, second = owned(pool, 2)
    pool.keep(first)
    pool.keep(second)
    pool.drop(first)
    pool.unclaim(1)
    pool.share(second)
    with pytest.raises(AssertionError, match="no room"):
        pool.share(first)


@pytest.mark.parametrize("last", ["drop", "unshare", "forget"])
def test_a_page_is_free_when_the_last_who_wants_it_lets_it_go(last: str) -> None:
    pool = PagePool(3)
    (page,) = owned(pool, 1)
    pool.share(page)
    pool.keep(page)
    acts = {"drop": pool.drop, "unshare": pool.unshare, "forget": pool.forget}
    for name in [*(name for name in acts if name != last), last]:
        assert pool.num_free == 2
        acts[name](page)
    assert pool.num_free == 3
    assert not pool.in_use(page)


def test_a_free_page_has_nothing_to_share_or_keep() -> None:
    pool = PagePool(2)
    with pytest.raises(AssertionError, match="nothing to read"):
        pool.share(0)
    with pytest.raises(AssertionError):
        pool.keep(0)


def test_nobody_lets_go_what_he_does_not_have() -> None:
    pool = PagePool(2)
    for act in (pool.drop, pool.unshare, pool.forget):
        with pytest.raises(AssertionError):
            act(0)


def test_a_kept_page_is_neither_used_nor_free_and_takes_no_room() -> None:
    pool = PagePool(3)
    (page,) = owned(pool, 1)
    pool.keep(page)
    pool.drop(page)
    pool.unclaim(1)
    assert (pool.room, pool.num_free, pool.num_used) == (3, 2, 0)
    assert page not in owned(pool, 2)
    pool.forget(page)
    pool.claim(1)
    assert pool.take() == page


def test_a_grown_pool_has_its_pages_as_they_were_and_new_ones_behind_them() -> None:
    pool = PagePool(3)
    first, second = owned(pool, 2)
    pool.share(first)
    pool.keep(second)
    pool.drop(second)
    pool.grow(6)
    assert (pool.size, pool.num_free, pool.room) == (6, 4, 6 - 2 - 1)
    assert pool.in_use(first)
    assert pool.is_shared(first)
    pool.claim(3)
    assert {pool.take() for _ in range(4)} == {2, 3, 4, 5}, "the kept page is not among them"


@settings(max_examples=40, derandomize=True, database=None, deadline=None)
@given(st.integers(1, 12), st.randoms(use_true_random=True))
def test_whoever_was_let_in_finds_a_page(size: int, rng: random.Random) -> None:
    """The pool's promise: there is room, so there is a page, if what nobody uses is let go."""
    pool = PagePool(size)
    claims: list[int] = []  # of each sequence, what it has not drawn yet
    mine: list[tuple[int, int]] = []  # sequence and page
    shared: list[int] = []
    kept: list[int] = []
    for _ in range(150):
        act = rng.choice(["claim", "take", "take", "drop", "share", "unshare", "keep"])
        if act == "claim" and pool.room:
            claims.append(rng.randint(1, pool.room))
            pool.claim(claims[-1])
        elif act == "take" and any(claims):
            who = rng.choice([n for n, left in enumerate(claims) if left])
            while not pool.num_free:
                page = next(page for page in kept if not pool.in_use(page))
                kept.remove(page)
                pool.forget(page)
            page = pool.take()
            assert page not in {*kept, *shared, *(p for _, p in mine)}
            claims[who] -= 1
            mine.append((who, page))
        elif act == "drop" and mine:
            who, page = mine.pop(rng.randrange(len(mine)))
            pool.drop(page)
            if rng.random() < 0.5:
                claims[who] += 1
            else:
                pool.unclaim(1)
        elif act == "share" and (readable := [*kept, *shared, *(p for _, p in mine)]):
            page = rng.choice(readable)
            if pool.room or pool.is_shared(page):
                pool.share(page)
                shared.append(page)
        elif act == "unshare" and shared:
            pool.unshare(shared.pop(rng.randrange(len(shared))))
        elif act == "keep" and mine:
            kept.append(rng.choice(mine)[1])
            pool.keep(kept[-1])
        used = {*shared, *(p for _, p in mine)}
        assert pool.num_used == len(used)
        assert pool.num_free == size - len(used | set(kept))
        assert pool.room == size - sum(claims) - len(mine) - len(set(shared)) >= 0
