"""95 % confidence intervals of proportions, means, and paired differences of two runs. No torch.

- Scores that are all 0 or 1: Wilson's score interval, whose coverage holds for few examples and near 0 and 1.
- Other scores: Student's t.
- Two runs on the same examples: Newcombe's interval for paired proportions (1998, method 10), t for the
  differences of other scores, and an exact sign test, which for 0 and 1 is McNemar's test.

SciPy computes the distributions; it is imported when the first interval is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev
from typing import Any

from dgemma.errors import InputError

LEVEL = 0.95


def require_scipy() -> Any:
    """`scipy.stats`, or an error with the remedy. Call it before a long run that computes intervals."""
    try:
        from scipy import stats
    except ImportError as error:
        raise InputError(
            f"SciPy cannot be imported ({error}); intervals of scores need it. "
            "Run: pip install 'dgemma[eval]'"
        ) from None
    return stats


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean and its interval; a single value has an interval only if it is 0 or 1."""

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
    """The mean of `values` with its interval: Wilson's if all are 0 or 1, else Student's t."""
    if not values:
        raise InputError.about("values", "is empty; an estimate needs at least one value.")
    if _are_binary(values):
        interval: Interval | None = wilson(int(sum(values)), len(values))
        return Estimate(n=len(values), mean=fmean(values), interval=interval, method="wilson")
    return Estimate(n=len(values), mean=fmean(values), interval=t_interval(values), method="t")


@cache
def wilson(successes: int, n: int) -> Interval:
    """Wilson's score interval of a proportion."""
    if n < 1 or not 0 <= successes <= n:
        raise InputError.about(
            "successes", f"is {successes} of n {n}; it must be from 0 to n, and n at least 1."
        )
    found = require_scipy().binomtest(successes, n).proportion_ci(LEVEL, method="wilson")
    return Interval(float(found.low), float(found.high))


def t_interval(values: Sequence[float]) -> Interval | None:
    """Student's interval of a mean; None for fewer than two values, which have no variance."""
    if len(values) < 2:
        return None
    mean = fmean(values)
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean - half, mean + half)


@cache
def t_quantile(degrees: int) -> float:
    """The two-sided 95 % quantile of Student's t with `degrees` degrees of freedom."""
    if degrees < 1:
        raise InputError.about("degrees", f"is {degrees}; it must be at least 1.")
    return float(require_scipy().t.ppf((1 + LEVEL) / 2, degrees))


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """The difference of the second run from the first on the same examples, in the same order."""
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


@cache
def sign_test(higher: int, lower: int) -> float:
    """Two-sided exact p-value of the split under equal odds."""
    if min(higher, lower) < 0:
        raise InputError(f"higher is {higher}, lower is {lower}; counts are not negative.")
    if higher + lower == 0:
        return 1.0
    return float(require_scipy().binomtest(min(higher, lower), higher + lower).pvalue)


def _newcombe(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Wilson's intervals of both proportions, combined with their correlation."""
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
        excess = max(excess - n / 2, 0)  # continuity correction of method 10
    phi = excess / math.sqrt(product) if product else 0.0
    below, above = p2 - w2.low, w1.high - p1
    low = p2 - p1 - math.sqrt(max(0.0, below**2 - 2 * phi * below * above + above**2))
    below, above = p1 - w1.low, w2.high - p2
    high = p2 - p1 + math.sqrt(max(0.0, below**2 - 2 * phi * below * above + above**2))
    return Interval(low, high)


def _are_binary(values: Sequence[float]) -> bool:
    return all(value in (0, 1) for value in values)


def _ends(interval: Interval | None) -> dict[str, float | None]:
    return {
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
    }
