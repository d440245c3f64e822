"""Fill, edit and decide with the bundled text model: real texts, real canvases, the user's own calls."""

from __future__ import annotations

import math
from itertools import permutations

import pytest

import dgemma
from dgemma.errors import DgemmaError, InputError
from dgemma.language_model import LanguageModel
from dgemma.tasks.borders import healed_borders
from dgemma.tasks.decide import Choice, Question
from dgemma.text.token_texts import TokenTexts

WATER = "Emma had a little dog. Every morning Emma gave the do"
SLIP = "Every mornign Emma gave the dog some fresh water."


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return dgemma.load("bundled:text", dtype="float32")


REAL = {
    "code": ("def first(items):\n    retur", " items[0]\n"),
    "letters of bytes": ("Die Größe der na", "ïven Datei ist größer."),
    "emoji at the border": ("The sea 😀", "😀 is salty."),
    "other lines": ("if x:\r\n\tretur", "n x\r\n"),
    "nothing before": ("", " returns the number of bytes."),
    "nothing after": ("The function", ""),
    "nothing at all": ("", ""),
}


@pytest.mark.parametrize(("prefix", "suffix"), REAL.values(), ids=REAL)
def test_the_words_of_a_fill_spell_the_users_text_around_it(
    lm: LanguageModel, prefix: str, suffix: str
) -> None:
    found = lm.fill(prefix, suffix, lengths=[1], seed=3)
    borders = healed_borders(lm.tokenizer, TokenTexts(lm.tokenizer), prefix, suffix)
    one = found.candidates[0]
    spelled = lm.tokenizer.decode((*borders.before, *one.tokens, *borders.after))
    assert spelled == prefix + found.text + suffix
    assert set(one.tokens).isdisjoint(lm.tokenizer.controls.values())
    assert math.isfinite(found.log_likelihood)
    assert found.log_likelihood < 0


def test_a_word_that_seems_cut_is_tried_whole_and_extended(lm: LanguageModel) -> None:
    found = lm.fill("They call", " Emma in the evening.", max_tokens=3, seed=1)
    run = healed_borders(lm.tokenizer, TokenTexts(lm.tokenizer), "They call", " Emma in the evening.").run
    begins_with_run = {one.tokens[: len(run)] == run for one in found.candidates}
    assert len(run) > 1
    assert begins_with_run == {True, False}


def test_the_same_seed_fills_the_same(lm: LanguageModel) -> None:
    first, second = (lm.fill(WATER, " some fresh water.", lengths=[1, 2], seed=5) for _ in range(2))
    assert first.text.startswith("g"), "a word is healed across the border"
    assert first.text == second.text
    assert [one.tokens for one in first.candidates] == [one.tokens for one in second.candidates]
    assert first.seed == second.seed == 5
    assert first.candidates[0].log_likelihood == max(one.log_likelihood for one in first.candidates)


def test_the_model_can_be_asked_for_the_gap(lm: LanguageModel) -> None:
    found = lm.fill(
        "Every morning Emma gave the",
        " some fresh water.",
        method="prompt",
        max_tokens=4,
        seed=1,
        preset="fast",
    )
    assert found.num_tokens <= 4
    assert found.candidates[0].text == found.text
    assert found.forwards > 0


def test_an_edit_mends_the_slip_and_nothing_else(lm: LanguageModel) -> None:
    found = lm.edit(SLIP, seed=1)
    assert found.text == "Every morning Emma gave the dog some fresh water."
    assert [(one.start, one.old, one.new) for one in found.changes] == [(5, " mornign", " morning")]
    again = lm.edit(found.text, seed=1)
    assert (again.text, again.changes) == (found.text, ())


def test_the_order_of_choices_changes_no_bit_of_a_decision(lm: LanguageModel) -> None:
    labels = ("the old dog", "the old man", "Emma")
    found = set()
    for order in permutations(labels):
        question = Question(
            kind="choice",
            instructions="Who gave the dog some water?",
            choices=tuple(Choice(value=label) for label in order),
        )
        (decision,) = lm.decide(SLIP, [question], draws=2, seed=1)
        assert sum(decision.probabilities) == pytest.approx(1.0, abs=1e-9)
        found.add(tuple(decision.probabilities[order.index(label)] for label in labels))
    assert len(found) == 1


def test_options_that_mean_nothing_are_refused_by_name(lm: LanguageModel) -> None:
    with pytest.raises(InputError, match="unknown option 'max_token'"):
        lm.fill("a", "b", max_token=3)
    with pytest.raises(InputError, match="unknown option 'windws'"):
        lm.edit("a", windws=3)
    with pytest.raises(InputError, match="preset is 'slow'"):
        lm.decide("a", [Question(kind="predicate", instructions="Is it?")], preset="slow")
    with pytest.raises(InputError, match="keep is 0"):
        lm.fill("a", "b", keep=0)
    with pytest.raises(InputError, match="windows is 0"):
        lm.edit("a", windows=0)


def test_a_decision_that_the_deadline_cuts_short_is_refused_like_other_wrong_input(lm: LanguageModel) -> None:
    with pytest.raises(DgemmaError):
        lm.decide(SLIP, [Question(kind="predicate", instructions="Is it so?")], deadline_s=1e-6)
