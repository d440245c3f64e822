"""Patterns are read as `re` reads them, or refused with a word on why."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.constraint.automaton import build
from dgemma.constraint.pattern import parse
from dgemma.errors import InputError

ATOMS = st.sampled_from(
    [
        "a",
        "b",
        "é",
        ".",
        "[ab]",
        "[^a]",
        "[a-cé-ü]",
        r"\d",
        r"\w",
        r"\.",
        r"[\d_]",
        r"\x61",
        "[]a]",
        "[^]a]",
        r"\t",
    ]
)
MARKS = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,3}", "{,2}", "{1,}"])


def joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, MARKS).map(lambda pair: f"({pair[0]}){pair[1]}"),
    )


PATTERNS = st.recursive(ATOMS, joined, max_leaves=6)
TEXTS = st.text(alphabet="abcé.\td1_\n", max_size=6)


@given(PATTERNS, st.lists(TEXTS, max_size=20))
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_a_pattern_takes_the_texts_that_re_takes(pattern: str, texts: list[str]) -> None:
    machine, known = build(parse(pattern)), re.compile(pattern, re.ASCII)
    for text in ("", *texts):
        assert machine.matches(text) == (known.fullmatch(text) is not None), (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"(a)\1", "not supported"),
        ("(?=a)", "not supported"),
        (r"\bword", "not supported"),
        ("a*?", "lazy"),
        ("a**", "two repetitions"),
        ("*a", "repetition of nothing"),
        ("(a", "without its"),
        ("a)", "without its"),
        ("[a", "without its"),
        ("a{3,2}", "before its beginning"),
        ("a{99999}", "more than"),
        ("[b-a]", "before its beginning"),
        (r"\xzz", "hexadecimal"),
        ("a\\", "at its end"),
        ("a^b", "not at the beginning"),
        ("a$b", "not at the end"),
        ("(" * 300 + ")" * 300, "deeper"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(pattern: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        parse(pattern)


def test_anchors_at_the_ends_change_nothing() -> None:
    assert parse("^ab$") == parse("ab")


def test_braces_that_count_nothing_mean_themselves() -> None:
    assert build(parse("a{x}")).matches("a{x}")
