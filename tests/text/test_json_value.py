"""Only plain, bounded JSON gets through."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.errors import InputError
from dgemma.text.json_value import MAX_DEPTH, JsonReader

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20
)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@settings(deadline=None)
@given(values)
def test_json_values_are_copied_as_they_are(value: Any) -> None:
    assert JsonReader().read(value, "it") == value


def test_subclasses_become_plain_types() -> None:
    class Kind(StrEnum):
        A = "a"

    class Whole(int):
        pass

    class Real(float):
        pass

    copy = JsonReader().read([Kind.A, Whole(7), Real(0.5), (1,)], "it")
    assert copy == ["a", 7, 0.5, [1]]
    assert [type(item) for item in copy] == [str, int, float, list]


def test_depth_is_bounded_even_for_cycles() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    JsonReader().read(nested(MAX_DEPTH), "it")
    for value in (nested(MAX_DEPTH + 1), cycle):
        with pytest.raises(InputError, match="it is nested deeper than 32 levels"):
            JsonReader().read(value, "it")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (float("nan"), "it holds nan; JSON has finite numbers only"),
        (float("-inf"), "it holds -inf"),
        (1 << 5000, "it holds an integer of 5001 bits"),
        ({1: 2}, "it has a key of type int"),
        ({"a": {1, 2}}, "it holds a value of type set"),
        (b"abc", "it holds a value of type bytes"),
        (["ab\udc00"], r"it holds the lone surrogate U\+DC00 at position 2"),
        ({"\ud800": 1}, r"it holds the lone surrogate U\+D800 at position 0"),
    ],
)
def test_other_values_are_refused_by_name(value: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        JsonReader().read(value, "it")


def test_one_budget_serves_the_whole_chat() -> None:
    reader = JsonReader(num_values_left=3, num_chars_left=5)
    reader.read(["abcd"], "it")
    with pytest.raises(InputError, match="more than 16777216 characters"):
        reader.text("ef", "it")
    with pytest.raises(InputError, match="more than 1000000 JSON values"):
        reader.read([1, 2], "it")
