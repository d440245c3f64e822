"""A gap of unknown length: what is asked for it, which candidate wins, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.engine.request import EngineRequest
from dgemma.errors import InputError
from dgemma.params import GenerationParams
from dgemma.tasks.borders import Borders
from dgemma.tasks.context import Ids, TaskContext
from dgemma.tasks.infill import Filled, FillOptions, fill, fill_between
from dgemma.tasks.rounds import drive
from tasks.scripted import (
    BOS,
    CANVAS,
    END,
    TEMPLATE,
    TOKEN_TEXTS,
    TOKENIZER,
    ByHeart,
    Scripted,
    encode,
    gap_of,
    plain_words,
    task_context,
)

SENTENCE = "The function returns the number of bytes in the file."
PREFIX, MIDDLE, SUFFIX = "The function returns", " the number of bytes", " in the file."


def words(count: int, seed: int = 0) -> Ids:
    """Different words, none of which can join its neighbour."""
    return tuple(random.Random(seed).sample(plain_words(), count))


def cut(before: int, gap: int, after: int) -> tuple[Ids, Ids, Ids]:
    text = words(before + gap + after)
    return text[:before], text[before : before + gap], text[before + gap :]


def between(
    task: TaskContext, before: Ids, after: Ids, model: Scripted | None = None, gap: Ids = (), **options: Any
) -> tuple[Filled, Scripted]:
    model = model or ByHeart(task, (*before, *gap, *after))
    rounds = fill_between(task, Borders(before=before, after=after), FillOptions(**{"drafts": 0, **options}))
    return drive(rounds, model), model


def lengths_asked(asked: list[EngineRequest], canvas_len: int = CANVAS) -> list[int]:
    return [gap_of(request, canvas_len) for request in asked]


# Which candidate wins


@pytest.mark.parametrize("heal", [False, True])
def test_the_right_length_wins_by_the_likelihood_of_gap_and_text_after_together(heal: bool) -> None:
    task = task_context()
    model = ByHeart(task, encode(SENTENCE))
    options = FillOptions(max_tokens=8, heal=heal)
    found = drive(fill(task, PREFIX, SUFFIX, options), model)
    assert found.text == MIDDLE
    best = found.candidates[0]
    assert best.text == MIDDLE
    # Every token of the gap and of the text after it is scored, nothing else.
    assert best.scored == len(best.tokens) + len(encode(SUFFIX)) - bool(heal and _is_healed(SUFFIX))
    assert best.log_likelihood == pytest.approx(best.scored * ByHeart.GOOD)
    assert found.log_likelihood == best.log_likelihood
    assert best.per_token == pytest.approx(ByHeart.GOOD)
    assert [one.log_likelihood for one in found.candidates] == sorted(
        (one.log_likelihood for one in found.candidates), reverse=True
    )
    assert len({len(one.tokens) for one in found.candidates}) == len(found.candidates) > 1


def _is_healed(suffix: str) -> bool:
    return len(TOKEN_TEXTS.ending_with(TOKEN_TEXTS.text_of(encode(suffix)[0]) or "")) > 1


def test_what_is_told_of_a_fill_is_what_it_took() -> None:
    task = task_context(seed=11)
    before, gap, after = cut(5, 3, 4)
    found, model = between(task, before, after, gap=gap, max_tokens=6, drafts=2)
    assert found.forwards == sum(min(3, one.params.max_denoising_steps) for one in model.written)
    assert found.draft_tokens == 2 * 7
    assert found.prompt_tokens == len(before) + 1
    assert found.seed == 11
    assert found.num_tokens == 3
    assert {one.seed for one in model.written} == {11}


class Roughly(ByHeart):
    """Like one who knows the text, and finds a seam the worse, the more it leaves out or says twice."""

    def likes(self, before: Ids, token: int) -> float:
        if before[-1] == BOS:
            return self.GOOD
        jump = self.text.index(token) - self.text.index(before[-1]) - 1
        return -2.0 * abs(jump) or self.GOOD


@pytest.mark.parametrize(
    "gap_len",
    [
        1,
        7,
        16,
        17,
        18,
        19,
        21,
        22,
        23,
    ],
)
def test_every_length_is_found_though_only_every_second_long_one_is_tried(gap_len: int) -> None:
    task = task_context(canvas_len=32)
    before, gap, after = cut(4, gap_len, 8)
    model = Roughly(task, (*before, *gap, *after))
    found, _ = between(task, before, after, model, max_tokens=23, keep=64)
    assert lengths_asked(model.rounds[0], 32) == [*range(1, 17), 18, 20, 22, 23]
    assert found.candidates[0].tokens == gap


def test_steps_are_one_for_each_token_of_a_gap_and_some_to_spare_and_never_more_than_allowed() -> None:
    before, gap, after = cut(4, 2, 4)
    for allowed in (3, 48):
        task = task_context(params=GenerationParams(max_denoising_steps=allowed))
        _, model = between(task, before, after, gap=gap, max_tokens=8, keep=8)
        steps = {gap_of(one): one.params.max_denoising_steps for one in model.written}
        assert steps == {n: min(allowed, n + 4) for n in range(1, 9)}


class Sure(ByHeart):
    """Of these lengths it is sure after one step, of others not."""

    def __init__(self, task: TaskContext, text: Ids, lengths: set[int]) -> None:
        super().__init__(task, text)
        self.lengths = lengths

    def reads(self, request: EngineRequest, at: int) -> Mapping[int, float]:
        (word,) = super().reads(request, at)
        share = 0.99 if gap_of(request) in self.lengths else 0.3
        return {word: share, plain_words()[0]: 1 - share} if share > 0.5 else {word: 0.3, **_many()}


def _many() -> dict[int, float]:
    return dict.fromkeys(plain_words()[1:8], 0.1)


@pytest.mark.parametrize("sure", [{1, 2, 3}, {2, 5, 9}, {4, 9, 10}])
def test_after_one_step_the_lengths_a_step_is_surest_of_go_on(sure: set[int]) -> None:
    task = task_context()
    before, gap, after = cut(4, 5, 4)
    model = Sure(task, (*before, *gap, *after), sure)
    found, _ = between(task, before, after, model, max_tokens=10, keep=3)
    first, second, scores = model.rounds
    assert lengths_asked(first) == list(range(1, 11))
    assert all((one.params.max_denoising_steps, one.params.logprobs) == (1, 1) for one in first)
    assert lengths_asked(second) == sorted(sure)
    assert all(one.score_from for one in scores)
    assert {len(one.tokens) for one in found.candidates} == sure


def test_no_more_lengths_than_are_kept_go_without_a_first_step() -> None:
    before, gap, after = cut(4, 3, 4)
    _, model = between(task_context(), before, after, gap=gap, max_tokens=4, keep=4)
    assert len(model.rounds) == 2
    assert lengths_asked(model.rounds[0]) == [1, 2, 3, 4]
    assert all(one.params.max_denoising_steps > 1 for one in model.rounds[0])


# What is on a canvas


@pytest.mark.parametrize("behind_len", [0, 1, 3, CANVAS - 1, CANVAS, CANVAS + 1, 3 * CANVAS])
def test_the_text_after_is_pinned_after_the_gap_then_ends(behind_len: int) -> None:
    before, gap, after = cut(5, 3, behind_len)
    _, model = between(task_context(), before, after, gap=gap, max_tokens=6)
    assert {*lengths_asked(model.written)} == {1, 2, 3, 4, 5, 6}
    for request in model.written:
        open_ones = gap_of(request)
        follows = (*after, *[END] * CANVAS)[: CANVAS - open_ones]
        assert request.pinned is not None
        assert request.pinned.fixed == dict(enumerate(follows, start=open_ones))
        assert not request.pinned.among
        assert not request.pinned.begin
        assert not request.pinned.watch
        assert request.params.max_tokens == CANVAS
        assert request.params.ignore_end


def test_healed_ends_are_limited_to_the_words_that_hold_them() -> None:
    task = task_context()
    model = ByHeart(task, encode("for i in range(10):\n"))
    found = drive(fill(task, "for i in ra", "):\n", FillOptions(max_tokens=5)), model)
    assert found.text == "nge(10"
    first, last = TOKEN_TEXTS.beginning_with(" ra"), TOKEN_TEXTS.ending_with("):")
    for request in model.written:
        assert request.pinned is not None
        assert TOKENIZER.decode(request.prompt[1:]) == "for i in"
        among, gap = dict(request.pinned.among), gap_of(request)
        if gap == 1:
            assert set(among) == {0}
        else:
            assert among == {0: first, gap - 1: last}


def test_no_control_can_be_written() -> None:
    """A rule that would write controls cannot: its requests forbid them."""

    class Ends(ByHeart):
        def reads(self, request: EngineRequest, at: int) -> Mapping[int, float]:
            controls = dict.fromkeys([*TOKENIZER.controls.values()], 1.0)
            return {**controls, **dict.fromkeys(super().reads(request, at), 1e-6)}

    task = task_context()
    before, gap, after = cut(4, 3, 4)
    model = Ends(task, (*before, *gap, *after))
    found, _ = between(task, before, after, model, max_tokens=5)
    assert found.candidates[0].tokens == gap
    forbidden = [*TOKENIZER.controls.values()]
    for request in model.written:
        assert [id_ for id_, _ in request.logit_bias] == sorted({*forbidden, *request.params.end_tokens})
        assert all(value < -1000 for _, value in request.logit_bias)


# The context


def test_a_prefix_longer_than_the_context_keeps_its_end() -> None:
    task = task_context(max_positions=100)
    before, gap, after = cut(300, 3, 4)
    model = ByHeart(task, (*before[-59:], *gap, *after))
    found, _ = between(task, before, after, model, max_tokens=6)
    # The canvas, and as many tokens as are scored after it at most, have their room.
    assert {one.prompt for one in model.written} == {(BOS, *before[-59:])}
    assert found.candidates[0].tokens == gap


def test_a_text_after_that_fits_on_the_canvas_is_not_in_the_context() -> None:
    before, gap, after = cut(5, 3, CANVAS)
    _, model = between(task_context(), before, after, gap=gap, max_tokens=6)
    assert {one.prompt for one in model.written} == {(BOS, *before)}


def test_a_text_after_that_is_longer_than_a_canvas_is_shown_in_the_context() -> None:
    before, gap, after = cut(5, 3, 3 * CANVAS)
    task = task_context()
    far = (BOS, *after[CANVAS - 6 :])
    model = ByHeart(task, (*before, *gap, *after), begins=len(far) + 1)
    found, _ = between(task, before, after, model, max_tokens=6)
    assert {one.prompt for one in model.written} == {(*far, BOS, *before)}
    assert found.candidates[0].tokens == gap
    assert found.prompt_tokens == len(far) + 1 + len(before)


def test_text_far_after_takes_a_quarter_of_the_context_at_most() -> None:
    task = task_context(max_positions=200)
    before, gap, after = cut(300, 3, 400)
    far = (BOS, *after[CANVAS - 2 : CANVAS + 48])
    model = ByHeart(task, (), begins=len(far) + 1)
    model.reads = lambda request, at: {gap[0]: 1.0}  # type: ignore[method-assign]
    between(task, before, after, model, max_tokens=2)
    kept = 200 - len(far) - 1 - (CANVAS + 24)
    assert {one.prompt for one in model.written} == {(*far, BOS, *before[-kept:])}


def test_every_token_after_is_shown_on_the_canvas_or_in_the_context() -> None:
    before, gap, after = cut(5, 3, 2 * CANVAS)
    task = task_context()
    model = ByHeart(task, (*before, *gap, *after), begins=CANVAS + 2)
    between(task, before, after, model, lengths=(3,))
    for request in model.written:
        assert request.pinned is not None
        assert set(after) <= {*request.pinned.fixed.values(), *request.prompt}


@settings(max_examples=40)
@given(
    before_len=st.integers(0, 200),
    behind_len=st.integers(0, 200),
    max_tokens=st.integers(1, 12),
    max_positions=st.integers(64, 160),
)
def test_requests_fit_into_the_context_whatever_is_given(
    before_len: int, behind_len: int, max_tokens: int, max_positions: int
) -> None:
    """The rule refuses what an engine would."""
    task = task_context(max_positions=max_positions)
    before, _, after = cut(before_len, 0, behind_len)
    model = ByHeart(task, words(1, seed=1))
    found, _ = between(task, before, after, model, max_tokens=max_tokens, drafts=2)
    assert 1 <= found.num_tokens <= max_tokens


# Drafts


class WrongOnCanvases(ByHeart):
    """Knows the text left to right only."""

    def reads(self, request: EngineRequest, at: int) -> Mapping[int, float]:
        if request.params.decode == "causal":
            return super().reads(request, at)
        return {plain_words()[0]: 1.0}


@pytest.mark.parametrize("heal", [False, True])
def test_a_beginning_of_a_draft_wins_where_the_canvases_are_wrong(heal: bool) -> None:
    task = task_context()
    model = WrongOnCanvases(task, encode(SENTENCE))
    found = drive(fill(task, PREFIX, SUFFIX, FillOptions(max_tokens=8, heal=heal)), model)
    assert found.text == MIDDLE
    without = FillOptions(max_tokens=8, heal=heal, drafts=0)
    assert drive(fill(task, PREFIX, SUFFIX, without), model).text != MIDDLE


def test_a_drafts_last_token_may_hold_what_was_removed_of_the_suffix() -> None:
    """After the gap stands "ing", and the draft writes " being"."""
    before, after = words(4), words(4, seed=9)
    being, ing = encode(" being"), encode("ing")
    borders = Borders(
        before=before,
        after=after,
        tail="ing",
        last=TOKEN_TEXTS.ending_with("ing"),
        tail_tokens=ing,
    )
    assert set(being) <= set(borders.last)
    task = task_context()
    model = WrongOnCanvases(task, (*before, *being, *after))
    found = drive(fill_between(task, borders, FillOptions(max_tokens=4)), model)
    assert (found.candidates[0].tokens, found.text) == (being, " be")


def test_the_first_draft_is_greedy_and_the_others_are_sampled_with_seeds_of_their_own() -> None:
    task = task_context(params=GenerationParams(temperature=0.3, top_k=5, top_p=0.5))
    before, gap, after = cut(5, 3, 4)
    _, model = between(task, before, after, gap=gap, max_tokens=9, drafts=3)
    assert [one.params.temperature for one in model.drafts] == [0.0, 1.0, 1.0]
    assert [one.seed for one in model.drafts] == [7, 8, 9]
    for one in model.drafts:
        assert one.prompt == (BOS, *before)
        assert (one.params.top_k, one.params.top_p) == (None, None)
        assert one.params.ignore_end
        assert (one.params.max_tokens, one.params.logprobs) == (10, 20)
        assert one.logit_bias, "no control is written into a gap"
    (asked,) = [asked for asked in model.rounds if any(one in model.drafts for one in asked)]
    assert len(asked) > 3, "drafts and canvases share a round"


@pytest.mark.parametrize(
    ("options", "length"),
    [({"max_tokens": 40}, 16), ({"max_tokens": 5}, 5), ({"lengths": (2, 4, 30)}, 4), ({"lengths": (30,)}, 0)],
)
def test_drafts_are_as_long_as_the_longest_gap_that_they_can_fill(
    options: dict[str, Any], length: int
) -> None:
    before, gap, after = cut(5, 3, 4)
    found, model = between(task_context(), before, after, gap=gap, drafts=1, **options)
    assert [one.params.max_tokens for one in model.drafts] == ([length + 1] if length else [])
    lengths = options.get("lengths", range(1, options.get("max_tokens", 0) + 1))
    assert {len(one.tokens) for one in found.candidates} <= set(lengths)


def test_the_last_seed_is_followed_by_the_first() -> None:
    before, gap, after = cut(5, 3, 4)
    _, model = between(task_context(seed=(1 << 64) - 1), before, after, gap=gap, max_tokens=3, drafts=2)
    assert [one.seed for one in model.drafts] == [(1 << 64) - 1, 0]


# Gaps longer than a canvas


@pytest.mark.parametrize(
    "gap_len",
    [1, 11, 12, 13, 15, 16, 17, 20, 28, 29, 31, 32, 33, 44, 45, 48, 49],
)
def test_a_gap_of_any_given_length_can_be_filled(gap_len: int) -> None:
    before, gap, after = cut(6, gap_len, 8)
    found, model = between(task_context(), before, after, gap=gap, lengths=(gap_len,))
    assert [one.tokens for one in found.candidates] == [gap]
    # Each canvas goes on where the one before it ended, and they are as few as can be.
    starts = [0, *accumulate(lengths_asked(model.written))]
    assert starts[-1] == gap_len
    assert len(model.written) == -(-gap_len // CANVAS)
    for start, request in zip(starts, model.written, strict=False):
        assert request.prompt == (BOS, *before, *gap[:start])


@pytest.mark.parametrize(("gap_len", "max_tokens"), [(18, 20), (28, 28), (38, 40), (40, 40), (5, 40)])
def test_a_long_gap_is_closed_where_that_is_most_likely(gap_len: int, max_tokens: int) -> None:
    before, gap, after = cut(6, gap_len, 8)
    found, model = between(task_context(), before, after, gap=gap, max_tokens=max_tokens, keep=64)
    assert found.candidates[0].tokens == gap
    whole = [one for one in model.written if gap_of(one) == CANVAS]
    assert all(not one.pinned for one in whole), "a whole canvas of gap shows nothing of the text after"
    behind_whole = [len(one.prompt) - 1 - len(before) + gap_of(one) for one in model.written]
    assert max(behind_whole) == max_tokens
    assert set(range(1, 13)) <= set(behind_whole)


class TwoTexts(ByHeart):
    """Knows a second text, each token of which it likes a little more."""

    BETTER = -0.07

    def __init__(self, task: TaskContext, text: Ids, other: Ids) -> None:
        super().__init__(task, text)
        self.other = other
        self.other_pairs = set(pairwise((BOS, *other)))

    def reads(self, request: EngineRequest, at: int) -> Mapping[int, float]:
        place = len(request.prompt) - self.begins + at
        text = self.other if gap_of(request) == 10 else self.text
        return {text[min(place, len(text) - 1)]: 1.0}

    def likes(self, before: Ids, token: int) -> float:
        if (before[-1], token) in self.other_pairs - self.pairs:
            return self.BETTER
        return super().likes(before, token)


@pytest.mark.parametrize("max_tokens", [12, 40])
def test_a_text_is_not_made_longer_because_its_tokens_are_more_likely_one_by_one(max_tokens: int) -> None:
    """Also where gaps longer than a canvas are tried, which are compared per token."""
    before, gap, after = cut(6, 1, 8)
    longer = words(40, seed=5)[:10]
    model = TwoTexts(task_context(), (*before, *gap, *after), (*before, *longer, *after))
    found, _ = between(task_context(), before, after, model, max_tokens=max_tokens, keep=64)
    by_tokens = {one.tokens: one for one in found.candidates}
    assert by_tokens[longer].per_token > by_tokens[gap].per_token
    assert found.candidates[0].tokens == gap


@pytest.mark.parametrize(
    "max_tokens",
    [12, 14, 16, 20, 28, 30, 44],
)
def test_the_longest_gap_that_is_tried_has_max_tokens(max_tokens: int) -> None:
    before, gap, after = cut(6, 3, 8)
    text = (*before, *gap, *words(60, seed=3))
    found, _ = between(
        task_context(), before, after, ByHeart(task_context(), text), max_tokens=max_tokens, keep=64
    )
    assert max(len(one.tokens) for one in found.candidates) == max_tokens


def test_a_gap_that_a_canvas_holds_is_not_written_in_several() -> None:
    """Without a text after a canvas is all gap."""
    before, gap, after = cut(6, 16, 0)
    _, model = between(task_context(), before, after, gap=gap, max_tokens=16)
    assert {one.prompt for one in model.written} == {(BOS, *before)}
    before, gap, after = cut(6, 12, 8)
    _, model = between(task_context(), before, after, gap=gap, max_tokens=12)
    assert {one.prompt for one in model.written} == {(BOS, *before)}


def test_a_long_gap_begins_with_what_was_taken_back() -> None:
    """The first whole canvas is limited to words that hold the head, the close to those with the tail."""
    first, last = encode(" return")[0], encode("ing")[0]
    inner = words(18)
    text = (*words(4, seed=5), first, *inner, last, *words(8, seed=6))
    borders = Borders(
        before=text[:4],
        after=text[24:],
        head=" retur",
        tail="ing",
        first=TOKEN_TEXTS.beginning_with(" retur"),
        last=TOKEN_TEXTS.ending_with("ing"),
    )
    model = ByHeart(task_context(), text)
    found = drive(fill_between(task_context(), borders, FillOptions(lengths=(18,))), model)
    assert found.candidates[0].tokens == text[4:24]
    assert found.text == "n" + TOKENIZER.decode(inner)
    (whole,) = [one for one in model.written if gap_of(one) == CANVAS]
    assert whole.pinned is not None
    assert whole.pinned.among == {0: borders.first}
    (close,) = [one for one in model.written if gap_of(one) < CANVAS]
    assert close.pinned is not None
    assert close.pinned.among == {gap_of(close) - 1: borders.last}


# Lengths and options


def test_only_the_given_lengths_are_tried() -> None:
    before, gap, after = cut(5, 3, 4)
    found, model = between(task_context(), before, after, gap=gap, lengths=(7, 2, 3))
    assert sorted(lengths_asked(model.written)) == [2, 3, 7]
    assert found.candidates[0].tokens == gap


def test_nothing_may_be_the_answer_only_where_it_is_asked_for() -> None:
    before, _, after = cut(5, 0, 4)
    found, _ = between(task_context(), before, after, lengths=(0, 2))
    assert found.text == ""
    assert found.num_tokens == 0
    assert found.log_likelihood == pytest.approx(4 * ByHeart.GOOD)
    found, _ = between(task_context(), before, after, max_tokens=3)
    assert found.text, "nobody asks for nothing"
    assert min(len(one.tokens) for one in found.candidates) == 1


def test_lengths_count_the_words_beyond_those_taken_back() -> None:
    task = task_context()
    model = ByHeart(task, encode("for i in range(10):\n"))
    found = drive(fill(task, "for i in ra", "):\n", FillOptions(lengths=(2, 3))), model)
    assert {*lengths_asked(model.written)} == {4, 5}
    assert found.text == "nge(10"


@pytest.mark.parametrize("lengths", [(5000,), (4000, 5000)])
def test_lengths_that_no_context_holds_are_refused_by_name(lengths: tuple[int, ...]) -> None:
    task = task_context(max_positions=128)
    before, gap, after = cut(5, 3, 4)
    with pytest.raises(InputError, match="no text of these lengths fits between the two ends; give other"):
        between(task, before, after, gap=gap, lengths=lengths)


def test_a_gap_of_no_tokens_between_nothing_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="no text of these lengths fits"):
        between(task_context(), (), (), lengths=(0,))


def test_a_length_at_which_no_word_holds_both_ends_is_not_asked_for() -> None:
    """No word both begins with " retur" and ends with ")"."""
    first, last = TOKEN_TEXTS.beginning_with(" retur"), TOKEN_TEXTS.ending_with(")")
    assert not set(first) & set(last)
    borders = Borders(before=(), after=(), head=" retur", tail=")", first=first, last=last)
    model = ByHeart(task_context(), (*encode(" return x"), encode(")")[0]))
    found = drive(fill_between(task_context(), borders, FillOptions(max_tokens=1, keep=9)), model)
    assert lengths_asked(model.written) == [2, 3]
    assert found.text == "n x"


def test_a_word_that_would_be_both_ends_at_once_is_no_candidate() -> None:
    """One newline is not the last of the text before and the first of the text after."""
    newline = encode("\n")
    borders = Borders(
        before=(),
        after=(),
        head="\n",
        tail="\n",
        first=TOKEN_TEXTS.beginning_with("\n"),
        last=TOKEN_TEXTS.ending_with("\n"),
    )
    model = ByHeart(task_context(), (*newline, *newline, *newline))
    found = drive(fill_between(task_context(), borders, FillOptions(max_tokens=1, keep=9)), model)
    assert lengths_asked(model.written) == [1, 2, 3]
    assert sorted(len(one.tokens) for one in found.candidates) == [2, 3]
    assert [one.text for one in found.candidates] == ["\n", ""], "what adds nothing comes last"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens is 0; it must be a whole number from 1 to 4096"),
    ({"max_tokens": 4097}, "max_tokens is 4097"),
    ({"max_tokens": True}, "max_tokens is True"),
    ({"max_tokens": 2.0}, "max_tokens is 2.0"),
    ({"max_tokens": None}, "max_tokens is None"),
    ({"keep": 0}, "keep is 0; it must be a whole number from 1 to 64"),
    ({"keep": 65}, "keep is 65"),
    ({"keep": "4"}, "keep is '4'"),
    ({"drafts": -1}, "drafts is -1; it must be a whole number from 0 to 64"),
    ({"drafts": 65}, "drafts is 65"),
    ({"drafts": True}, "drafts is True"),
    ({"method": "guess"}, "method is 'guess'; it must be lengths or prompt"),
    ({"lengths": ()}, "lengths is (); give whole numbers of 0 or more"),
    ({"lengths": (3, -1)}, "lengths is (3, -1)"),
    ({"lengths": (True,)}, "lengths is (True,)"),
    ({"lengths": (1.0,)}, "lengths is (1.0,)"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[str(options) for options, _ in REFUSED])
def test_an_option_that_means_nothing_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        FillOptions(**options)
    assert str(refused.value).startswith(message)


# The text that comes back


class AnyWords(Scripted):
    """Writes words by chance, and likes them by chance."""

    def __init__(self, task: TaskContext, seed: int, among: list[int]) -> None:
        super().__init__(task)
        self.random = random.Random(seed)
        self.among = among

    def reads(self, request: EngineRequest, at: int) -> Mapping[int, float]:
        return {self.random.choice(self.among): 1.0}

    def likes(self, before: Ids, token: int) -> float:
        return -self.random.random()


PARTS = [
    "The ",
    "func",
    "tion",
    "é",
    "ï",
    "😀",
    "👍🏽",
    "日本",
    "\r\n",
    "\n",
    "\t",
    " ",
    "  ",
    "x_1",
    "(",
    ").",
]
# No more tokens than are scored after a gap.
some_text = st.lists(st.sampled_from(PARTS), max_size=3).map("".join) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=6
)


@settings(max_examples=80)
@given(prefix=some_text, suffix=some_text, seed=st.integers(0, 1 << 20), heal=st.booleans())
def test_the_tokens_that_were_scored_spell_the_text_that_the_user_gets(
    prefix: str, suffix: str, seed: int, heal: bool
) -> None:
    """Bytes apart, which mean something only together with their neighbours."""
    task = task_context(canvas_len=32)
    model = AnyWords(task, seed, [id_ for id_ in range(TOKENIZER.vocab_size) if TOKEN_TEXTS.text_of(id_)])
    found = drive(fill(task, prefix, suffix, FillOptions(max_tokens=3, heal=heal)), model)
    scored = {one.prompt for one in model.scored}
    assert len(scored) == len(found.candidates)
    spelled = {TOKENIZER.decode(prompt[1:]) for prompt in scored}
    assert spelled == {prefix + one.text + suffix for one in found.candidates}
    assert all("\ufffd" not in one.text for one in found.candidates)
    assert found.text == found.candidates[0].text


def test_a_text_that_is_no_text_is_never_given_to_the_user() -> None:
    class Bytes(AnyWords):
        def likes(self, before: Ids, token: int) -> float:
            return 0.0 if token in TOKENIZER.byte_ids else -5.0

        def reads(self, request: EngineRequest, at: int) -> Mapping[int, float]:
            # Half a letter where the gap is one token long, a word where it is longer.
            return {encode("é")[0] if gap_of(request) == 1 else plain_words()[0]: 1.0}

    task = task_context()
    found = drive(fill(task, "caf", " x", FillOptions(max_tokens=2, heal=False)), Bytes(task, 0, []))
    assert "\ufffd" not in found.text


def test_with_nothing_after_the_end_of_the_text_is_scored_too() -> None:
    class Finishes(ByHeart):
        """Knows how the text ends, and that it ends there only."""

        def likes(self, before: Ids, token: int) -> float:
            if token == END:
                return self.GOOD if before[-1] == self.text[-1] else self.BAD
            return super().likes(before, token)

    task = task_context()
    model = Finishes(task, encode(SENTENCE))
    found = drive(fill(task, PREFIX, "", FillOptions(max_tokens=12, heal=False, keep=64)), model)
    assert PREFIX + found.text == SENTENCE


# By asking


class Replies(Scripted):
    """Answers any prompt with one text and an end."""

    def __init__(self, task: TaskContext, text: str) -> None:
        super().__init__(task)
        self.reply = (*encode(text), END)

    def reads(self, request: EngineRequest, at: int) -> Mapping[int, float]:
        return {self.reply[min(at, len(self.reply) - 1)]: 1.0}

    def likes(self, before: Ids, token: int) -> float:
        return -0.5


def test_asking_shows_the_whole_text_with_a_mark_and_takes_the_answer() -> None:
    task = task_context(template=TEMPLATE)
    model = Replies(task, MIDDLE)
    found = drive(fill(task, PREFIX, SUFFIX, FillOptions(method="prompt", max_tokens=9)), model)
    (request,) = model.written
    asked = TOKENIZER.decode(request.prompt, controls=True)
    assert f"\n\n{PREFIX}<FILL>{SUFFIX}<turn|>" in asked
    assert asked.endswith("<|turn>model\n")
    assert request.params.max_tokens == 9
    assert not request.params.ignore_end
    assert not request.pinned
    assert found.text == MIDDLE
    assert found.prompt_tokens == len(request.prompt)
    # Its likelihood is that of the text itself, without the question.
    (score,) = model.scored
    assert TOKENIZER.decode(score.prompt[1:]) == SENTENCE
    assert found.log_likelihood == -0.5 * len(encode(MIDDLE + SUFFIX))
    assert [one.text for one in found.candidates] == [MIDDLE]


def test_an_empty_answer_is_an_empty_text() -> None:
    task = task_context(template=TEMPLATE)
    found = drive(fill(task, PREFIX, SUFFIX, FillOptions(method="prompt")), Replies(task, ""))
    assert found.text == ""
    assert found.log_likelihood == -0.5 * len(encode(SUFFIX))
    found = drive(fill(task, "", "", FillOptions(method="prompt")), Replies(task, ""))
    assert (found.text, found.candidates, found.num_tokens) == ("", (), 0)


def test_an_instruction_without_a_chat_template_is_refused() -> None:
    task = task_context()
    with pytest.raises(InputError, match='takes no instruction; use method "lengths"'):
        drive(fill(task, PREFIX, SUFFIX, FillOptions(method="prompt")), Replies(task, MIDDLE))


@pytest.mark.parametrize("lengths", [5, (), (1, -1), (True,), "ab"])
def test_lengths_that_are_none_are_refused_by_name(lengths: Any) -> None:
    with pytest.raises(InputError, match="lengths is"):
        FillOptions(lengths=lengths)
