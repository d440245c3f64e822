"""Near words are one slip away, look like words, and are no more than were asked for."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dgemma.tasks.spelling import near_words
from dgemma.tasks.units import distance
from tasks.scripted import TOKENIZER, encode

WORDS = ["function", "returns", "number", "Value", "LIST", "the", "bytes", "naïve"]
slips = st.tuples(st.sampled_from(WORDS), st.integers(0, 9), st.sampled_from("abex")).map(
    lambda c: c[0][: c[1]] + c[2] + c[0][c[1] + 1 :]
)


@settings(max_examples=40)
@given(
    blank=st.sampled_from(["", " ", "  "]),
    word=slips | st.text(alphabet="aeinrt", min_size=1, max_size=7),
    known=st.sets(slips, max_size=4),
    most=st.integers(0, 15),
)
@example(blank=" ", word="functoin", known=set(), most=3)
def test_near_words_are_one_slip_away_and_no_more_than_asked_for(
    blank: str, word: str, known: set[str], most: int
) -> None:
    found = near_words(blank + word, TOKENIZER, known | {word}, most=most)
    assert len(found) <= most
    assert len(set(found)) == len(found)
    for text in found:
        assert text.startswith(blank)
        assert text != blank + word
        assert distance(word, text[len(blank) :]) == 1
        assert (
            text[len(blank) :] in known
            or len(encode(text)) < len(encode(blank + word))
            or (len(encode(text)) == 1)
        )


@pytest.mark.parametrize("slip", ["functoin", "fnction", "functiion", "funktion", "unction"])
def test_each_kind_of_slip_is_found(slip: str) -> None:
    assert " function" in near_words(f" {slip}", TOKENIZER, (), most=12)


def test_words_known_from_the_text_come_first() -> None:
    """A name of the text's own may be many tokens long."""
    assert len(encode(" qwzkrt")) > 1
    assert near_words(" qwzkrrt", TOKENIZER, {"qwzkrt"}, most=12)[0] == " qwzkrt"
    assert near_words(" qwzkrrt", TOKENIZER, {"qwzkrt"}, most=1) == [" qwzkrt"]


def test_capitals_stay_capitals() -> None:
    assert "FUNCTION" in near_words("FUNCTIN", TOKENIZER, {"FUNCTION"}, most=12)
    assert "Function" in near_words("Functoin", TOKENIZER, {"Function"}, most=12)


@pytest.mark.parametrize("text", ["", " ", "of", " of", "x1y", "a_b", "a.b", "two words", "a" * 25, "12345"])
def test_what_is_no_word_of_a_fair_length_has_no_near_ones(text: str) -> None:
    assert near_words(text, TOKENIZER, {"off", "if"}, most=12) == []
