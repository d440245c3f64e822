"""Keys name blocks by all text up to their end; the index forgets chains from their end, and whole tails."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.engine.block_pool import BlockPool
from dgemma.engine.kv_cache_manager import KVCacheManager
from dgemma.engine.prefix_cache import BlockHash, BlockHashChain, PrefixCache
from dgemma.engine.request import EngineRequest
from dgemma.engine.scheduler import SchedulerConfig
from dgemma.events import Finish
from dgemma.params import GenerationParams
from engine_life import CONFIG, ENCODE_BLOCK, make_engine

STABLE = settings(derandomize=True, database=None, deadline=None)
few_tokens = st.lists(st.integers(0, 2), max_size=24)


def keys_of(tokens: Sequence[int], root: bytes = b"", block_size: int = 4) -> list[BlockHash]:
    chain = BlockHashChain(block_size, root)
    chain.add(tokens)
    return chain.hashes


@STABLE
@given(few_tokens, st.lists(st.integers(0, 24), max_size=4))
def test_a_chain_that_grew_in_chunks_is_the_same_chain(tokens: list[int], cuts: list[int]) -> None:
    chain = BlockHashChain(4)
    for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), 24], strict=True):
        chain.add(tokens[start:stop])
    assert chain.hashes == keys_of(tokens)
    assert len(chain.hashes) == len(tokens) // 4


@STABLE
@given(few_tokens, few_tokens)
def test_keys_agree_exactly_as_far_as_the_texts_do(one: list[int], other: list[int]) -> None:
    blocks = range(0, min(len(one), len(other)) // 4 * 4, 4)
    same_text = [one[: at + 4] == other[: at + 4] for at in blocks]
    assert [a == b for a, b in zip(keys_of(one), keys_of(other), strict=False)] == same_text
    assert len({*keys_of(one), *keys_of(other)}) == len(one) // 4 + len(other) // 4 - sum(same_text)


@STABLE
@given(few_tokens)
def test_another_root_has_no_key_in_common(tokens: list[int]) -> None:
    assert not set(keys_of(tokens)) & set(keys_of(tokens, b"adapter a"))


def test_tokens_of_any_size_have_keys() -> None:
    assert keys_of([262_143, 0, 0, 0]) != keys_of([262_142, 0, 0, 0])
    # 1 and 256 have the same bytes in another order.
    assert keys_of([1, 256, 0, 0]) != keys_of([256, 1, 0, 0])


class Shelf:
    """An index over two pools of which it has everything."""

    def __init__(self, full: int = 8, window: int = 8) -> None:
        self.full, self.window = BlockPool(full), BlockPool(window)
        self.prefix_cache = PrefixCache(self.full, self.window)

    def add(self, keys: Sequence[BlockHash], tails: Sequence[int]) -> None:
        """A text whose blocks are written, with tails of one block behind so many blocks, and that ends."""
        blocks = [taken(self.full) for _ in keys]
        for key, block in zip(keys, blocks, strict=True):
            self.prefix_cache.add_block(key, block)
        for count in tails:
            block = taken(self.window)
            self.prefix_cache.add_tail(keys[count - 1], [block])
            given_back(self.window, [block])
        self.prefix_cache.touch(keys)
        given_back(self.full, blocks)


def taken(pool: BlockPool) -> int:
    pool.reserve(1)
    return pool.allocate()


def given_back(pool: BlockPool, blocks: Sequence[int]) -> None:
    for block in blocks:
        pool.release(block)
        pool.unreserve(1)


A = keys_of([1] * 16)
B = keys_of([2] * 16)


def test_a_prefix_is_usable_up_to_its_last_tail_and_known_up_to_its_last_block() -> None:
    shelf = Shelf()
    shelf.add(A, tails=[1, 3])
    assert shelf.prefix_cache.match(A) == (3, 4)
    assert shelf.prefix_cache.match(A[:2]) == (1, 2)
    assert shelf.prefix_cache.match(B) == (0, 0)
    full, tail = shelf.prefix_cache.blocks_of(A[:3])
    assert len(set(full)) == 3
    assert len(tail) == 1
    assert (len(shelf.prefix_cache), shelf.prefix_cache.num_tails) == (4, 2)


def test_what_is_there_already_stays_as_it_is() -> None:
    shelf = Shelf()
    shelf.add(A, tails=[4])
    before = shelf.prefix_cache.blocks_of(A)
    shelf.add(A, tails=[4])
    assert shelf.prefix_cache.blocks_of(A) == before
    assert (shelf.full.num_free, shelf.window.num_free) == (4, 7), "the second text's blocks are free again"


def test_full_blocks_go_from_the_end_of_a_chain() -> None:
    shelf = Shelf()
    shelf.add(A, tails=[1, 2, 3, 4])
    for left in (3, 2, 1, 0):
        shelf.prefix_cache.evict_full_block()
        assert shelf.prefix_cache.match(A) == (left, left)
        assert shelf.full.num_free == 8 - left
        assert shelf.window.num_free == 8 - left, "a tail goes with the block before its end"


def test_a_fork_goes_from_its_ends() -> None:
    shelf = Shelf()
    fork = keys_of([1] * 8 + [3] * 8)
    shelf.add(A, tails=[])
    shelf.add(fork, tails=[])
    lengths = []
    for _ in range(6):
        shelf.prefix_cache.evict_full_block()
        lengths.append((shelf.prefix_cache.match(A)[1], shelf.prefix_cache.match(fork)[1]))
    assert lengths == [(3, 4), (2, 4), (2, 3), (2, 2), (1, 1), (0, 0)]


def test_the_least_recently_used_chain_goes_first() -> None:
    shelf = Shelf()
    shelf.add(A, tails=[4])
    shelf.add(B, tails=[4])
    shelf.prefix_cache.touch(A)
    shelf.prefix_cache.evict_full_block()
    assert shelf.prefix_cache.match(A) == (4, 4)
    assert shelf.prefix_cache.match(B) == (0, 3)


def test_a_block_in_use_is_passed_over() -> None:
    shelf = Shelf()
    shelf.add(A, tails=[])
    shelf.add(B, tails=[])
    used = shelf.prefix_cache._full[A[0]]
    shelf.full.share(used)
    for _ in range(7):
        shelf.prefix_cache.evict_full_block()
    assert shelf.prefix_cache._full == {A[0]: used}
    assert shelf.full.num_free == 7


def test_a_lost_tail_costs_only_itself() -> None:
    shelf = Shelf(window=3)
    shelf.add(A, tails=[4, 1, 2])
    # All were touched with their chain: the farthest goes first.
    shelf.prefix_cache.evict_window_block()
    assert shelf.window.num_free == 1
    assert shelf.prefix_cache.match(A) == (2, 4)
    assert len(shelf.prefix_cache) == 4


def test_tails_go_whole_until_a_block_is_free() -> None:
    shelf = Shelf(window=4)
    shelf.add(A, tails=[])
    shelf.add(B, tails=[])
    blocks = [taken(shelf.window) for _ in range(4)]
    shelf.prefix_cache.add_tail(A[2], blocks[:3])
    shelf.prefix_cache.add_tail(A[3], blocks[1:])
    shelf.prefix_cache.add_tail(B[0], blocks[3:])
    given_back(shelf.window, blocks)
    shelf.prefix_cache.evict_window_block()
    assert (shelf.window.num_free, shelf.prefix_cache.num_tails) == (1, 2), "blocks of the other tails stay"
    taken(shelf.window)
    shelf.prefix_cache.evict_window_block()
    assert (shelf.window.num_free, shelf.prefix_cache.num_tails) == (2, 1)
    assert shelf.prefix_cache.match(A) == (0, 4)
    assert shelf.prefix_cache.match(B) == (1, 4)


def test_a_tail_of_which_every_block_is_read_is_passed_over() -> None:
    shelf = Shelf(window=2)
    shelf.add(A, tails=[4])
    shelf.add(B, tails=[4])
    _, (block,) = shelf.prefix_cache.blocks_of(A)
    shelf.window.share(block)
    shelf.prefix_cache.evict_window_block()
    assert shelf.prefix_cache.match(A) == (4, 4)
    assert shelf.prefix_cache.match(B) == (0, 4)


def test_prefixes_are_reused_only_under_the_same_salt() -> None:
    """One API key must not learn from `cached_tokens` what another has sent."""
    memory = KVCacheManager(block_size=4, window=CONFIG.window, full_blocks=60, window_blocks=30)
    engine = make_engine(memory, SchedulerConfig(max_num_seqs=1, chunk_size=16, encode_block=ENCODE_BLOCK))
    params = GenerationParams(max_tokens=4, max_denoising_steps=1)

    def cached(salt: str) -> int:
        request = EngineRequest(prompt=tuple(range(20)), seed=1, params=params, cache_salt=salt)
        engine.add(engine.validate(request))
        while not engine.is_idle:
            for _, event in engine.step():
                if isinstance(event, Finish):
                    found = event.answer.cached_tokens
        return found

    assert cached("one") == 0
    assert cached("two") == 0
    assert cached("one") > 0
    assert cached("two") > 0
    assert cached("") == 0
