"""Made messages: reproducible, with valid records, and nothing held out in training."""

from __future__ import annotations

import datetime
import json
from collections import Counter, defaultdict

import jsonschema
import pytest

from dgemma.checkpoint.bundled import bundled_path
from dgemma.errors import InputError
from dgemma.forms.record_types import RECORD_TYPES, any_schema, make_prompt, record_schema
from dgemma.text.tokenizer import Tokenizer
from recipes.forms.layout import CANVAS, form_text
from recipes.forms.messages import SPLITS, Split, make_message
from recipes.forms.records import Forms
from recipes.forms.templates import HELD_OUT, TRAINED
from recipes.forms.words import is_held_out

COUNT = 600


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


def test_each_held_out_split_has_what_its_name_says() -> None:
    for number in range(COUNT):
        unknown = make_message("templates", number)
        assert unknown.template >= len(TRAINED[unknown.type])
        message = make_message("values", number)
        assert message.template < len(TRAINED[message.type])
        assert any(map(is_held_out, message.words)), message
        together = make_message("combinations", number)
        assert not any(map(is_held_out, together.words)), together
        assert is_held_out(*together.words[:2]), together


def test_every_type_has_templates_of_both_kinds_and_none_twice() -> None:
    assert set(TRAINED) == set(HELD_OUT) == set(RECORD_TYPES)
    for type_ in RECORD_TYPES:
        assert len(TRAINED[type_]) >= 8
        assert len(HELD_OUT[type_]) >= 2
        every = [*TRAINED[type_], *HELD_OUT[type_]]
        assert len(set(every)) == len(every)


def test_a_prompt_names_the_type_and_the_days() -> None:
    prompt = make_prompt("order", " two lamps ", datetime.date(2026, 12, 29))
    assert (
        prompt == "order 2026-12-29 tue\nwed1230 thu1231 fri0101 sat0102 sun0103 mon0104 tue0105\n\ntwo lamps"
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


def test_fields_of_a_form_begin_at_the_same_token() -> None:
    tokenizer = Tokenizer.from_directory(bundled_path("forms"))
    places: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    for number in range(COUNT):
        message = make_message("train", number)
        text = form_text(message.expected, lambda text: len(tokenizer.encode(text)), limit=CANVAS - 1)
        assert json.loads(text) == message.expected
        assert len(tokenizer.encode(text)) < CANVAS
        for key in message.record if message.is_typed else ():
            places[message.type, key][len(tokenizer.encode(text[: text.index(f'"{key}":')]))] += 1
    for field, counts in places.items():
        assert counts.most_common(1)[0][1] > 0.85 * counts.total(), field
