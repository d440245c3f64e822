"""How sure a figure is: 95 % intervals for shares, means, and differences of two runs. No torch.

- Scores that are all 0 or 1: Wilson's interval, which holds its promise for few examples and near 0 and 1.
- Other scores: Student's t.
- Two runs on the same examples: Newcombe's interval for paired shares (1998, method 10), t for the
  differences of other scores, and an exact sign test, which for 0 and 1 is McNemar's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean, stdev
from typing import Any

from dgemma.errors import InputError

LEVEL = 0.95
_Z = NormalDist().inv_cdf((1 + LEVEL) / 2)


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean and its interval, which one value alone does not have unless it is 0 or 1."""

    n: int
    mean: float
    interval: Interval | None
    method: str  # "wilson" or "t"

    def to_json(self) -> dict[str, Any]:
        return {"n": self.n, "mean": self.mean, **_ends(self.interval), "method": self.method}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Second run minus first, example by example."""

    n: int
    mean: float
    interval: Interval | None
    method: str  # "newcombe" or "t"
    higher: int  # examples where the second run's value is higher
    lower: int
    p_value: float  # of the sign test

    def to_json(self) -> dict[str, Any]:
        return {
            "n": self.n, "mean": self.mean, **_ends(self.interval), "method": self.method,
            "higher": self.higher, "lower": self.lower, "equal": self.n - self.higher - self.lower,
            "p_value": self.p_value,
        }  # fmt: skip


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of `values` with the interval that suits them."""
    if not values:
        raise InputError("values is empty; an estimate needs at least one value.")
    if _are_binary(values):
        interval: Interval | None = wilson(int(sum(values)), len(values))
        return Estimate(n=len(values), mean=fmean(values), interval=interval, method="wilson")
    return Estimate(n=len(values), mean=fmean(values), interval=t_interval(values), method="t")


def wilson(successes: int, n: int) -> Interval:
    """Wilson's score interval for a share."""
    if n < 1 or not 0 <= successes <= n:
        raise InputError(f"successes is {successes} of n {n}; it must be from 0 to n, and n at least 1.")
    share, z2 = successes / n, _Z * _Z
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    # Exactly 0 and 1 at the ends, where rounding would miss them.
    low = 0.0 if successes == 0 else centre - half
    return Interval(low, 1.0 if successes == n else centre + half)


def t_interval(values: Sequence[float]) -> Interval | None:
    """Student's interval for a mean; None for fewer than two values, which show no spread."""
    if len(values) < 2:
        return None
    mean = fmean(values)
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean - half, mean + half)


@cache
def t_quantile(freedom: int) -> float:
    """The value that Student's t with `freedom` degrees stays within, 95 % of the time."""
    if freedom < 1:
        raise InputError(f"freedom is {freedom}; it must be at least 1.")
    if freedom > 200:
        # Cornish and Fisher's expansion: right to 1e-9 here, where the sums below get long.
        z, v = _Z, freedom
        return (
            z
            + (z**3 + z) / (4 * v)
            + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
            + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        )
    low, high = 0.0, 100.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_within(middle, freedom) < LEVEL else (low, middle)
    return (low + high) / 2


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """How much the second run differs from the first on the same examples, in the same order."""
    if len(first) != len(second) or not first:
        raise InputError(
            f"the runs have {len(first)} and {len(second)} values; a paired difference needs the same "
            "examples in both, at least one."
        )
    changes = [b - a for a, b in zip(first, second, strict=True)]
    higher, lower = sum(c > 0 for c in changes), sum(c < 0 for c in changes)
    binary = _are_binary(first) and _are_binary(second)
    return Difference(
        n=len(changes),
        mean=fmean(changes),
        interval=_newcombe(first, second) if binary else t_interval(changes),
        method="newcombe" if binary else "t",
        higher=higher,
        lower=lower,
        p_value=sign_test(higher, lower),
    )


def sign_test(higher: int, lower: int) -> float:
    """Two-sided exact probability of so uneven a split, or more, if both ways were equally likely."""
    if min(higher, lower) < 0:
        raise InputError(f"higher is {higher}, lower is {lower}; counts are not negative.")
    trials = higher + lower
    tail = sum(math.comb(trials, k) for k in range(min(higher, lower) + 1))
    return min(1.0, 2 * tail / (1 << trials))


def _newcombe(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Wilson's intervals of both shares, joined with their correlation."""
    pairs = [(bool(b), bool(a)) for a, b in zip(first, second, strict=True)]
    both, only_second, only_first, neither = (
        pairs.count(kind) for kind in ((True, True), (True, False), (False, True), (False, False))
    )
    n = len(pairs)
    p2, p1 = (both + only_second) / n, (both + only_first) / n
    w2, w1 = wilson(both + only_second, n), wilson(both + only_first, n)
    product = (both + only_second) * (only_first + neither) * (both + only_first) * (only_second + neither)
    excess: float = both * neither - only_second * only_first
    if excess > 0:
        excess = max(excess - n / 2, 0)  # method 10's correction: a correlation is not overstated
    phi = excess / math.sqrt(product) if product else 0.0
    below, above = p2 - w2.low, w1.high - p1
    low = p2 - p1 - math.sqrt(max(0.0, below**2 - 2 * phi * below * above + above**2))
    below, above = p1 - w1.low, w2.high - p2
    high = p2 - p1 + math.sqrt(max(0.0, below**2 - 2 * phi * below * above + above**2))
    return Interval(low, high)


def _t_within(value: float, freedom: int) -> float:
    """Probability that |t| <= value: the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(value / math.sqrt(freedom))
    cos2 = math.cos(angle) ** 2
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cos2 * (k - 1) / k
        total += term
    total *= math.sin(angle)
    return (angle + total) * 2 / math.pi if odd else total


def _are_binary(values: Sequence[float]) -> bool:
    return all(value in (0, 1) for value in values)


def _ends(interval: Interval | None) -> dict[str, float | None]:
    return {
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
    }
