"""Lookup of tokens by prefix and suffix equals a scan of the vocabulary."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dgemma.checkpoint.bundled import bundled_path
from dgemma.text.token_texts import TokenTexts
from dgemma.text.tokenizer import Tokenizer
from text.bundled import TOKENIZER

# The token texts of the two files differ: one was made for tests, one was learned from a corpus.
LEARNED = Tokenizer.from_directory(bundled_path("text"))
TABLES = {"made": (TOKENIZER, TokenTexts(TOKENIZER)), "learned": (LEARNED, TokenTexts(LEARNED))}
CASES = pytest.mark.parametrize(("tokenizer", "table"), TABLES.values(), ids=TABLES)
ALL = {name: [table.text_of(id_) for id_ in range(tok.vocab_size)] for name, (tok, table) in TABLES.items()}


def parts_of_tokens() -> st.SearchStrategy[str]:
    """Beginnings, middles and ends of token texts, and texts that most likely are no part of any."""
    texts = st.sampled_from(sorted({text for text in ALL["learned"] if text}))
    cuts = st.tuples(texts, st.integers(0, 6), st.integers(0, 6)).map(lambda c: c[0][c[1] :][: c[2]])
    return cuts | st.text(alphabet=" _aerntu().\n\té😀\U0010ffff", max_size=4) | st.text(max_size=3)


@CASES
@settings(max_examples=60)
@given(text=parts_of_tokens())
@example(text="")
@example(text=" ")
@example(text="\n")
def test_tokens_are_those_that_a_scan_finds(tokenizer: Tokenizer, table: TokenTexts, text: str) -> None:
    every = {id_: table.text_of(id_) for id_ in range(tokenizer.vocab_size)}
    assert table.beginning_with(text) == tuple(i for i, one in every.items() if one and one.startswith(text))
    assert table.ending_with(text) == tuple(i for i, one in every.items() if one and one.endswith(text))


@CASES
def test_exactly_the_tokens_independent_of_their_neighbours_have_a_text(
    tokenizer: Tokenizer, table: TokenTexts
) -> None:
    controls = set(tokenizer.controls.values())
    assert controls
    assert len(tokenizer.byte_ids) == 256
    for id_ in range(tokenizer.vocab_size):
        text = table.text_of(id_)
        if id_ in controls or id_ in tokenizer.byte_ids or tokenizer.id_to_token(id_) is None:
            assert text is None
        else:
            assert text
            assert text == tokenizer.decode([id_])


@CASES
def test_neither_controls_nor_bytes_begin_or_end_with_anything(
    tokenizer: Tokenizer, table: TokenTexts
) -> None:
    apart = {*tokenizer.controls.values(), *tokenizer.byte_ids}
    for text in ("", "<", "<|", "<0x", "\ufffd"):
        assert apart.isdisjoint(table.beginning_with(text))
    for text in ("", ">", "|>", "0>", "\ufffd"):
        assert apart.isdisjoint(table.ending_with(text))


@CASES
@pytest.mark.parametrize("id_", [-1, 1 << 40])
def test_an_id_outside_the_vocabulary_has_no_text(tokenizer: Tokenizer, table: TokenTexts, id_: int) -> None:
    assert table.text_of(id_) is None


def test_a_word_that_is_the_text_itself_is_among_them() -> None:
    tokenizer, table = TABLES["learned"]
    (token,) = tokenizer.encode(" morning")
    assert token in table.beginning_with(" morning")
    assert token in table.ending_with(" morning")
    assert token in table.beginning_with(" mor")
    assert token not in table.beginning_with("morning"), "the blank before it is part of a token"
    assert token in table.ending_with("ning")
