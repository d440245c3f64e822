"""Given text stays as it is, wherever it is cut; what was taken back comes again in the gap."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dgemma.tasks.borders import Borders, healed_borders, plain_borders
from tasks.scripted import TOKEN_TEXTS, TOKENIZER, encode

# The tokenizer writes a blank as U+2581 and cannot tell the two apart.
any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=12)
code = st.text(alphabet="return f(x)_:\n\t.,12é😀\r", max_size=20)
english = st.sampled_from(
    [
        "for i in range(10):\n    return self.value\n",
        "The functoin returns the number of bytes, and the list of files.",
        "Größe: 12 µm, naïve café 日本 😀👍🏽 end\r\n\ttab  two blanks",
        "x = {'key': [1, 2, 345]}  # __init__ returned",
    ]
)
cut_texts = st.tuples(any_text | code | english, st.integers(0, 70)).map(
    lambda c: (c[0][: c[1]], c[0][c[1] :])
)


def texts_of(ids: tuple[int, ...]) -> list[str]:
    return [TOKEN_TEXTS.text_of(id_) or "" for id_ in ids]


@settings(max_examples=120)
@given(cut=cut_texts)
@example(cut=("", ""))
@example(cut=("", "return"))
@example(cut=("retur", ""))
@example(cut=("    retur", "n"))
@example(cut=("😀", "😀"))
def test_healing_never_changes_the_given_text(cut: tuple[str, str]) -> None:
    prefix, suffix = cut
    plain = plain_borders(TOKENIZER, prefix, suffix)
    healed = healed_borders(TOKENIZER, TOKEN_TEXTS, prefix, suffix)
    for borders in (plain, healed):
        assert TOKENIZER.decode(borders.before) + borders.head == prefix
        assert borders.tail + TOKENIZER.decode(borders.after) == suffix
        assert bool(borders.head) == bool(borders.first)
        assert bool(borders.tail) == bool(borders.last)
    assert healed.before == plain.before[: len(healed.before)]
    assert healed.after == plain.after[len(plain.after) - len(healed.after) :]
    assert not plain.head + plain.tail


@settings(max_examples=120)
@given(cut=cut_texts)
def test_every_word_a_gap_may_begin_or_end_with_holds_what_was_taken_back(cut: tuple[str, str]) -> None:
    borders = healed_borders(TOKENIZER, TOKEN_TEXTS, *cut)
    assert all(text.startswith(borders.head) for text in texts_of(borders.first))
    assert all(text.endswith(borders.tail) for text in texts_of(borders.last))


@settings(max_examples=120)
@given(cut=cut_texts)
def test_where_nothing_was_taken_back_no_word_extends_the_border(cut: tuple[str, str]) -> None:
    borders = healed_borders(TOKENIZER, TOKEN_TEXTS, *cut)
    plain = plain_borders(TOKENIZER, *cut)
    if plain.before and not borders.head and (text := TOKEN_TEXTS.text_of(plain.before[-1])):
        assert len(TOKEN_TEXTS.beginning_with(text)) == 1
    if plain.after and not borders.tail and (text := TOKEN_TEXTS.text_of(plain.after[0])):
        assert len(TOKEN_TEXTS.ending_with(text)) == 1


def test_a_word_cut_in_two_is_taken_back_as_a_whole() -> None:
    assert len(encode("retur")) > 1, "more than one word is to be taken back"
    borders = healed_borders(TOKENIZER, TOKEN_TEXTS, "retur", "")
    assert borders.head == "retur"
    assert borders.before == ()
    assert "return" in texts_of(borders.first)
    assert all(text.startswith("retur") for text in texts_of(borders.first))


def test_a_run_is_taken_back_up_to_the_blank_before_it() -> None:
    borders = healed_borders(TOKENIZER, TOKEN_TEXTS, "We may retur", "")
    assert borders.head == " retur"
    assert TOKENIZER.decode(borders.before) == "We may"
    assert " return" in texts_of(borders.first)


def test_a_blank_heals_to_all_words_with_a_blank_before_them() -> None:
    borders = healed_borders(TOKENIZER, TOKEN_TEXTS, "x = ", "")
    assert borders.head == " "
    assert set(borders.first) == {i for i in range(TOKENIZER.vocab_size) if _text(i).startswith(" ")}


def test_the_first_word_after_heals_to_words_that_end_with_it() -> None:
    borders = healed_borders(TOKENIZER, TOKEN_TEXTS, "", "ing the file")
    assert borders.tail == "ing"
    assert " being" in texts_of(borders.last)
    assert TOKENIZER.decode(borders.after) == " the file"


def test_single_bytes_are_never_taken_back() -> None:
    borders = healed_borders(TOKENIZER, TOKEN_TEXTS, "a 😀", "😀 b")
    assert (borders.head, borders.tail, borders.first, borders.last) == ("", "", (), ())
    assert borders == plain_borders(TOKENIZER, "a 😀", "😀 b")


@pytest.mark.parametrize(("prefix", "suffix"), [("", ""), ("", "n"), ("retur", ""), ("retur", "n")])
def test_without_text_there_is_nothing_to_heal(prefix: str, suffix: str) -> None:
    borders = healed_borders(TOKENIZER, TOKEN_TEXTS, prefix, suffix)
    assert bool(borders.head) == bool(prefix)
    assert bool(borders.tail) == bool(suffix)
    assert borders.fewest == bool(prefix or suffix)


@pytest.mark.parametrize("prefix", ["We inform", "We manage", "We prefer"])
def test_a_word_that_is_whole_already_may_stay_as_it_is(prefix: str) -> None:
    """ "inform" is two words of the vocabulary and the beginning of "information", and may be followed by a
    blank all the same."""
    borders = healed_borders(TOKENIZER, TOKEN_TEXTS, prefix, " you.")
    assert not borders.head or borders.head in texts_of(borders.first) or borders.run
    assert TOKENIZER.decode(borders.run) == borders.head


# Sets and insides


def borders_with(first: str = "", last: str = "") -> Borders:
    head = {"first": TOKEN_TEXTS.beginning_with(first), "head": first} if first else {}
    tail = {"last": TOKEN_TEXTS.ending_with(last), "tail": last} if last else {}
    return Borders(before=(), after=(), **head, **tail)  # type: ignore[arg-type]


def test_a_gap_with_plain_borders_may_have_any_words_and_any_length() -> None:
    borders = borders_with()
    assert borders.fewest == 0
    assert [borders.sets(length) for length in (0, 1, 2, 9)] == [{}, {}, {}, {}]


def test_healed_borders_limit_the_first_and_the_last_word() -> None:
    first, last = TOKEN_TEXTS.beginning_with("retu"), TOKEN_TEXTS.ending_with("ing")
    assert borders_with("retu").sets(3) == {0: first}
    assert borders_with("retu").sets(1) == {0: first}
    assert borders_with(last="ing").sets(3) == {2: last}
    assert borders_with(last="ing").sets(1) == {0: last}
    assert borders_with("retu", "ing").sets(3) == {0: first, 2: last}
    assert borders_with("retu", "ing").sets(2) == {0: first, 1: last}


def test_a_gap_that_must_hold_something_is_not_empty() -> None:
    for borders in (borders_with("retu"), borders_with(last="ing"), borders_with("retu", "ing")):
        assert borders.fewest == 1
        assert borders.sets(0) is None


def test_one_word_that_is_first_and_last_must_be_both() -> None:
    both = borders_with("ret", "n").sets(1)
    assert both is not None
    assert "return" in texts_of(both[0])
    assert all(text.startswith("ret") and text.endswith("n") for text in texts_of(both[0]))
    assert list(both[0]) == sorted(both[0])
    assert borders_with("retur", "(").sets(1) is None, "there is no such word"


@given(head=code, middle=any_text, tail=code)
def test_inside_is_what_stands_between_the_given_ends(head: str, middle: str, tail: str) -> None:
    borders = Borders(before=(), after=(), head=head, tail=tail)
    assert borders.inside(head + middle + tail) == middle


@pytest.mark.parametrize("text", ["", "return", "tion", "returtio", "rtion", " return action", "returti"])
def test_a_text_without_both_ends_has_no_inside(text: str) -> None:
    borders = Borders(before=(), after=(), head="retur", tail="tion")
    assert borders.inside(text) is None
    assert borders.inside("return action") == "n ac"


def test_ends_that_overlap_are_no_inside() -> None:
    """One letter cannot be both ends."""
    assert Borders(before=(), after=(), head="ab", tail="ba").inside("aba") is None
    assert Borders(before=(), after=(), head="ab", tail="ba").inside("abba") == ""


def _text(id_: int) -> str:
    return TOKEN_TEXTS.text_of(id_) or ""
