"""Made messages: reproducible, with valid records, and nothing held out in training."""

from __future__ import annotations

import datetime
import difflib
import itertools
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from dgemma.checkpoint.bundled import bundled_path
from dgemma.errors import InputError
from dgemma.forms.record_types import RECORD_TYPES, any_schema, make_prompt, record_schema
from dgemma.text.tokenizer import Tokenizer
from recipes.forms import words
from recipes.forms.layout import CANVAS, form_text
from recipes.forms.messages import _CHOICE as CHOICE
from recipes.forms.messages import _FIELD_OF as FIELD_OF
from recipes.forms.messages import COMPOSED, LIST, SPLITS, Split, _Writer, make_message
from recipes.forms.phrases import FRAGMENTS, SENTENCES
from recipes.forms.records import Forms
from recipes.forms.templates import AFTER, BEFORE, BLIND, HELD_OUT, TRAINED
from recipes.forms.words import is_held_out
from sizes import cases

COUNT = cases(600, 200)
MOST_ALIKE = 0.86  # of a template for training and a held-out one
LONGEST_RUN = 3  # literal words that a template for training must not share with a held-out one


@pytest.mark.parametrize("split", SPLITS)
def test_a_message_is_a_function_of_its_number_and_its_record_is_valid(split: Split) -> None:
    for number in range(COUNT):
        message = make_message(split, number)
        jsonschema.validate(message.record, record_schema(message.type))
        assert json.loads(message.answer) == message.expected
        jsonschema.validate(message.expected, any_schema() if not message.is_typed else {})
        assert list(message.record) == list(RECORD_TYPES[message.type]["properties"])
    assert make_message(split, 5) == make_message(split, 5)
    assert make_message(split, 5) != make_message(split, 5, seed=1)


def test_training_has_nothing_that_is_held_out() -> None:
    for number in range(COUNT):
        message = make_message("train", number)
        assert message.template < len(TRAINED[message.type])
        assert not any(map(is_held_out, message.words)), message
        assert len(message.words) < 2 or not is_held_out(*message.words[:2]), message


def test_no_record_of_training_has_a_text_that_is_held_out() -> None:
    lists = (
        words.FIRST_NAMES, words.LAST_NAMES, words.THINGS, words.TITLES, words.ITEMS, words.FAULTS,
        words.SERVICES, words.STREETS, words.COMPANY_STEMS, [name for name, _ in words.CITIES],
    )  # fmt: skip
    held_out = {word for some in lists for word in some if is_held_out(word)}
    for number in range(COUNT):
        message = make_message("train", number)
        assert not held_out & set(strings(message.record)), message


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings(part)


def test_each_held_out_split_has_what_its_name_says() -> None:
    for number in range(COUNT):
        for unknown in (make_message("templates", number), make_message("blind", number)):
            assert unknown.template >= len(TRAINED[unknown.type])
        message = make_message("values", number)
        assert message.template < len(TRAINED[message.type])
        assert any(map(is_held_out, message.words)), message
        together = make_message("combinations", number)
        assert not any(map(is_held_out, together.words)), together
        assert is_held_out(*together.words[:2]), together


def test_every_type_has_templates_of_both_kinds_and_none_twice() -> None:
    assert set(TRAINED) == set(HELD_OUT) == set(BLIND) == set(RECORD_TYPES)
    for type_ in RECORD_TYPES:
        assert len(TRAINED[type_]) >= 40
        assert len(HELD_OUT[type_]) >= 2
        assert len(BLIND[type_]) >= 6
        every = [*TRAINED[type_], *HELD_OUT[type_], *BLIND[type_]]
        assert len(set(every)) == len(every)


def test_no_template_for_training_is_nearly_a_held_out_one() -> None:
    for type_, templates in HELD_OUT.items():
        held_out = [skeleton for template in templates for skeleton in skeletons(template)]
        for template in [*TRAINED[type_], *composed(type_, count=300)]:
            for one, other in itertools.product(skeletons(template), held_out):
                matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
                assert matcher.ratio() < MOST_ALIKE, (template, other)
                assert not any(
                    sum(word.isalpha() for word in one[block.a : block.a + block.size]) >= LONGEST_RUN
                    for block in matcher.get_matching_blocks()
                ), (template, other)


