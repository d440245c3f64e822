"""How many replicas there should be, by what they have to do. The rule is Ray's and the planner's."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dgemma.errors import InputError


@dataclass(frozen=True, kw_only=True)
class AutoscalingRule:
    """target: the share of all slots that should be in use. Waiting requests count as if they had one.

    Replicas are added at once, and taken away after the load has been less for `down_after_s`.
    """

    min_replicas: int = 1
    max_replicas: int
    target: float = 0.7
    down_after_s: float = 300.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise InputError.about(
                "max_replicas", f"is {self.max_replicas}; it must be at least {max(1, self.min_replicas)}."
            )
        if not 0 < self.target <= 1:
            raise InputError.about("target", f"is {self.target}; it must be more than 0 and at most 1.")


class Autoscaler:
    """less_since: when the load became less than the replicas are for, if it is."""

    def __init__(self, rule: AutoscalingRule, less_since: float | None = None) -> None:
        self._rule = rule
        self.less_since = less_since

    def wanted(self, *, replicas: int, slots_each: int, requests: int, now: float) -> int:
        """replicas: that run or start. requests: running and waiting on all of them."""
        rule = self._rule
        needed = math.ceil(requests / (slots_each * rule.target))
        needed = min(max(needed, rule.min_replicas), rule.max_replicas)
        if needed >= replicas:
            self.less_since = None
            return needed
        if self.less_since is None:
            self.less_since = now
        return needed if now - self.less_since >= rule.down_after_s else replicas
