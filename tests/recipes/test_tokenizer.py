"""A tokenizer of the recipes gives text back, and has the control tokens of the bundled one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dgemma.text.tokenizer import Tokenizer
from recipes import tokenizer as recipe
from recipes.tokenizer import BUNDLED, BYTES, COMPANIONS, SPACE, control_names, learn, write_tokenizer

SIZE = 1000


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    out = tmp_path_factory.mktemp("tokenizer")
    text = Path(recipe.__file__).read_text() + "\tcafé" * 200
    pieces, merges = learn([text], SIZE - len(control_names()) - len(BYTES))
    assert write_tokenizer(out, pieces, merges) == SIZE
    assert all((out / name).read_bytes() == (BUNDLED / name).read_bytes() for name in COMPANIONS)
    return Tokenizer.from_directory(out)


texts = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.integers(0, 70).map(lambda length: " " * length),
        st.sampled_from(
            ["\t", "\r\n", "\n\n\n", "🙂", "é", "the", "return", "<|turn>", "<0x0A>", "42", "\x00", "=="]
        ),
    ),
    max_size=12,
).map("".join)


@settings(deadline=None)
@given(texts)
@example("a\r\n\tb  🙂\n\n    def f(x):\n        return 1234  # naïve 日本")
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.controls.values())
    assert tokenizer.decode(ids) == text.replace(SPACE, " ")  # the vocabulary's own spelling of a space


def test_controls_are_the_bundled_ones(tokenizer: Tokenizer) -> None:
    bundled = Tokenizer.from_directory(BUNDLED)
    assert tokenizer.controls == bundled.controls
    assert tokenizer.template_names == bundled.template_names
    assert tokenizer.vocab_size == SIZE
    assert [tokenizer.id_to_token(id_) for id_ in (107, 107 + 255)] == ["<0x00>", "<0xFF>"]


def test_pieces_keep_within_words_lines_and_digits(tokenizer: Tokenizer) -> None:
    for id_ in range(107 + 256, tokenizer.vocab_size):
        piece = tokenizer.id_to_token(id_)
        assert piece
        assert re.fullmatch(rf"{SPACE}?[^\W\d_]+|{SPACE}?[\W_]+|\d", piece), piece
        assert "\n" not in piece or set(piece) == {"\n"}
        assert SPACE not in piece[1:]
    assert [tokenizer.id_to_token(id_) for id_ in tokenizer.encode("x 203")] == ["x", SPACE, "2", "0", "3"]
