"""How many replicas a load needs, what they cost, and when a left-to-right server would cost less."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from dgemma.errors import InputError
from dgemma.plan.fleet import Fleet, LoadResult, simulate
from dgemma.plan.traffic import Traffic

_MOST_REPLICAS = 4096
_SHARE_OF_SEARCH, _SHARE_OF_ONE = 0.4, 0.12  # of the requests
_LEAST_S = 30.0  # of a trial
_LEAST_GOALS = 6  # and so many times the goal: a queue that grows without end must be seen to grow


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What the plan has to meet. p99_s: 99 of 100 whole answers come within it.

    requests: of the last simulation; the search takes fewer.
    """

    p99_s: float
    requests: int = 5000

    def is_met(self, found: LoadResult) -> bool:
        return found.quantile(0.99) <= self.p99_s


@dataclass(frozen=True)
class SizedFleet:
    """The fewest replicas that meet the goal, and what they do. rate_each: what one alone can take."""

    kind: str
    replicas: int
    rate_each: float
    found: LoadResult
    price: float | None  # of a device for an hour

    @property
    def price_per_million(self) -> float | None:
        """Of a million tokens of answers, all replicas paid for all the time."""
        if self.price is None or not self.found.tokens:
            return None
        return 1e6 * self.replicas * self.price / 3600 / self.found.tokens_per_s

    def facts(self) -> dict[str, Any]:
        found = self.found
        return {
            "kind": self.kind,
            "replicas": self.replicas,
            "requests_per_s_of_one": self.rate_each,
            "utilisation": found.utilisation,
            "rows_of_a_step": found.mean_rows,
            "tokens_per_s": found.tokens_per_s,
            "answer_p50_s": _finite(found.quantile(0.5)),
            "answer_p99_s": _finite(found.quantile(0.99)),
            "first_text_p50_s": _finite(found.quantile(0.5, "first_text")),
            "first_text_p99_s": _finite(found.quantile(0.99, "first_text")),
            "prefix_hit_share": found.hit_share,
            "requests": found.finished,
            "unfinished": found.unfinished,
            "retried": found.retried,
            "failures": found.failures,
            "price_per_million_tokens": self.price_per_million,
        }


@dataclass(frozen=True)
class Unreachable:
    """One request alone takes longer than the goal."""

    kind: str
    alone_s: float

    def facts(self) -> dict[str, Any]:
        return {"kind": self.kind, "replicas": None, "answer_alone_s": self.alone_s}


Plan = SizedFleet | Unreachable


def size(
    fleet: Fleet,
    traffic: Traffic,
    goal: Goal,
    *,
    kind: str = "diffusion",
    price: float | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> Plan:
    """fleet: of any number of replicas, without a rule of its own for it."""
    if fleet.autoscaling is not None:
        raise InputError.about("autoscaling", "is set; the planner looks for a number that does not change.")
    if not 0 < goal.p99_s < math.inf:
        raise InputError.about("p99_s", f"is {goal.p99_s}; it must be more than 0.")
    one = replace(fleet, replicas=1, mean_life_s=math.inf)
    alone = _trial(one, replace(traffic, rate=1e-3), 100, goal)
    if not goal.is_met(alone):
        return Unreachable(kind, max(alone.answer_s))

    def tried(count: int, requests: int) -> LoadResult:
        log(f"{kind}: {count} replicas")
        return _trial(replace(fleet, replicas=count), traffic, requests, goal)

    rate_each = _most_rate(one, traffic, goal, 1 / alone.quantile(0.5), log, kind)
    # Many replicas take more each than one alone, whose queue has nowhere else to go.
    count = _fewest(
        math.ceil(0.8 * traffic.rate / rate_each),
        lambda count: goal.is_met(tried(count, int(_SHARE_OF_SEARCH * goal.requests))),
    )
    while not goal.is_met(found := tried(count, goal.requests)):  # a longer look than the search's
        count += max(1, count // 50)
        if count > _MOST_REPLICAS:
            raise InputError(f"more than {_MOST_REPLICAS} replicas would be needed.")
    return SizedFleet(kind, count, rate_each, found, price)


def dearer_from(diffusion: Plan, causal: Plan) -> float | None:
    """Requests per second from which left to right needs fewer devices; None: never, or it is too slow."""
    if isinstance(diffusion, Unreachable) or isinstance(causal, Unreachable):
        return None
    # With one replica both cost the same; the first that needs a second one is dearer.
    return diffusion.rate_each if causal.rate_each > diffusion.rate_each else None


def _fewest(guess: int, is_enough: Callable[[int], bool]) -> int:
    """By doubling or halving the way from the guess, then between the last two, to 2 %."""
    low, high, step = 0, max(1, guess), max(1, guess // 10)
    while high > _MOST_REPLICAS or not is_enough(high):
        if high >= _MOST_REPLICAS:
            raise InputError(f"more than {_MOST_REPLICAS} replicas would be needed.")
        low, high, step = high, min(high + step, _MOST_REPLICAS), 2 * step
    while low == 0 and high > 1:
        if is_enough(fewer := max(1, high - step)):
            high, step = fewer, 2 * step
        else:
            low = fewer
    while high - low > max(1, high // 50):
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _most_rate(
    one: Fleet, traffic: Traffic, goal: Goal, guess: float, log: Callable[[str], None], kind: str
) -> float:
    """Requests per second that a single replica takes within the goal, to 5 %."""
    low, high = 0.0, guess
    while True:
        log(f"{kind}: one replica at {high:.3g} requests/s")
        if not goal.is_met(
            _trial(one, replace(traffic, rate=high), int(_SHARE_OF_ONE * goal.requests), goal)
        ):
            break
        low, high = high, 2 * high
    while high - low > 0.05 * high:
        middle = (low + high) / 2
        log(f"{kind}: one replica at {middle:.3g} requests/s")
        if goal.is_met(_trial(one, replace(traffic, rate=middle), int(_SHARE_OF_ONE * goal.requests), goal)):
            low = middle
        else:
            high = middle
        if high < 1e-3 * guess:
            break
    return low or high


def _trial(fleet: Fleet, traffic: Traffic, requests: int, goal: Goal) -> LoadResult:
    duration_s = max(_LEAST_S, _LEAST_GOALS * goal.p99_s, requests / traffic.rate)
    too_many = 0.015 * traffic.rate * duration_s + 3  # late ones: the goal will be missed, whatever follows
    late = 0

    def is_lost(found: LoadResult) -> bool:
        nonlocal late
        late += found.answer_s[-1] > goal.p99_s
        return late > too_many

    return simulate(fleet, traffic, duration_s=duration_s, warm_up_s=duration_s / 10, give_up=is_lost)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def traffic_facts(traffic: Traffic) -> dict[str, Any]:
    return asdict(traffic)
