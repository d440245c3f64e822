"""Pins and a starting canvas as users write them: what they mean in tokens, and what is refused."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.engine.request import PinnedTokens
from dgemma.errors import InputError
from dgemma.tasks.pins import MAX_PINS, MAX_SPANS, MAX_TEXTS, check_pins, pinned_tokens
from sizes import cases
from text.bundled import TOKENIZER


def tokens_of(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def read(pins: object = None, canvas: object = None) -> PinnedTokens | None:
    return pinned_tokens(pins, canvas, TOKENIZER.encode, TOKENIZER.bytes_of)


def refusal(pins: object = None, canvas: object = None) -> InputError:
    with pytest.raises(InputError) as caught:
        read(pins, canvas)
    return caught.value


def test_a_text_or_ids_are_fixed_from_their_position_on() -> None:
    text = tokens_of("Emma had a dog")
    found = read([{"at": 2, "text": "Emma had a dog"}, {"at": 0, "token_ids": [5, 6]}])
    assert found == PinnedTokens(fixed={0: 5, 1: 6, **dict(enumerate(text, start=2))})


def test_alternatives_are_texts_of_one_token_or_ids() -> None:
    (a,), (the,) = tokens_of(" a"), tokens_of(" the")
    found = read([{"at": 7, "any_of": [" a", " the", 5, " a"]}])
    assert found == PinnedTokens(among={7: tuple(sorted({a, the, 5}))})


def test_a_mapping_is_short_for_pins() -> None:
    assert read({3: 5, 4: [7, 6]}) == PinnedTokens(fixed={3: 5}, among={4: (6, 7)})
    assert read({}) is None
    assert read([]) is None
    assert read() is None


def test_a_canvas_begins_with_its_tokens_and_holds_what_is_read_only() -> None:
    text = "Emma had a little dog."
    tokens = tokens_of(text)
    assert read(canvas=text) == read(canvas={"text": text}) == PinnedTokens(begin=dict(enumerate(tokens)))
    found = read(canvas={"token_ids": [9, 8, 7, 6], "read_only": [[0, 1], [2, 4]]})
    assert found == PinnedTokens(begin={0: 9, 1: 8, 2: 7, 3: 6}, fixed={0: 9, 2: 7, 3: 6})


def test_null_is_absent() -> None:
    assert read([{"at": 1, "text": None, "token_ids": [5]}]) == PinnedTokens(fixed={1: 5})
    assert read(canvas={"text": "Emma", "token_ids": None, "read_only": None}) == read(canvas="Emma")


@given(
    text=st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=40),
    data=st.data(),
)
@settings(max_examples=cases(500, 100), deadline=None, derandomize=True, database=None)
def test_read_only_characters_are_held_with_no_more_than_the_tokens_they_stand_in(
    text: str, data: st.DataObject
) -> None:
    begin = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(begin + 1, len(text)))
    found = read(canvas={"text": text, "read_only": [[begin, end]]})
    assert found is not None
    tokens = tokens_of(text)
    assert [found.begin[at] for at in range(len(tokens))] == tokens
    starts = [0]
    for token in tokens:
        starts.append(starts[-1] + len(TOKENIZER.bytes_of(token) or b""))
    first, last = len(text[:begin].encode()), len(text[:end].encode())
    wanted = {at for at in range(len(tokens)) if starts[at] < last and starts[at + 1] > first}
    assert set(found.fixed) == wanted
    held = sorted(found.fixed)
    raw = b"".join(TOKENIZER.bytes_of(found.fixed[at]) or b"" for at in held)
    assert text[begin:end].encode() in raw


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["at", "text", "token_ids", "any_of", "read_only", "x"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


@given(pins=st.none() | st.lists(JSON, max_size=4) | JSON, canvas=JSON)
@settings(max_examples=cases(2000, 200), deadline=None, derandomize=True, database=None)
def test_any_json_is_read_or_refused_by_the_name_of_its_field(pins: Any, canvas: Any) -> None:
    found, error = outcome(check_pins, pins, canvas)
    if error is None:
        found, error = outcome(read, pins, canvas)
    if error is not None:
        assert error.field in ("pins", "canvas")
        assert str(error).startswith(error.field)
    else:
        for tokens in (found or PinnedTokens()).among.values():
            assert tokens == tuple(sorted(set(tokens)))


def outcome(act: Callable[[Any, Any], Any], pins: Any, canvas: Any) -> tuple[Any, InputError | None]:
    try:
        return act(pins, canvas), None
    except InputError as error:
        return None, error


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ("{", "pins is '{'; give a list of pins"),
        ({"at": 0, "text": "a"}, "pins is {'at': 0, 'text': 'a'}; give a list of pins"),
        ([5], "pins.0 is 5; give an object with at, text, token_ids, any_of."),
        ([{"text": "a"}], "pins.0.at is missing; give the position of the first token, from 0."),
        ([{"at": -1, "text": "a"}], "pins.0.at is -1; it must be a whole number of 0 or more."),
        ([{"at": 1.0, "text": "a"}], "pins.0.at is 1.0"),
        ([{"at": True, "text": "a"}], "pins.0.at is True"),
        ([{"at": 0}], "pins.0 has none of text, token_ids, any_of; give one of them."),
        ([{"at": 0, "text": "a", "any_of": [1]}], "pins.0 has text and any_of of text, token_ids, any_of"),
        ([{"at": 0, "texts": "a"}], "pins.0.texts is unknown; did you mean 'text'?"),
        ([{"at": 0, "text": ""}], "pins.0.text is ''; give a text that is not empty."),
        ([{"at": 0, "text": 5}], "pins.0.text is 5"),
        ([{"at": 0, "token_ids": []}], "pins.0.token_ids is []; give a list of token ids."),
        ([{"at": 0, "token_ids": [1, "2"]}], "pins.0.token_ids is [1, '2']"),
        ([{"at": 0, "any_of": []}], "pins.0.any_of is []; give a list of texts or token ids."),
        ([{"at": 0, "any_of": [1, 2.5]}], "pins.0.any_of.1 is 2.5; give a text of one token, or a token id."),
        (
            [{"at": 0, "any_of": [5, "Emma had a dog"]}],
            "pins.0.any_of.1 is 'Emma had a dog', which has 8 tokens; an alternative is one token.",
        ),
        (
            [{"at": 0, "token_ids": [1, 2]}, {"at": 1, "any_of": [4]}],
            "pins.1 stands at position 1, which pins.0 has; move one.",
        ),
        ([{"at": 0, "text": "\ud800"}], "pins.0.text: text holds the lone surrogate"),
        ([{"at": at, "token_ids": [1]} for at in range(MAX_PINS + 1)], f"pins has {MAX_PINS + 1} pins"),
        ([{"at": 0, "any_of": ["a"] * (MAX_TEXTS + 1)}], f"pins has more than {MAX_TEXTS} texts"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_wrong_pin_is_refused_with_its_place(pins: Any, message: str) -> None:
    error = refusal(pins)
    assert message in str(error)
    assert error.field == "pins"


@pytest.mark.parametrize(
    ("canvas", "message"),
    [
        (5, "canvas is 5; give an object with text, token_ids, read_only."),
        ("", "canvas.text is ''; give a text that is not empty."),
        ({}, "canvas has none of text, token_ids; give one of them."),
        ({"text": "a", "token_ids": [1]}, "canvas has text and token_ids"),
        ({"text": "a", "readonly": []}, "canvas.readonly is unknown; did you mean 'read_only'?"),
        ({"text": "a", "read_only": True}, "canvas.read_only is True; give a list of [begin, end]."),
        ({"text": "a", "read_only": [[0]]}, "canvas.read_only.0 is [0]; give [begin, end]"),
        ({"text": "a", "read_only": [[1, 1]]}, "canvas.read_only.0 is [1, 1]"),
        ({"text": "a", "read_only": [[-1, 1]]}, "canvas.read_only.0 is [-1, 1]"),
        (
            {"text": "ab", "read_only": [[0, 1], [1, 3]]},
            "canvas.read_only.1 ends at 3; the canvas given has",
        ),
        (
            {"token_ids": [1], "read_only": [[0, 2]]},
            "canvas.read_only.0 ends at 2; the canvas given has 1",
        ),
        (
            {"text": "a", "read_only": [[0, 1]] * (MAX_SPANS + 1)},
            f"canvas.read_only has {MAX_SPANS + 1} spans",
        ),
        ({"text": "\udfff"}, "canvas.text: text holds the lone surrogate"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_wrong_canvas_is_refused_with_its_place(canvas: Any, message: str) -> None:
    error = refusal(canvas=canvas)
    assert message in str(error)
    assert error.field == "canvas"


def test_read_only_spans_may_overlap_and_are_read_once() -> None:
    spans = [[2, 4], (0, 3), [3, 4], (1, 2)]
    found = read(canvas={"token_ids": [9, 8, 7, 6, 5], "read_only": spans})
    assert found == PinnedTokens(begin={0: 9, 1: 8, 2: 7, 3: 6, 4: 5}, fixed={0: 9, 1: 8, 2: 7, 3: 6})
    length = 10_000
    began = time.process_time()
    read(canvas={"token_ids": [5] * length, "read_only": [[0, length]] * MAX_SPANS})
    assert time.process_time() - began < 1, "as many positions as tokens, however many spans hold them"


def test_one_position_is_given_once() -> None:
    error = refusal([{"at": 1, "token_ids": [5]}], {"token_ids": [1, 2], "read_only": [[0, 2]]})
    assert str(error) == "canvas.read_only holds position 1, which is pinned; leave out one of them."
    # Where the canvas may change, the pin is what stands there.
    found = read([{"at": 1, "token_ids": [5]}], {"token_ids": [1, 2], "read_only": [[0, 1]]})
    assert found == PinnedTokens(fixed={0: 1, 1: 5}, begin={0: 1, 1: 2})


def test_a_tokenizer_that_changes_characters_has_no_spans_of_them() -> None:
    with pytest.raises(InputError, match="counts characters of the text, but this tokenizer changes them"):
        pinned_tokens(None, {"text": "AB", "read_only": [[0, 1]]}, lambda text: [1], lambda id_: b"ab")


def test_a_text_without_tokens_is_refused() -> None:
    with pytest.raises(InputError, match=re.escape("pins.0.text has no tokens; give some text.")):
        pinned_tokens([{"at": 0, "text": "a"}], None, lambda text: [], lambda id_: None)