def skeletons(template: str) -> list[list[str]]:
    """Its words and fields, without brackets and punctuation: with the first of each choice, the second..."""
    longest = max((len(choice.split("|")) for choice in CHOICE.findall(template)), default=1)
    return [skeleton(template, number) for number in range(longest)]


def skeleton(template: str, number: int) -> list[str]:
    def chosen(match: re.Match[str]) -> str:
        choices = match[1].split("|")
        return choices[number % len(choices)]

    def field(match: re.Match[str]) -> str:
        slot = match[1].lower()
        return f" {{{FIELD_OF.get(slot, slot)}}} "

    return re.findall(r"\{\w+\}|\w+", re.sub(r"\{(\w+)\}", field, CHOICE.sub(chosen, template)).lower())


def composed(type_: str, *, count: int) -> list[str]:
    return [_Writer("train", random.Random(number))._composed(type_) for number in range(count)]


def test_composed_messages_have_phrases_for_every_field() -> None:
    for type_, schema in RECORD_TYPES.items():
        for openers, phrases in (SENTENCES[type_], FRAGMENTS[type_]):
            assert len(openers) >= 8
            assert all(len(of_field) >= 8 for of_field in phrases.values())
            assert set(phrases) <= set(schema["properties"])
            for field, of_field in phrases.items():
                for phrase in of_field:
                    slots = {slot.lower() for slot in re.findall(r"\{(\w+)\}", phrase)}
                    assert {FIELD_OF.get(slot, slot) for slot in slots} == {field}, phrase


def test_there_is_other_text_of_many_kinds() -> None:
    for texts in (BEFORE, AFTER):
        assert len(set(texts)) == len(texts) >= 40
        assert any("{small}" in text for text in texts)
        assert any("{other}" in text for text in texts)


def test_training_has_messages_of_every_kind() -> None:
    kinds = Counter(min(make_message("train", number).template, 0) for number in range(COUNT))
    assert kinds[COMPOSED] == pytest.approx(0.3 * COUNT, rel=0.25)
    assert kinds[LIST] == pytest.approx(0.15 * COUNT, rel=0.35)


def test_a_prompt_names_the_type_and_the_days() -> None:
    prompt = make_prompt("order", " two lamps ", datetime.date(2026, 12, 29))
    assert (
        prompt == "order 2026-12-29 tue\n"
        "1wed12-30 2thu12-31 3fri01-01 4sat01-02 5sun01-03 6mon01-04 7tue01-05\n\ntwo lamps"
    )
    assert make_prompt(None, "two lamps", datetime.date(2026, 12, 29)).startswith("record 2026-12-29")


def test_an_unknown_type_is_refused_with_a_suggestion() -> None:
    with pytest.raises(InputError, match="appointment"):
        record_schema("apointment")


def test_records_can_be_read_from_any_number() -> None:
    records = Forms("train", count=10, model=bundled_path("forms"))
    assert len(records) == 10
    assert records[2:4] == [records[2], records[3]]
    assert json.loads(records[0]["canvas"]) == json.loads(records[0]["response"])
    with pytest.raises(IndexError):
        records[10]


def test_every_fifth_record_is_a_large_order() -> None:
    records = Forms("train", count=1 << 40, model=bundled_path("forms"), large_orders=5)
    for number in range(10):
        record = json.loads(records[number]["response"])
        assert number % 5 or len(record["items"]) == 3
    assert records[5]["prompt"] != records[0]["prompt"]
    assert records[7] == Forms("train", count=1 << 40, model=bundled_path("forms"))[7]


def test_fields_of_a_form_begin_at_the_same_token() -> None:
    tokenizer = Tokenizer.from_directory(bundled_path("forms"))
    places: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    for number in range(600):  # enough of each type
        message = make_message("train", number)
        text = form_text(message.expected, lambda text: len(tokenizer.encode(text)), limit=CANVAS - 1)
        assert json.loads(text) == message.expected
        assert len(tokenizer.encode(text)) < CANVAS
        for key in message.record if message.is_typed else ():
            places[message.type, key][len(tokenizer.encode(text[: text.index(f'"{key}":')]))] += 1
    for field, counts in places.items():
        assert counts.most_common(1)[0][1] > 0.85 * counts.total(), field
