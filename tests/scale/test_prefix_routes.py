"""A prompt goes where its prefix is, unless that replica is busy; what is remembered is bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dgemma.scale.prefix_routes import PrefixRoutes

IDLE = {"a": 0, "b": 0, "c": 0}


def blocks(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def choice(routes: PrefixRoutes[str], hashes: list[bytes], loads: dict[str, int]) -> str:
    return routes.choose(hashes, loads, list(loads))


def test_the_replica_with_the_longest_prefix_is_chosen() -> None:
    routes: PrefixRoutes[str] = PrefixRoutes()
    routes.sent(blocks("1", "12"), "a")
    routes.sent(blocks("1", "12", "123"), "b")
    assert choice(routes, blocks("1", "12", "123", "1234"), IDLE) == "b"
    assert choice(routes, blocks("1", "12"), {"a": 1, "b": 0, "c": 0}) == "b"  # of equals the less loaded
    assert choice(routes, blocks("1", "12"), {"a": 0, "b": 1, "c": 0}) == "a"


def test_a_busy_replica_is_not_preferred_for_its_prefix() -> None:
    routes: PrefixRoutes[str] = PrefixRoutes(imbalance=4)
    routes.sent(blocks("1"), "a")
    assert choice(routes, blocks("1"), {"a": 3, "b": 0}) == "a"
    assert choice(routes, blocks("1"), {"a": 4, "b": 0}) == "b"


def test_a_replica_that_is_gone_is_not_chosen() -> None:
    routes: PrefixRoutes[str] = PrefixRoutes()
    routes.sent(blocks("1"), "b")
    routes.sent(blocks("1", "12"), "a")
    assert all(choice(routes, blocks("1", "12"), {"b": 2, "c": 0}) == "b" for _ in range(20))
    assert choice(routes, blocks("1", "12"), {"c": 0}) == "c"


def test_without_a_prefix_the_load_is_shared() -> None:
    routes: PrefixRoutes[str] = PrefixRoutes()
    loads = dict.fromkeys("abcd", 0)
    for number in range(400):
        loads[choice(routes, blocks(str(number)), loads)] += 1
    assert max(loads.values()) - min(loads.values()) <= 4


def test_the_ends_of_old_prompts_are_forgotten_first() -> None:
    routes: PrefixRoutes[str] = PrefixRoutes(blocks=3)
    routes.sent(blocks("1", "12"), "a")
    routes.sent(blocks("2", "22"), "b")
    assert len(routes) == 3
    assert choice(routes, blocks("1", "12"), {"a": 1, "b": 0}) == "a"  # its beginning is still known


def test_of_a_popular_block_the_latest_replicas_are_known() -> None:
    """A long prompt is still found on an older one: its later blocks are known there alone."""
    routes: PrefixRoutes[int] = PrefixRoutes(per_block=3)
    routes.sent(blocks("1", "12"), 0)
    for replica in range(1, 10):
        routes.sent(blocks("1"), replica)
    loads = dict.fromkeys(range(10), 0)
    assert {routes.choose(blocks("1", "19"), loads, list(loads)) for _ in range(50)} <= {7, 8, 9}
    assert routes.choose(blocks("1", "12"), loads, list(loads)) == 0


@given(st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=6), st.sampled_from("abc")), max_size=40))
def test_a_replica_that_runs_is_chosen_whatever_was_sent(life: list[tuple[list[int], str]]) -> None:
    routes: PrefixRoutes[str] = PrefixRoutes(blocks=8)
    for numbers, gone in life:
        hashes = [bytes(numbers[:end]) for end in range(1, len(numbers) + 1)]
        loads = {name: len(numbers) for name in "abc" if name != gone}
        chosen = choice(routes, hashes, loads)
        assert chosen in loads
        routes.sent(hashes, chosen)
        assert len(routes) <= 8
