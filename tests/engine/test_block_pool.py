"""One pool of blocks: whoever has a claim finds a block, and a block somebody wants is never given away."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.engine.block_pool import BlockPool


def owned(pool: BlockPool, count: int) -> list[int]:
    pool.reserve(count)
    return [pool.allocate() for _ in range(count)]


def test_a_new_pool_is_all_room() -> None:
    pool = BlockPool(5)
    assert (pool.num_available, pool.num_free, pool.num_used) == (5, 5, 0)
    assert sorted(owned(pool, 5)) == [0, 1, 2, 3, 4]
    assert (pool.num_available, pool.num_free, pool.num_used) == (0, 0, 5)


def test_a_claim_takes_room_before_any_block_is_taken() -> None:
    pool = BlockPool(5)
    pool.reserve(3)
    assert (pool.num_available, pool.num_free) == (2, 5)
    with pytest.raises(AssertionError, match="exceeds the available"):
        pool.reserve(3)
    pool.unreserve(3)
    assert pool.num_available == 5


def test_no_sequence_takes_more_blocks_than_it_claimed() -> None:
    pool = BlockPool(5)
    owned(pool, 2)
    with pytest.raises(AssertionError, match="more blocks than were reserved"):
        pool.allocate()


def test_a_claim_is_not_given_back_while_its_blocks_are_owned() -> None:
    pool = BlockPool(5)
    blocks = owned(pool, 2)
    with pytest.raises(AssertionError, match="still owned"):
        pool.unreserve(1)
    pool.release(blocks[0])
    pool.unreserve(1)
    assert pool.num_available == 4


def test_a_shared_block_counts_once() -> None:
    pool = BlockPool(5)
    (block,) = owned(pool, 1)
    pool.share(block)
    pool.share(block)
    assert pool.num_available == 3, "one for the claim, one for the block"
    pool.unshare(block)
    assert pool.num_available == 3
    assert pool.is_shared(block)
    pool.unshare(block)
    assert pool.num_available == 4
    assert not pool.is_shared(block)


def test_a_block_that_is_not_shared_needs_a_free_one() -> None:
    pool = BlockPool(2)
    first, second = owned(pool, 2)
    pool.add_cache_ref(first)
    pool.add_cache_ref(second)
    pool.release(first)
    pool.unreserve(1)
    pool.share(second)
    with pytest.raises(AssertionError, match="no block is available"):
        pool.share(first)


@pytest.mark.parametrize("last", ["release", "unshare", "drop_cache_ref"])
def test_a_block_is_free_when_the_last_who_wants_it_lets_it_go(last: str) -> None:
    pool = BlockPool(3)
    (block,) = owned(pool, 1)
    pool.share(block)
    pool.add_cache_ref(block)
    acts = {"release": pool.release, "unshare": pool.unshare, "drop_cache_ref": pool.drop_cache_ref}
    for name in [*(name for name in acts if name != last), last]:
        assert pool.num_free == 2
        acts[name](block)
    assert pool.num_free == 3
    assert not pool.in_use(block)


def test_a_free_block_has_nothing_to_share_or_keep() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="no contents to share"):
        pool.share(0)
    with pytest.raises(AssertionError):
        pool.add_cache_ref(0)


def test_a_block_is_freed_only_by_its_holder() -> None:
    pool = BlockPool(2)
    for act in (pool.release, pool.unshare, pool.drop_cache_ref):
        with pytest.raises(AssertionError):
            act(0)


def test_a_kept_block_is_neither_used_nor_free_and_takes_no_room() -> None:
    pool = BlockPool(3)
    (block,) = owned(pool, 1)
    pool.add_cache_ref(block)
    pool.release(block)
    pool.unreserve(1)
    assert (pool.num_available, pool.num_free, pool.num_used) == (3, 2, 0)
    assert block not in owned(pool, 2)
    pool.drop_cache_ref(block)
    pool.reserve(1)
    assert pool.allocate() == block


def test_a_grown_pool_has_its_blocks_as_they_were_and_new_ones_after_them() -> None:
    pool = BlockPool(3)
    first, second = owned(pool, 2)
    pool.share(first)
    pool.add_cache_ref(second)
    pool.release(second)
    pool.grow(6)
    assert (pool.size, pool.num_free, pool.num_available) == (6, 4, 6 - 2 - 1)
    assert pool.in_use(first)
    assert pool.is_shared(first)
    pool.reserve(3)
    assert {pool.allocate() for _ in range(4)} == {2, 3, 4, 5}, "the kept block is not among them"


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(st.integers(1, 12), st.randoms(use_true_random=True))
def test_the_count_of_used_blocks_is_that_of_a_recount(size: int, rng: random.Random) -> None:
    pool = BlockPool(size)
    for _ in range(200):
        block = rng.randrange(pool.size)
        act = rng.choice(
            (
                pool.reserve,
                pool.unreserve,
                pool.allocate,
                pool.release,
                pool.share,
                pool.unshare,
                pool.add_cache_ref,
            )
        )
        act = rng.choice((act, act, pool.drop_cache_ref))
        try:
            if act == pool.allocate:
                pool.allocate()
            elif act in (pool.reserve, pool.unreserve):
                act(rng.randint(1, 3))
            else:
                act(block)
        except (AssertionError, IndexError):  # not now; the pool is as it was
            pass
        if rng.random() < 0.02:
            pool.grow(pool.size + rng.randint(1, 3))
        assert pool.num_used == sum(pool.in_use(block) for block in range(pool.size))


def test_the_count_of_used_blocks_reads_no_block() -> None:
    """It is part of every scrape of the metrics, also of a pool of millions of blocks."""

    class Unread(BlockPool):
        def in_use(self, block: int) -> bool:
            raise AssertionError("a block was read")

    assert Unread(5).num_used == 0


@settings(max_examples=40, derandomize=True, database=None, deadline=None)
@given(st.integers(1, 12), st.randoms(use_true_random=True))
def test_an_admitted_sequence_always_finds_a_block(size: int, rng: random.Random) -> None:
    """The pool's promise: there is room, so there is a block, if what nobody uses is let go."""
    pool = BlockPool(size)
    claims: list[int] = []  # of each sequence, what it has not drawn yet
    mine: list[tuple[int, int]] = []  # sequence and block
    shared: list[int] = []
    kept: list[int] = []
    for _ in range(150):
        act = rng.choice(["reserve", "allocate", "allocate", "release", "share", "unshare", "add_cache_ref"])
        if act == "reserve" and pool.num_available:
            claims.append(rng.randint(1, pool.num_available))
            pool.reserve(claims[-1])
        elif act == "allocate" and any(claims):
            who = rng.choice([n for n, left in enumerate(claims) if left])
            while not pool.num_free:
                block = next(block for block in kept if not pool.in_use(block))
                kept.remove(block)
                pool.drop_cache_ref(block)
            block = pool.allocate()
            assert block not in {*kept, *shared, *(p for _, p in mine)}
            claims[who] -= 1
            mine.append((who, block))
        elif act == "release" and mine:
            who, block = mine.pop(rng.randrange(len(mine)))
            pool.release(block)
            if rng.random() < 0.5:
                claims[who] += 1
            else:
                pool.unreserve(1)
        elif act == "share" and (readable := [*kept, *shared, *(p for _, p in mine)]):
            block = rng.choice(readable)
            if pool.num_available or pool.is_shared(block):
                pool.share(block)
                shared.append(block)
        elif act == "unshare" and shared:
            pool.unshare(shared.pop(rng.randrange(len(shared))))
        elif act == "add_cache_ref" and mine:
            kept.append(rng.choice(mine)[1])
            pool.add_cache_ref(kept[-1])
        used = {*shared, *(p for _, p in mine)}
        assert pool.num_used == len(used)
        assert pool.num_free == size - len(used | set(kept))
        assert pool.num_available == size - sum(claims) - len(mine) - len(set(shared)) >= 0
