"""Patterns are read as `re` reads them, or refused with a reason."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dgemma.errors import InputError
from dgemma.structured_output.dfa import build_dfa
from dgemma.structured_output.regex import parse, parse_search
from sizes import cases

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
MARKS = st.sampled_from(["*", "+?", "+", "?", "{2}", "{1,2}", "{0,3}", "{,2}", "{1,}"])


def joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, MARKS).map(lambda pair: f"({pair[0]}){pair[1]}"),
    )


PATTERNS = st.recursive(ATOMS, joined, max_leaves=6)
TEXTS = st.text(alphabet="abcé.\td1_\n", max_size=6)


@given(PATTERNS, st.lists(TEXTS, max_size=20))
@settings(max_examples=cases(300, 150), deadline=None, derandomize=True, database=None)
def test_a_pattern_accepts_the_texts_that_re_accepts_in_both_dialects(pattern: str, texts: list[str]) -> None:
    dfa, ascii_, wide = build_dfa(parse(pattern)), re.compile(pattern, re.ASCII), re.compile(pattern)
    for text in ("", *texts):
        both = ascii_.fullmatch(text) is not None and wide.fullmatch(text) is not None
        if dfa.matches(text):
            assert both, (pattern, text)
        elif text.isascii():  # what is not may be read in different ways at different places
            assert not both, (pattern, text)


def test_what_python_alone_takes_for_a_space_is_no_part_of_a_word() -> None:
    dfa = build_dfa(parse(r"\s*\S+\s*"))
    assert dfa.matches(" word\n")
    assert not dfa.matches("two\x1dwords")


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"(a)\1", "not supported"),
        ("(?=a)", "not supported"),
        (r"\bword", "not supported"),
        ("a*+", "possessive"),
        ("^*", "repetition of nothing"),
        ("(^a)*", "not at the beginning"),
        (r"\01", "differently"),
        ("[^\0-\U0010ffff]", "without a character"),
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
    assert build_dfa(parse("a{x}")).matches("a{x}")


SEARCHED = st.lists(
    st.tuples(st.sampled_from(["", "^"]), PATTERNS, st.sampled_from(["", "$"])), min_size=1, max_size=3
)


@given(SEARCHED, st.booleans(), st.lists(TEXTS, max_size=20))
@settings(max_examples=80, deadline=None, derandomize=True, database=None)
def test_a_search_finds_what_re_finds(
    alternatives: list[tuple[str, str, str]], grouped: bool, texts: list[str]
) -> None:
    pattern = "|".join(map("".join, alternatives))
    pattern = f"({pattern})" if grouped else pattern
    assume(not re.search(r"\[\^?\]|\{,", pattern))
    certain, possible = build_dfa(parse_search(pattern)), build_dfa(parse_search(pattern, "possible"))
    ascii_, wide = re.compile(pattern, re.ASCII), re.compile(pattern)
    for text in ("", *texts):
        both_find = ascii_.search(text) and wide.search(text)
        either_finds = ascii_.search(text) or wide.search(text)
        assert not certain.matches(text) or both_find, (pattern, text)
        assert possible.matches(text) or not either_finds, (pattern, text)
        if text.isascii() and "\n" not in text:
            assert certain.matches(text) == bool(both_find), (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "character", "certain", "possible"),
    [
        (r"^\d$", "٣", False, True),
        (r"^\D$", "٣", False, True),
        (r"^[^\d]$", "٣", False, True),
        (r"^\D$", "x", True, True),
        (r"^\w$", "é", False, True),
        (r"^[^\W]$", "é", False, True),
        (r"^\s$", "\ufeff", False, True),
        (r"^\S$", "\u2003", False, True),
        (r"^.$", "\u2028", False, True),
        (r"^.$", "\n", False, False),
        (r"^a$", "a\n", False, True),
    ],
)
def test_kinds_of_characters_match_certainly_only_where_all_dialects_agree(
    pattern: str, character: str, certain: bool, possible: bool
) -> None:
    assert build_dfa(parse_search(pattern)).matches(character) == certain
    assert build_dfa(parse_search(pattern, "possible")).matches(character) == possible


@pytest.mark.parametrize("pattern", ["[]a]", "[^]a]", "a{,2}", r"\a", r"\U00000041", r"\01"])
def test_what_dialects_read_differently_is_refused_in_a_search(pattern: str) -> None:
    with pytest.raises(InputError, match="differently"):
        parse_search(pattern)


def test_a_long_pattern_is_refused() -> None:
    with pytest.raises(InputError, match="characters; at most"):
        parse("a" * (1 << 20) + "a")
