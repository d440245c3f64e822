"""A message and what it is read for, as a prompt and a JSON schema; and the record that comes back.

A checkpoint that was trained on record types names them in `record_types.json`, by name their JSON schemas,
and reads the short prompt of `make_prompt`. Any other model is told the schema in words.
"""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgemma.errors import CheckpointError, InputError
from dgemma.events import Answer
from dgemma.forms.record_types import (
    RECORD_TYPES,
    RecordTypes,
    Schema,
    any_schema,
    grounded,
    make_prompt,
    record_schema,
)

FILE_NAME = "record_types.json"
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ExtractionRequest:
    """What a model is asked."""

    prompt: str
    schema: Schema
    type: str | None
    names_type: bool  # the record begins with its type
    is_trained: bool  # the model knows this type of record


@dataclass(frozen=True, kw_only=True)
class Extraction:
    """A record out of a message. It is valid for its schema; whether it is right is up to the model."""

    record: Any
    type: str | None  # None: of a JSON schema of the caller
    is_trained: bool
    answer: Answer


def read_record_types(directory: Path) -> RecordTypes | None:
    """The types that the checkpoint in `directory` was trained on; None if it does not say so."""
    file = directory / FILE_NAME
    if not file.is_file():
        return None
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
        types = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(types, dict) or not types:
            raise ValueError("it must be an object with a JSON schema for each record type")
        for name, schema in types.items():
            if not isinstance(schema, dict) or not isinstance(schema.get("properties"), dict):
                raise ValueError(f"{name!r} is not the JSON schema of an object")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: {error}.") from None
    return types


def extraction_request(
    message: str,
    type_: str | None,
    schema: Schema | None,
    *,
    today: datetime.date,
    trained: RecordTypes | None,
) -> ExtractionRequest:
    """The prompt and schema for a message. trained: the types that the model was trained on, if any."""
    if not message.strip():
        raise InputError.about("message", f"is {message!r}; it must hold some text.")
    if type_ is not None and schema is not None:
        raise InputError.about("type", "and json_schema exclude each other; give one of them.")
    types = RECORD_TYPES if trained is None else trained
    names_type = type_ is None and schema is None
    if type_ is not None:
        schema = record_schema(type_, types)
    elif schema is None:
        schema = any_schema(types)
    else:
        type_ = next((name for name, known in types.items() if known == schema), None)
    is_trained = trained is not None and (names_type or type_ is not None)
    prompt = make_prompt(type_, message, today) if is_trained else _explain(schema, message, today)
    return ExtractionRequest(
        prompt=prompt,
        schema=grounded(schema, message),
        type=type_,
        names_type=names_type,
        is_trained=is_trained,
    )


def _explain(schema: Schema, message: str, today: datetime.date) -> str:
    return (
        "Write what the message says as one JSON object of the schema, without spaces between its parts. "
        f"Write null for what it does not say. Today is {today:%A}, {today.isoformat()}.\n\n"
        f"Schema: {json.dumps(schema, ensure_ascii=False)}\n\nMessage: {message.strip()}"
    )


def read_extraction(request: ExtractionRequest, answer: Answer) -> Extraction:
    try:
        record = json.loads(answer.text)
    except ValueError:
        raise InputError(
            f"the record was cut off after {len(answer.tokens)} tokens ({answer.finish_reason}): "
            "raise max_tokens or deadline_s, or shorten the message."
        ) from None
    type_ = record.pop("type") if request.names_type else request.type
    return Extraction(record=record, type=type_, is_trained=request.is_trained, answer=answer)
