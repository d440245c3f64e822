"""What a model is asked for a record, and what is read from its answer."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from dgemma.errors import CheckpointError, InputError
from dgemma.events import Answer, FinishReason
from dgemma.forms.extraction import (
    FILE_NAME,
    MAX_FILE_BYTES,
    ExtractionRequest,
    extraction_request,
    read_extraction,
    read_record_types,
)
from dgemma.forms.record_types import RECORD_TYPES, RecordTypes, any_schema, grounded, make_prompt

TODAY = datetime.date(2026, 11, 18)
OWN: RecordTypes = {"ticket": {"type": "object", "properties": {"title": {"type": "string"}}}}


def request(
    type_: str | None = None, schema: Any = None, trained: RecordTypes | None = RECORD_TYPES
) -> ExtractionRequest:
    return extraction_request(" two lamps ", type_, schema, today=TODAY, trained=trained)


def answer(text: str) -> Answer:
    return Answer(text=text, tokens=(1, 2), finish_reason=FinishReason.LENGTH, seed=0, decode="diffuse")


def test_a_trained_model_reads_the_prompt_of_its_training() -> None:
    asked = request("order")
    assert asked.prompt == make_prompt("order", "two lamps", TODAY)
    assert asked.schema == grounded(RECORD_TYPES["order"], " two lamps ")
    assert asked.is_trained
    assert not asked.names_type


def test_the_schema_of_a_known_type_is_that_type() -> None:
    same = json.loads(json.dumps(RECORD_TYPES["order"]))
    assert request(schema=same) == request("order")


def test_without_a_type_the_model_names_it() -> None:
    asked = request()
    assert asked.prompt == make_prompt(None, "two lamps", TODAY)
    assert asked.schema == grounded(any_schema(), " two lamps ")
    found = read_extraction(asked, answer('{"type":"contact","name":"Ann"}'))
    assert found.type == "contact"
    assert found.record == {"name": "Ann"}


def test_types_of_a_checkpoint_replace_the_built_in_ones() -> None:
    assert request("ticket", trained=OWN).prompt == make_prompt("ticket", "two lamps", TODAY)
    with pytest.raises(InputError, match=r"Types: ticket\."):
        request("order", trained=OWN)


@pytest.mark.parametrize("trained", [None, RECORD_TYPES])
def test_a_foreign_schema_is_explained_in_words(trained: RecordTypes | None) -> None:
    schema = {"type": "object", "properties": {"colour": {"type": "string"}}}
    asked = request(schema=schema, trained=trained)
    assert not asked.is_trained
    assert asked.type is None
    assert json.dumps(schema) in asked.prompt
    assert "Wednesday, 2026-11-18" in asked.prompt
    assert asked.prompt.endswith("two lamps")


def test_any_model_can_be_asked_for_a_built_in_type() -> None:
    asked = request("order", trained=None)
    assert not asked.is_trained
    assert asked.schema == grounded(RECORD_TYPES["order"], " two lamps ")
    assert '"customer"' in asked.prompt


def test_misuse_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="exclude each other"):
        request("order", {"type": "object"})
    with pytest.raises(InputError, match="some text"):
        extraction_request(" \n", "order", None, today=TODAY, trained=None)
    with pytest.raises(InputError, match="appointment"):
        request("apointment")


def test_a_record_that_was_cut_off_is_an_error() -> None:
    with pytest.raises(InputError, match="cut off after 2 tokens"):
        read_extraction(request("order"), answer('{"customer":"An'))


def test_types_are_read_from_the_checkpoint(tmp_path: Path) -> None:
    assert read_record_types(tmp_path) is None
    (tmp_path / FILE_NAME).write_text(json.dumps(OWN))
    assert read_record_types(tmp_path) == OWN


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"a": 1}', '{"a": {"type": "object"}}', "[" * 100_000, " " * (MAX_FILE_BYTES + 1)],
)
def test_a_broken_file_of_types_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=FILE_NAME):
        read_record_types(tmp_path)


def test_what_is_verbatim_is_words_of_the_message() -> None:
    schema = request("order").schema
    assert schema["properties"]["customer"]["anyOf"][0] == {"type": "string", "x-spanOf": " two lamps "}
    assert "x-spanOf" not in json.dumps(schema["properties"]["due"])
    assert "x-verbatim" not in json.dumps(schema)
    assert "x-verbatim" in json.dumps(RECORD_TYPES["order"])


def test_long_messages_are_not_bound_to_their_words() -> None:
    message = "two lamps " * 700
    asked = extraction_request(message, "order", None, today=TODAY, trained=None)
    assert asked.schema == RECORD_TYPES["order"]
