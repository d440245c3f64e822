"""A prompt goes where its prefix is, unless that replica is busy; what is remembered is bounded."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from dgemma.scale.prefix_routes import PrefixRoutes

IDLE = {"a": 0, "b": 0, "c": 0}


def blocks(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def test_the_replica_with_the_longest_prefix_is_first() -> None:
    routes: PrefixRoutes[str] = PrefixRoutes()
    routes.sent(blocks("1", "12"), "a")
    routes.sent(blocks("1", "12", "123"), "b")
    assert routes.choose(blocks("1", "12", "123", "1234"), IDLE)[0] == "b"
    assert routes.choose(blocks("1", "12"), {"a": 1, "b": 0, "c": 0})[0] == "b"  # of equals the less loaded
    assert routes.choose(blocks("1", "12"), {"a": 0, "b": 1, "c": 0})[0] == "a"


def test_a_later_block_without_the_first_counts_nothing() -> None:
    routes: PrefixRoutes[str] = PrefixRoutes()
    routes.sent(blocks("1", "12"), "a")
    loads = {"a": 1, "b": 0}
    assert all(routes.choose(blocks("2", "12"), loads)[0] == "b" for _ in range(20))


def test_a_busy_replica_is_not_preferred_for_its_prefix() -> None:
    routes: PrefixRoutes[str] = PrefixRoutes(imbalance=4)
    routes.sent(blocks("1"), "a")
    assert routes.choose(blocks("1"), {"a": 3, "b": 0})[0] == "a"
    assert routes.choose(blocks("1"), {"a": 4, "b": 0})[0] == "b"


def test_a_lost_replica_is_forgotten_and_others_stay() -> None:
    routes: PrefixRoutes[str] = PrefixRoutes()
    routes.sent(blocks("1"), "a")
    routes.sent(blocks("1"), "b")
    routes.sent(blocks("2"), "a")
    routes.lost("a")
    assert len(routes) == 1
    assert all(routes.choose(blocks("1"), {"a": 0, "b": 3})[0] == "b" for _ in range(20))


def test_without_a_prefix_the_load_is_shared() -> None:
    routes: PrefixRoutes[str] = PrefixRoutes()
    loads = dict.fromkeys("abcd", 0)
    for number in range(400):
        loads[routes.choose(blocks(str(number)), loads)[0]] += 1
    assert max(loads.values()) - min(loads.values()) <= 4


def test_the_ends_of_old_prompts_are_forgotten_first() -> None:
    routes: PrefixRoutes[str] = PrefixRoutes(blocks=3)
    routes.sent(blocks("1", "12"), "a")
    routes.sent(blocks("2", "22"), "b")
    assert len(routes) == 3
    assert routes.choose(blocks("1", "12"), {"a": 1, "b": 0})[0] == "a"  # its beginning is still known


@given(st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=6), st.sampled_from("abc")), max_size=40))
def test_every_replica_is_named_once_whatever_was_sent(life: list[tuple[list[int], str]]) -> None:
    routes: PrefixRoutes[str] = PrefixRoutes(blocks=8)
    loads = dict.fromkeys("abc", 0)
    for numbers, lost in life:
        hashes = [bytes(numbers[:end]) for end in range(1, len(numbers) + 1)]
        order = routes.choose(hashes, loads)
        assert sorted(order) == list("abc")
        routes.sent(hashes, order[0])
        loads[order[0]] += 1
        assert len(routes) <= 8
        if random.Random(len(numbers)).random() < 0.2:
            routes.lost(lost)
            loads[lost] = 0
