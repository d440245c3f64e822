"""Replicas are added at once and taken away late, between their limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgemma.errors import InputError
from dgemma.scale.autoscaling import Autoscaler, AutoscalingRule


def test_replicas_come_at_once_and_go_when_the_load_stays_less() -> None:
    scaler = Autoscaler(AutoscalingRule(max_replicas=8, target=0.5, down_after_s=60))
    assert scaler.wanted(replicas=1, slots_each=4, requests=7, now=0) == 4
    assert scaler.wanted(replicas=4, slots_each=4, requests=1, now=10) == 4
    assert scaler.wanted(replicas=4, slots_each=4, requests=1, now=69) == 4
    assert scaler.wanted(replicas=4, slots_each=4, requests=8, now=70) == 4  # as much again: it starts anew
    assert scaler.wanted(replicas=4, slots_each=4, requests=1, now=80) == 4
    assert scaler.wanted(replicas=4, slots_each=4, requests=1, now=140) == 1


@given(st.integers(1, 50), st.integers(0, 10_000))
def test_the_limits_hold(replicas: int, requests: int) -> None:
    scaler = Autoscaler(AutoscalingRule(min_replicas=2, max_replicas=9, down_after_s=0))
    assert 2 <= scaler.wanted(replicas=replicas, slots_each=4, requests=requests, now=0) <= 9


@pytest.mark.parametrize(
    "wrong", [{"max_replicas": 0}, {"max_replicas": 1, "min_replicas": 2}, {"max_replicas": 2, "target": 0}]
)
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError):
        AutoscalingRule(**wrong)  # type: ignore[arg-type]
