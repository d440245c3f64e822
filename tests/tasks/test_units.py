"""Units cover a text once, words as wholes; a distance is the fewest slips between two texts."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dgemma.tasks.edit import _token_texts
from dgemma.tasks.units import Unit, distance, units_of
from tasks.scripted import TOKENIZER, encode

pieces = st.lists(
    st.sampled_from(
        ["", " ", "a", " a", "b1", "_", " x_y", ".", "(", "\n", "é", "é f", " 日本", "  a", "a b"]
    ),
    max_size=12,
)
few_letters = st.text(alphabet="abc", max_size=6)


def pieces_of(text: str) -> list[str]:
    return _token_texts(TOKENIZER, tuple(encode(text)))


def words_of(text: str) -> list[str]:
    return [unit.text for unit in units_of(pieces_of(text))]


@settings(max_examples=150)
@given(pieces)
@example([])
@example([""])
@example(["", "", "a"])
@example(["a", ""])
def test_every_token_is_part_of_exactly_one_unit(found: list[str]) -> None:
    units = units_of(found)
    assert [at for unit in units for at in range(unit.start, unit.stop)] == list(range(len(found)))
    assert all(unit.start < unit.stop for unit in units)
    assert all(unit.text == "".join(found[unit.start : unit.stop]) for unit in units)


@settings(max_examples=150)
@given(pieces)
def test_a_token_without_a_text_of_its_own_belongs_to_the_next_that_has(found: list[str]) -> None:
    ends = {unit.stop for unit in units_of(found)}
    for at, piece in enumerate(found[:-1]):
        assert piece or at + 1 not in ends, f"a unit ends after token {at}"


def test_pieces_of_a_word_are_one_unit_with_the_blank_before_it() -> None:
    assert words_of("The functoin returns x_1.") == ["The", " functoin", " returns", " x_1", "."]
    assert len(encode(" functoin")) > 1, "or there was nothing to join"


def test_what_is_no_word_joins_nothing() -> None:
    assert words_of("a(b)") == ["a", "(", "b", ")"]
    assert units_of(["a", " ", "b"]) == [Unit(0, 1, "a"), Unit(1, 2, " "), Unit(2, 3, "b")]


def test_letters_made_of_bytes_join_their_word() -> None:
    assert words_of("a naïvely put") == ["a", " naïvely", " put"]


def test_a_letter_made_of_bytes_at_the_end_of_a_word_leaves_the_next_one_whole() -> None:
    assert words_of("the café functoin") == ["the", " café", " functoin"]


# Distance


@cache
def fewest_slips(one: str, other: str) -> int:
    """By definition: the last letters are kept or changed, one is left out or added, or two are swapped."""
    if not one or not other:
        return len(one) + len(other)
    ways = [
        fewest_slips(one[:-1], other[:-1]) + (one[-1] != other[-1]),
        fewest_slips(one[:-1], other) + 1,
        fewest_slips(one, other[:-1]) + 1,
    ]
    if len(one) > 1 and len(other) > 1 and one[-2:] == other[-1] + other[-2]:
        ways.append(fewest_slips(one[:-2], other[:-2]) + 1)
    return min(ways)


@settings(max_examples=200)
@given(few_letters, few_letters)
@example("abc", "acb")
@example("ca", "abc")
@example("abcb", "bacb")
def test_distance_is_the_recursive_one(one: str, other: str) -> None:
    assert distance(one, other) == distance(other, one) == fewest_slips(one, other)


@settings(max_examples=200)
@given(few_letters, few_letters, st.integers(0, 6))
def test_a_limit_changes_no_distance_up_to_it(one: str, other: str, most: int) -> None:
    true = fewest_slips(one, other)
    found = distance(one, other, most)
    assert found == true if true <= most else found > most


@pytest.mark.parametrize(("one", "other", "most"), [("abc", "bcxy", 1)])
def test_above_the_limit_a_distance_is_the_limit_and_one(one: str, other: str, most: int) -> None:
    assert fewest_slips(one, other) > most
    assert distance(one, other, most) == most + 1


def test_long_texts_that_differ_a_lot_are_given_up_early() -> None:
    """Ten thousand letters against as many would be a hundred million steps."""
    assert distance("a" * 10_000, "b" * 10_000, 2) == 3
    assert distance("a" * 10_000, "", 2) == 3


@pytest.mark.parametrize(
    ("one", "other", "slips"),
    [("", "", 0), ("function", "function", 0), ("functoin", "function", 1), ("cat", "dog", 3), ("ab", "", 2)],
)
def test_distances_of_known_words(one: str, other: str, slips: int) -> None:
    assert distance(one, other) == slips
