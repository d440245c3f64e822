"""From bytes to blocks: never more than there are, and enough for a canvas or no engine at all."""

from __future__ import annotations

import bisect
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.checkpoint.presets import PRESETS
from dgemma.engine.kv_cache_manager import Capacity, max_window_blocks, plan_capacity, token_bytes
from dgemma.errors import InputError
from dgemma.model.config import LayerKind, ModelConfig

RELEASED = PRESETS["26b"].config
FULL, SLIDING = LayerKind.FULL, LayerKind.SLIDING
GB = 10**9


def plan(
    config: ModelConfig = RELEASED,
    *,
    num_bytes: int,
    max_num_seqs: int = 16,
    block_size: int = 32,
    max_len: int = RELEASED.max_positions,
) -> Capacity:
    return plan_capacity(
        config,
        num_bytes=num_bytes,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        item_bytes=2,
        max_len=max_len,
    )


def used_bytes(
    config: ModelConfig,
    capacity: Capacity,
    *,
    max_num_seqs: int,
    block_size: int,
    max_len: int,
    room: int = 0,
) -> int:
    """Blocks, and of each slot the copy its canvas reads: a window for each, full text for all together."""
    full, sliding = (token_bytes(config, kind, 2) for kind in (FULL, SLIDING))
    blocks = block_size * (capacity.full_blocks * full + capacity.window_blocks * sliding)
    windows = max_num_seqs * min(config.window - 1, max_len) * sliding
    return blocks + capacity.max_gathered * full + windows + max_num_seqs * room * (full + sliding)


def test_a_token_of_the_released_model_is_what_it_is_computed_to_be() -> None:
    assert token_bytes(RELEASED, SLIDING, 2) == 25 * 2 * 8 * 256 * 2
    assert token_bytes(RELEASED, FULL, 2) == 5 * 2 * 2 * 512 * 2
    assert token_bytes(RELEASED, FULL, 4) == 2 * token_bytes(RELEASED, FULL, 2)


def test_a_window_of_the_released_model_takes_210_megabytes() -> None:
    token = token_bytes(RELEASED, SLIDING, 2)
    assert RELEASED.window * token == pytest.approx(210e6, rel=0.01)
    in_blocks = max_window_blocks(RELEASED.window, 32) * 32 * token
    assert RELEASED.window * token <= in_blocks <= 1.07 * RELEASED.window * token


@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 34, 1024])
def test_blocks_of_a_window_hold_it_wherever_it_lies(window: int) -> None:
    """Wherever the next token is: the blocks its window touches, from behind its last whole block on."""
    for length in range(3 * window + 100):
        whole = length // 32 * 32
        first = max(0, whole - window + 1) // 32
        assert -(-length // 32) - first <= max_window_blocks(window, 32)


def test_the_released_model_on_a_card_of_80_gigabytes() -> None:
    capacity = plan(num_bytes=int(0.9 * 28 * GB))
    assert capacity.window_blocks == 2 * 16 * max_window_blocks(1024, 32)
    tokens = capacity.full_blocks * 32
    assert 300_000 < tokens < 400_000
    assert capacity.max_gathered == tokens


@settings(max_examples=200, derandomize=True, database=None, deadline=None)
@given(
    name=st.sampled_from(sorted(PRESETS)),
    num_bytes=st.integers(0, 400 * GB) | st.integers(0, 200_000_000),
    max_num_seqs=st.integers(1, 64),
    block_size=st.sampled_from([8, 16, 32, 64]),
    max_len=st.integers(1, 300_000),
)
def test_a_plan_is_within_its_bytes_and_has_room_for_two_canvases(
    name: str, num_bytes: int, max_num_seqs: int, block_size: int, max_len: int
) -> None:
    config = PRESETS[name].config
    try:
        capacity = plan(
            config, num_bytes=num_bytes, max_num_seqs=max_num_seqs, block_size=block_size, max_len=max_len
        )
    except InputError:
        # More memory, fewer sequences: then there is a plan.
        plan(config, num_bytes=1000 * GB, max_num_seqs=1, block_size=block_size, max_len=max_len)
        return
    assert capacity.full_blocks * block_size >= min(max_len, 2 * config.canvas_len)
    assert capacity.max_gathered >= min(max_len, 2 * config.canvas_len)
    used = used_bytes(config, capacity, max_num_seqs=max_num_seqs, block_size=block_size, max_len=max_len)
    assert used <= num_bytes
    more = plan(
        config, num_bytes=num_bytes + GB, max_num_seqs=max_num_seqs, block_size=block_size, max_len=max_len
    )
    assert more.full_blocks >= capacity.full_blocks
    assert more.max_gathered >= capacity.max_gathered


def test_no_more_blocks_than_all_slots_can_use_twice_over() -> None:
    capacity = plan(PRESETS["tiny"].config, num_bytes=100 * GB, max_num_seqs=4, max_len=8192)
    assert capacity.full_blocks == 2 * 4 * 8192 // 32
    assert capacity.max_gathered == 4 * 8192


def test_short_sequences_have_small_windows() -> None:
    capacity = plan(num_bytes=20 * GB, max_num_seqs=4, max_len=100)
    assert capacity.window_blocks == 2 * 4 * 4


@pytest.mark.parametrize("name", PRESETS)
def test_the_least_memory_that_is_enough_holds_two_canvases(name: str) -> None:
    config = PRESETS[name].config

    def is_enough(num_bytes: int) -> bool:
        try:
            plan(config, num_bytes=num_bytes, max_len=config.max_positions)
        except InputError:
            return False
        return True

    least = bisect.bisect_left(range(100 * GB), True, key=is_enough)
    assert 0 < least < 100 * GB
    capacity = plan(config, num_bytes=least, max_len=config.max_positions)
    assert capacity.full_blocks == 2 * config.canvas_len // 32


def test_too_little_memory_is_refused_with_what_to_change() -> None:
    with pytest.raises(InputError, match=r"5\.0 GB .* 16 sequences .* --max-num-seqs .* --memory-fraction"):
        plan(num_bytes=5 * GB)
    assert plan(num_bytes=5 * GB, max_num_seqs=4).full_blocks


def test_a_canvas_has_space_after_the_copy_it_reads() -> None:
    """As `KVStore.read(table, space=canvas_len)` makes it."""
    capacity = plan(num_bytes=20 * GB)
    room = RELEASED.canvas_len
    used = used_bytes(
        RELEASED, capacity, max_num_seqs=16, block_size=32, max_len=RELEASED.max_positions, room=room
    )
    assert used <= 20 * GB


def test_windows_alone_are_within_the_bytes_too() -> None:
    sliding_only = replace(RELEASED, layers=tuple(s for s in RELEASED.layers if s.kind is SLIDING))
    with pytest.raises(InputError, match="--max-num-seqs"):
        plan(sliding_only, num_bytes=GB)
