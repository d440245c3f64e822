"""Intervals agree with published tables, and hold what they promise."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Sequence

import pytest

from dgemma import InputError
from dgemma.evaluation.intervals import (
    Interval,
    estimate,
    paired_difference,
    sign_test,
    t_interval,
    t_quantile,
    wilson,
)

TRIALS = 3000


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # Newcombe (1998), "Two-sided confidence intervals for the single proportion", method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 0.8389, 1.0),  # the mirror of 0 of 20
    ],
)
def test_wilson_has_the_published_values(successes: int, n: int, low: float, high: float) -> None:
    found = wilson(successes, n)
    assert found.low == pytest.approx(low, abs=5e-5)
    assert found.high == pytest.approx(high, abs=5e-5)


@pytest.mark.parametrize(
    ("degrees", "value"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (10, 2.228), (29, 2.045),
     (30, 2.042), (60, 2.000), (120, 1.980), (1_000, 1.962), (1_000_000, 1.960)],
)  # fmt: skip
def test_students_quantile_has_the_values_of_the_tables(degrees: int, value: float) -> None:
    assert t_quantile(degrees) == pytest.approx(value, abs=5e-4)


def test_students_quantile_falls_with_the_degrees_of_freedom_ever_more_slowly() -> None:
    steps = [t_quantile(degrees) - t_quantile(degrees + 1) for degrees in range(190, 212)]
    assert all(a > b > 0 for a, b in itertools.pairwise(steps))


def test_a_t_interval_is_as_computed_by_hand() -> None:
    # mean 3, standard deviation sqrt(2.5), 2.776 x sqrt(2.5 / 5) = 1.963
    found = t_interval([1, 2, 3, 4, 5])
    assert found is not None
    assert found.low == pytest.approx(3 - 1.963, abs=1e-3)
    assert found.high == pytest.approx(3 + 1.963, abs=1e-3)


def test_the_method_follows_the_values() -> None:
    right = estimate([1, 0, 1, 1])
    assert (right.method, right.mean, right.n) == ("wilson", 0.75, 4)
    assert right.interval == wilson(3, 4)
    other = estimate([1, 0, 0.5, 1])
    assert (other.method, other.mean) == ("t", 0.625)
    assert estimate([0.5]).interval is None  # one value shows no spread
    assert estimate([0.5]).to_json() == {"n": 1, "mean": 0.5, "low": None, "high": None, "method": "t"}
    assert estimate([1.0]).interval == wilson(1, 1)


def table(both: int, only_second: int, only_first: int, neither: int) -> tuple[list[float], list[float]]:
    pairs = [(1, 1)] * both + [(0, 1)] * only_second + [(1, 0)] * only_first + [(0, 0)] * neither
    return [float(a) for a, _ in pairs], [float(b) for _, b in pairs]


@pytest.mark.parametrize(
    ("counts", "low", "high"),
    [
        # Newcombe (1998), "... based on paired data", method 10.
        ((36, 12, 2, 0), 0.0569, 0.3404),
        # Fagerland, Lydersen and Laake, "Statistical Analysis of Contingency Tables", chapter 8.
        ((59, 6, 16, 80), -0.1186, -0.0046),
    ],
)
def test_a_paired_difference_has_the_published_interval(
    counts: tuple[int, int, int, int], low: float, high: float
) -> None:
    found = paired_difference(*table(*counts))
    assert found.method == "newcombe"
    assert found.interval is not None
    assert (found.interval.low, found.interval.high) == pytest.approx((low, high), abs=5e-5)
    assert (found.higher, found.lower) == counts[1:3]
    assert found.mean == pytest.approx((counts[1] - counts[2]) / sum(counts))


def test_runs_that_never_differ_are_not_called_certain() -> None:
    found = paired_difference([1, 1, 0], [1, 1, 0]).to_json()
    assert (found["mean"], found["equal"], found["p_value"]) == (0, 3, 1)
    assert found["low"] < -0.3
    assert found["high"] > 0.3


def test_other_scores_are_compared_by_their_differences() -> None:
    found = paired_difference([0.5, 1.5, 2.5, 3.5, 4.5], [1.5, 3.5, 5.5, 7.5, 9.5])
    assert (found.method, found.mean, found.higher, found.lower) == ("t", 3, 5, 0)
    assert found.interval == t_interval([1, 2, 3, 4, 5])


@pytest.mark.parametrize(
    ("higher", "lower", "p_value"),
    [(1, 7, 2 * 9 / 256), (5, 0, 2 / 32), (3, 3, 1.0), (0, 0, 1.0), (16, 6, 0.0524788), (6, 16, 0.0524788)],
)
def test_the_sign_test_counts_exactly(higher: int, lower: int, p_value: float) -> None:
    assert sign_test(higher, lower) == pytest.approx(p_value, abs=1e-7)


def coverage(
    draw: Callable[[random.Random], Sequence[float]],
    interval: Callable[[Sequence[float]], Interval | None],
    truth: float,
    shrunk: float = 1.0,
) -> float:
    """How often the interval, or a narrower one around the same centre, holds the truth."""
    rng = random.Random(11)
    hits = 0
    for _ in range(TRIALS):
        found = interval(draw(rng))
        assert found is not None
        centre, half = (found.low + found.high) / 2, (found.high - found.low) / 2 * shrunk
        hits += centre - half <= truth <= centre + half
    return hits / TRIALS


def coin(n: int, p: float) -> Callable[[random.Random], list[float]]:
    return lambda rng: [float(rng.random() < p) for _ in range(n)]


def paired_coins(n: int) -> Callable[[random.Random], list[float]]:
    """Runs that agree on 70 % of the examples; the second is right on 0.1 more."""

    def draw(rng: random.Random) -> list[float]:
        flat: list[float] = []
        for _ in range(n):
            u = rng.random()
            flat += [1, 1] if u < 0.4 else [0, 1] if u < 0.6 else [1, 0] if u < 0.7 else [0, 0]
        return flat

    return draw


def difference_interval(flat: Sequence[float]) -> Interval | None:
    return paired_difference(flat[::2], flat[1::2]).interval


@pytest.mark.parametrize(
    ("draw", "interval", "truth"),
    [
        (coin(20, 0.5), lambda v: estimate(v).interval, 0.5),
        (coin(30, 0.1), lambda v: estimate(v).interval, 0.1),
        (coin(200, 0.03), lambda v: estimate(v).interval, 0.03),
        (lambda rng: [rng.gauss(3, 2) for _ in range(5)], t_interval, 3),
        (lambda rng: [rng.uniform(0, 1) for _ in range(12)], t_interval, 0.5),
        (paired_coins(40), difference_interval, 0.1),
        (paired_coins(150), difference_interval, 0.1),
    ],
    ids=["coin 20", "rare 30", "rare 200", "gauss 5", "uniform 12", "pairs 40", "pairs 150"],
)
def test_intervals_hold_the_truth_as_often_as_they_say(
    draw: Callable[[random.Random], Sequence[float]],
    interval: Callable[[Sequence[float]], Interval | None],
    truth: float,
) -> None:
    assert 0.93 <= coverage(draw, interval, truth) <= 0.98
    # The same look at intervals of two thirds the width: it would have seen a mistake.
    assert coverage(draw, interval, truth, shrunk=2 / 3) < 0.9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: estimate([]), "values is empty"),
        (lambda: wilson(3, 2), "successes is 3 of n 2"),
        (lambda: wilson(0, 0), "successes is 0 of n 0"),
        (lambda: t_quantile(0), "degrees is 0"),
        (lambda: paired_difference([1], [1, 0]), "the runs have 1 and 2 values"),
        (lambda: paired_difference([], []), "at least one"),
        (lambda: sign_test(-1, 2), "higher is -1"),
    ],
)
def test_what_has_no_interval_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_without_scipy_an_interval_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(InputError, match=r"SciPy .* pip install 'dgemma\[eval\]'"):
        t_quantile(987_654)
