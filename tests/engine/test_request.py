"""What may be given of an answer, and what is refused by name before anything is computed."""

from __future__ import annotations

from typing import Any

import pytest

from dgemma.engine import request as request_module
from dgemma.engine.request import PinnedTokens
from dgemma.errors import InputError

VOCAB, ROOM, CANVAS = 50, 10, 5


def check(**what: Any) -> None:
    PinnedTokens(**what).check(VOCAB, ROOM, CANVAS)


def test_a_token_fixes_a_position_and_several_limit_it() -> None:
    found = PinnedTokens.from_pins({3: 7, 0: 0, 5: [9, 2, 9], 8: (4,), 9: {1, 6}})
    assert found == PinnedTokens(fixed={3: 7, 0: 0}, among={5: (2, 9), 8: (4,), 9: (1, 6)})


@pytest.mark.parametrize("words", [[7], (7,), {7}, frozenset({7}), iter([7]), range(7, 8)])
def test_a_set_of_one_word_stays_a_set(words: Any) -> None:
    """The model has no choice there, but the position is not said to be pinned."""
    assert PinnedTokens.from_pins({2: words}) == PinnedTokens(among={2: (7,)})


@pytest.mark.parametrize("nothing", [None, {}])
def test_no_pins_give_nothing(nothing: Any) -> None:
    assert PinnedTokens.from_pins(nothing) is None


def test_only_what_says_something_counts_as_given() -> None:
    assert not PinnedTokens()
    for name, value in (("fixed", 1), ("among", (1,)), ("begin", 1), ("watch", (1,))):
        assert PinnedTokens(**{name: {0: value}}), name


@pytest.mark.parametrize("pin", ["sea", b"sea", None, 1.5, True, False], ids=repr)
def test_a_pin_that_is_neither_a_token_nor_several_is_refused(pin: Any) -> None:
    with pytest.raises(InputError, match=r"the pin of position 4 is .*; give a token or several\."):
        PinnedTokens.from_pins({4: pin})


@pytest.mark.parametrize("words", [["sea"], [1.5], [None], [True, 5], [5, -1], [VOCAB]], ids=repr)
def test_a_set_with_something_that_is_no_token_is_refused(words: Any) -> None:
    with pytest.raises(InputError, match="position 4 is pinned to token"):
        pinned({4: words})


@pytest.mark.parametrize("words", [[5, "sea"], [5, None], [[5], [6]]], ids=repr)
def test_a_set_of_mixed_things_is_refused_like_any_other_wrong_input(words: Any) -> None:
    with pytest.raises(InputError, match="position 4"):
        pinned({4: words})


def pinned(pins: Any) -> None:
    found = PinnedTokens.from_pins(pins)
    assert found is not None
    found.check(VOCAB, ROOM, CANVAS)


def test_everything_that_has_its_place_is_taken() -> None:
    check()
    check(fixed={0: 0, ROOM - 1: VOCAB - 1})
    check(among={0: tuple(range(VOCAB)), 1: (VOCAB - 1,)})
    # A beginning may stand where a set does, and anything may be watched.
    check(fixed={0: 1}, among={1: (3, 4)}, begin={0: 2, 1: 9, 2: 3}, watch={0: (1, 2), 1: (3, 9), 2: (0,)})


KINDS = [("fixed", 1), ("among", (1, 2)), ("begin", 1), ("watch", (1, 2))]


@pytest.mark.parametrize(("kind", "value"), KINDS, ids=[kind for kind, _ in KINDS])
@pytest.mark.parametrize("position", [-1, ROOM, 10**9, True, False, 1.0, "1", None, (1,)], ids=repr)
def test_a_position_outside_the_answer_is_refused(kind: str, value: Any, position: Any) -> None:
    with pytest.raises(InputError, match=r" positions 0 to 9\. Raise max_tokens") as refused:
        check(**{kind: {position: value}})
    is_beyond = kind == "begin" and isinstance(position, int) and position >= ROOM
    said = f"canvas has a token at position {position}" if is_beyond else f"position {position!r} is pinned"
    assert str(refused.value).startswith(said)
    assert refused.value.field == ("canvas" if is_beyond else "pins")


def test_a_canvas_may_begin_with_more_than_is_kept_of_it() -> None:
    PinnedTokens(begin={ROOM: 1, ROOM + 1: 2}).check(VOCAB, ROOM, canvas_len=4)  # three canvases
    with pytest.raises(
        InputError, match=r"at position 12; the canvases of the answer have positions 0 to 11"
    ):
        PinnedTokens(begin={12: 1}).check(VOCAB, ROOM, canvas_len=4)


@pytest.mark.parametrize(("kind", "value"), KINDS, ids=[kind for kind, _ in KINDS])
@pytest.mark.parametrize("token", [-1, VOCAB, 1 << 62, True, 1.0, "1", None], ids=repr)
def test_a_token_outside_the_vocabulary_is_refused(kind: str, value: Any, token: Any) -> None:
    wrong = (3, token, 4) if isinstance(value, tuple) else token
    with pytest.raises(
        InputError, match=rf"position 6 is pinned to token {token!r}; .* ends at {VOCAB - 1}\."
    ):
        check(**{kind: {5: value, 6: wrong}})


@pytest.mark.parametrize("kind", ["among", "watch"])
def test_an_empty_set_is_refused(kind: str) -> None:
    with pytest.raises(InputError, match="position 6 has an empty set of tokens; nothing could stand there"):
        check(**{kind: {5: (1,), 6: ()}})
    with pytest.raises(InputError, match="position 6 has an empty set"):
        pinned({6: []})


def test_a_position_cannot_be_both_fixed_and_limited() -> None:
    check(fixed={3: 1}, among={4: (1, 2)})
    with pytest.raises(InputError, match="position 4 is both fixed and limited to a set; give one of them"):
        check(fixed={3: 1, 4: 1}, among={4: (1, 2)})


def test_more_words_than_a_request_may_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_module, "MAX_SET_TOKENS", 8)
    check(among={0: (1, 2, 3, 4)}, watch={0: (1, 2), 1: (3, 4)})
    with pytest.raises(InputError, match="hold more than 8 tokens; give fewer"):
        check(among={0: (1, 2, 3, 4)}, watch={0: (1, 2), 1: (3, 4, 5)})
