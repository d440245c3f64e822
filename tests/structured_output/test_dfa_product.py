"""Product construction: intersection and difference of two languages."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.errors import InputError
from dgemma.structured_output import dfa as dfa_module
from dgemma.structured_output.budget import TimeBudget
from dgemma.structured_output.dfa import build_dfa, difference, intersection
from dgemma.structured_output.regex import parse

PATTERNS = st.sampled_from(["a*", "[ab]{1,3}", "(ab|é)*", "[^a]*", ".{2,4}", "b|", "é+", "[a-z]*b"])


@given(PATTERNS, PATTERNS, st.lists(st.text(alphabet="abé", max_size=5), max_size=20))
@settings(max_examples=80, deadline=None, derandomize=True, database=None)
def test_intersection_and_difference_agree_with_re(first: str, second: str, texts: list[str]) -> None:
    shared, alone = (
        intersection(parse(first), parse(second), TimeBudget(30)),
        difference(parse(first), parse(second), TimeBudget(30)),
    )
    for text in ("", *texts):
        in_first, in_second = re.fullmatch(first, text), re.fullmatch(second, text)
        assert (shared is not None and build_dfa(shared).matches(text)) == bool(in_first and in_second)
        assert (alone is not None and build_dfa(alone).matches(text)) == bool(in_first and not in_second)


def test_a_product_of_too_many_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dfa_module, "MAX_STATES", 100)
    with pytest.raises(InputError, match="more than 100 states"):
        intersection(parse("(a{13})*b"), parse("(a{17})*b"), TimeBudget(30))
