"""Text that was shown is final, and all of it is the decoding of the whole."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.errors import InputError
from dgemma.text.detokenizer import Detokenizer
from text.bundled import TOKENIZER

BYTE = {value: 107 + value for value in range(256)}
ids_of_all_kinds = st.lists(
    st.one_of(
        st.integers(0, TOKENIZER.vocab_size + 5),  # tokens, controls, ids without a vocabulary entry
        st.sampled_from(sorted(TOKENIZER.byte_ids)),
        st.sampled_from([BYTE[value] for value in "€😀é".encode()]),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(ids_of_all_kinds, st.lists(st.integers(0, 40)))
def test_any_split_gives_the_decoding_of_the_whole(ids: list[int], cuts: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    borders = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    shown = "".join(detokenizer.add(ids[start:end]) for start, end in itertools.pairwise(borders))
    assert shown + detokenizer.finish() == TOKENIZER.decode(ids)


@settings(deadline=None)
@given(st.text())
def test_whole_characters_only(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    shown = [detokenizer.add([id_]) for id_ in TOKENIZER.encode(text)] + [detokenizer.finish()]
    assert "".join(shown) == text.replace("▁", " ")
    assert not any("\ufffd" in part for part in shown) or "\ufffd" in text


def test_a_character_waits_for_its_last_byte_across_controls_and_calls() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    first, second, third = (BYTE[value] for value in "€".encode())
    assert detokenizer.add([first, 106]) == ""
    assert detokenizer.add([9999, second]) == ""
    assert detokenizer.add([third]) == ""
    assert detokenizer.add(TOKENIZER.encode("a")) == "€a"
    assert detokenizer.finish() == ""


def test_broken_bytes_become_replacement_characters() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.add([BYTE[0xE2], BYTE[0x82]]) == ""
    assert detokenizer.finish() == "\ufffd\ufffd" == TOKENIZER.decode([BYTE[0xE2], BYTE[0x82]])


def test_what_is_no_id_is_refused() -> None:
    with pytest.raises(InputError, match="a token id is"):
        Detokenizer(TOKENIZER).add([-1])


@pytest.mark.parametrize("token", [BYTE[0x41], 400], ids=["bytes", "text"])
def test_the_cost_of_a_token_does_not_grow_with_the_text(token: int) -> None:
    def once(num_tokens: int) -> float:
        detokenizer = Detokenizer(TOKENIZER)
        start = time.process_time()
        for _ in range(num_tokens):
            detokenizer.add([token])
        detokenizer.finish()
        return time.process_time() - start

    def seconds(num_tokens: int) -> float:
        return min(once(num_tokens) for _ in range(3))  # a busy machine takes longer now and then

    # Ten times the tokens cost ten times as much; were it quadratic, a hundred times.
    assert seconds(50_000) < 40 * max(seconds(5_000), 0.005)
