"""Machines side by side: what two languages share, and what one has alone."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.constraint import product
from dgemma.constraint.automaton import Clock, build
from dgemma.constraint.pattern import parse
from dgemma.constraint.product import both, minus
from dgemma.errors import InputError

PATTERNS = st.sampled_from(["a*", "[ab]{1,3}", "(ab|é)*", "[^a]*", ".{2,4}", "b|", "é+", "[a-z]*b"])


@given(PATTERNS, PATTERNS, st.lists(st.text(alphabet="abé", max_size=5), max_size=20))
@settings(max_examples=80, deadline=None, derandomize=True, database=None)
def test_both_and_minus_are_what_re_says(first: str, second: str, texts: list[str]) -> None:
    shared, alone = (
        both(parse(first), parse(second), Clock(30)),
        minus(parse(first), parse(second), Clock(30)),
    )
    for text in ("", *texts):
        in_first, in_second = re.fullmatch(first, text), re.fullmatch(second, text)
        assert (shared is not None and build(shared).matches(text)) == bool(in_first and in_second)
        assert (alone is not None and build(alone).matches(text)) == bool(in_first and not in_second)


def test_a_product_of_too_many_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "MAX_STATES", 100)
    with pytest.raises(InputError, match="more than 100 states"):
        both(parse("(a{13})*b"), parse("(a{17})*b"), Clock(30))
