"""Numbers between bounds are exactly those that Python's own comparison puts there."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from constraint_texts import Sampler
from dgemma.structured_output.budget import TimeBudget
from dgemma.structured_output.dfa import DFA, build_dfa
from dgemma.structured_output.json_schema.numbers import (
    NumberBounds,
    integers_between,
    multiples,
    non_multiples,
    not_equal_to,
    numbers_between,
)
from dgemma.structured_output.regex import Node

ENDS = (
    st.none()
    | st.integers(-1200, 1200)
    | st.integers(-(10**20), 10**20)
    | st.floats(-1000, 1000)
    | st.sampled_from([0.1, 0.3, -0.25, 1e-7, 999.9999999999999])
)
BOUNDS = st.builds(NumberBounds, ENDS | st.just(-1e300), ENDS | st.just(1e300), st.booleans(), st.booleans())


def budget() -> TimeBudget:
    """A new one for each: what counts is the thread's time, and other tests had some of it."""
    return TimeBudget(60)


def built(node: Node | None) -> DFA | None:
    return None if node is None else build_dfa(node, budget())


def takes(dfa: DFA | None, text: str) -> bool:
    return dfa is not None and dfa.matches(text)


@given(
    BOUNDS,
    st.lists(st.integers(-2000, 2000) | st.integers(-(10**18) + 1, 10**18 - 1), max_size=20),
)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_integers_are_those_between_the_bounds(bounds: NumberBounds, values: list[int]) -> None:
    dfa = built(integers_between(bounds))
    ends = [
        int(end) + by
        for end in (bounds.low, bounds.high)
        if end is not None and abs(end) < 1e30
        for by in (-1, 0, 1)
    ]
    for value in [*values, *(end for end in ends if abs(end) < 10**18)]:
        assert takes(dfa, str(value)) == bounds.hold(value), (bounds, value)
    assert not takes(dfa, "-0")
    assert not takes(dfa, "007")


@given(BOUNDS, st.lists(st.decimals(-1500, 1500, places=4), max_size=20))
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_numbers_are_those_between_the_bounds(bounds: NumberBounds, values: list[object]) -> None:
    dfa = built(numbers_between(bounds, budget()))
    for value in values:
        text = str(value)
        if "E" not in text and not (text.startswith("-") and float(text) == 0):
            assert takes(dfa, text) == bounds.hold(json.loads(text)), (bounds, text)
    for end in (bounds.low, bounds.high):
        if isinstance(end, float) and len(repr(end)) < 12 and "e" not in repr(end) and end:
            assert takes(dfa, repr(end)) == bounds.hold(end)
    if dfa is not None:
        for text in Sampler(dfa).texts(20, 30):
            assert bounds.hold(json.loads(text)), (bounds, text)


@given(BOUNDS)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_fractions_are_no_integers_to_a_float(bounds: NumberBounds) -> None:
    dfa = built(numbers_between(bounds, budget(), only_fractions=True))
    if dfa is not None:
        for text in Sampler(dfa).texts(20, 30):
            value = json.loads(text)
            assert bounds.hold(value)
            assert value != int(value)


@pytest.mark.parametrize("of", [1, 2, 7, 250, 0.5, 0.25, 1.5, 3.0, 12.5])
def test_multiples_are_so_exactly_and_to_a_float(of: float) -> None:
    bounds = NumberBounds(-5000, 5000)
    node = numbers_between(bounds, budget())
    assert node is not None
    dfa, others = built(multiples(node, of, bounds, budget())), built(non_multiples(node, of, budget()))
    for n in range(-400, 400):
        value = n / 8
        is_multiple = (Fraction(value) / Fraction(of)).denominator == 1
        assert takes(dfa, repr(value)) == (is_multiple and repr(value) != "-0.0"), value
        if value:
            assert takes(others, repr(value)) == (not is_multiple), value
    assert dfa is not None
    for text in Sampler(dfa).texts(30, 20):
        assert json.loads(text) / of == int(json.loads(text) / of)


def test_a_large_divisor_is_taken_between_bounds() -> None:
    bounds = NumberBounds(1, 10**7)
    node = integers_between(bounds)
    assert node is not None
    dfa = built(multiples(node, 250_007, bounds, budget()))
    assert takes(dfa, "500014")
    assert not takes(dfa, "500015")
    assert multiples(node, 10**9, bounds, budget()) is None


def test_a_divisor_may_be_too_large_for_a_float() -> None:
    bounds = NumberBounds(1 - 2**1024, 2**1024 - 1)
    node = integers_between(bounds)
    assert node is not None
    dfa = built(multiples(node, 2**1023, bounds, budget()))
    assert takes(dfa, "0")
    assert not takes(dfa, "1")


@pytest.mark.parametrize("value", [0, 5, -3, 1.5, 0.001, 100.0])
def test_what_is_unlike_a_number_is_so_in_every_spelling(value: float) -> None:
    node = numbers_between(NumberBounds(), budget(), plain=True)
    assert node is not None
    dfa = built(not_equal_to(node, value, budget()))
    for text in (repr(value), repr(float(value)), f"{value:.6f}", f"-{value:.1f}" if value == 0 else "5e0"):
        assert not takes(dfa, text), text
    assert takes(dfa, "7.25")


def test_a_free_number_is_finite() -> None:
    node = numbers_between(NumberBounds(), budget())
    assert node is not None
    dfa = build_dfa(node, budget())
    for text in ("1e-7", "1.5E+99", "-0.1", "123456789012345", "5e-324"):
        assert dfa.matches(text)
    for text in ("1e999", "1e100", "01", ".5", "1.", "+1", "1234567890123456"):
        assert not dfa.matches(text)
