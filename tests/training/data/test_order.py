"""The order of presentations is a function of seed and number: complete, shuffled, the same everywhere."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.errors import InputError
from dgemma.training.data.order import DataOrder, Permutation, below, mix, shuffled

words = st.integers(0, 2**64 - 1)


@given(st.integers(1, 600), words)
def test_every_epoch_shows_every_record_once(count: int, seed: int) -> None:
    order = DataOrder(num_records=count, seed=seed)
    for epoch in range(2):
        places = [order.place(epoch * count + i) for i in range(count)]
        assert {e for e, _ in places} == {epoch}
        assert sorted(index for _, index in places) == list(range(count))


@settings(max_examples=20)
@given(st.integers(1, 2**40), words, st.data())
def test_large_permutations_are_within_bounds_and_have_no_collisions(
    count: int, key: int, data: st.DataObject
) -> None:
    permutation = Permutation(count, key)
    places = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=50))
    found = [permutation[place] for place in places]
    assert len(set(found)) == len(places)
    assert all(0 <= index < count for index in found)


def chi_square(counts: list[int], expected: float) -> float:
    return sum((count - expected) ** 2 / expected for count in counts)


@pytest.mark.parametrize("num_records", [5, 16, 17, 60])
def test_the_order_looks_shuffled(num_records: int) -> None:
    """Where a record stands, and which record follows it, are as good as random."""
    runs = 3000
    places: Counter[tuple[int, int]] = Counter()
    steps: Counter[int] = Counter()
    order = DataOrder(num_records=num_records, seed=1)
    for epoch in range(runs):
        found = [order.place(epoch * num_records + i)[1] for i in range(num_records)]
        places.update(enumerate(found))
        steps.update((b - a) % num_records for a, b in pairwise(found))
    every_place = [places[i, j] for i in range(num_records) for j in range(num_records)]
    freedom = (num_records - 1) ** 2
    # Five standard deviations of a chi-square above its mean; what is not shuffled is hundreds above.
    assert chi_square(every_place, runs / num_records) < freedom + 5 * (2 * freedom) ** 0.5
    # For few records the network's permutations are not all equally likely: one part in a hundred is seen.
    every_step = [steps[step] for step in range(1, num_records)]
    expected = runs
    assert chi_square(every_step, expected) < num_records - 2 + 8 * (2 * (num_records - 2)) ** 0.5
    assert steps[0] == 0


def test_the_chi_square_would_notice_an_order_that_is_not_shuffled() -> None:
    places = Counter((i, (i + epoch % 4) % 16) for epoch in range(3000) for i in range(16))
    counts = [places[i, j] for i in range(16) for j in range(16)]
    assert chi_square(counts, 3000 / 16) > 10 * 15**2


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def epoch(number: int, seed: int) -> tuple[int, ...]:
        order = DataOrder(num_records=50, seed=seed)
        return tuple(order.place(number * 50 + i)[1] for i in range(50))

    assert len({epoch(number, seed) for number in range(5) for seed in range(5)}) == 25


def test_the_order_never_changes() -> None:
    """A run begun with one version of dgemma, Python or numpy is resumed with another."""
    assert [mix(0), mix(1, 2), below(1000, 7, 8)] == [16294208416658607535, 13608149317741381227, 229]
    order = DataOrder(num_records=10, seed=3)
    assert [order.place(i)[1] for i in range(12)] == [1, 7, 5, 0, 3, 9, 8, 4, 6, 2, 6, 8]
    assert list(shuffled(range(8), buffer_len=3, seed=1, epoch=0)) == [0, 3, 4, 2, 1, 6, 5, 7]


def test_without_shuffling_the_order_is_the_datas() -> None:
    order = DataOrder(num_records=3, shuffle=False)
    assert [order.place(i) for i in range(5)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


@given(st.integers(1, 60), words, st.integers(0, 500))
def test_replacements_reach_every_record(count: int, seed: int, presentation: int) -> None:
    order = DataOrder(num_records=count, seed=seed)
    assert sorted(order.replacements(presentation)) == list(range(count))


def test_replacements_are_spread() -> None:
    """A file sorted by length must not show one record for all that are too long."""
    order = DataOrder(num_records=100, seed=5)
    firsts = Counter(next(order.replacements(presentation)) for presentation in range(100))
    assert max(firsts.values()) == 1


@given(st.lists(st.integers(), max_size=60), st.integers(1, 70), words, st.integers(0, 3))
def test_a_buffer_gives_every_item_once(items: list[int], buffer_len: int, seed: int, epoch: int) -> None:
    found = list(shuffled(items, buffer_len=buffer_len, seed=seed, epoch=epoch))
    assert sorted(found) == sorted(items)
    if buffer_len == 1:
        assert found == items


def test_a_buffer_shuffles_and_looks_only_so_far_ahead() -> None:
    found = list(shuffled(range(1000), buffer_len=50, seed=0, epoch=0))
    assert found != list(shuffled(range(1000), buffer_len=50, seed=0, epoch=1))
    assert found != list(shuffled(range(1000), buffer_len=50, seed=1, epoch=0))
    assert max(item - place for place, item in enumerate(found)) == 49
    assert sum(abs(item - place) for place, item in enumerate(found)) > 1000 * 20


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"num_records": 0}, "num_records is 0; there must be at least one record"),
        ({"num_records": 1, "seed": -1}, "seed is -1; it must be a whole number from 0 to"),
        ({"num_records": 1, "seed": 2**64}, "seed is 18446744073709551616; it must be"),
    ],
)
def test_an_impossible_order_is_refused(options: dict[str, int], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        DataOrder(**options)  # type: ignore[arg-type]


def test_presentations_are_counted_from_zero() -> None:
    with pytest.raises(InputError, match="presentation is -1; presentations are counted from 0"):
        DataOrder(num_records=2).place(-1)


@pytest.mark.parametrize("place", [-1, 3])
def test_a_permutation_ends_where_its_numbers_do(place: int) -> None:
    with pytest.raises(IndexError):
        Permutation(3, 0)[place]


def test_seeds_and_epochs_have_replacements_of_their_own() -> None:
    found = [
        tuple(DataOrder(num_records=50, seed=seed).replacements(presentation))
        for seed, presentation in ((1, 0), (2, 0), (1, 50))
    ]
    assert len(set(found)) == 3
