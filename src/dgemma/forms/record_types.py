"""The record types of the bundled forms model: JSON schemas, and the prompt for a message.

A prompt has the type, the reference date, the seven days after it, and the message:

    appointment 2026-11-18 wed
    1thu11-19 2fri11-20 3sat11-21 4sun11-22 5mon11-23 6tue11-24 7wed11-25

    Lunch with Ann Hill tomorrow at noon.

The days are there, numbered, because a small model looks up better than it computes. A record is JSON without
spaces, with all fields of its type in the schema's order, and null for what the message does not say.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any

from dgemma.errors import InputError, suggestion
from dgemma.structured_output.json_schema.keywords import SPAN_OF

DAYS_AHEAD = 7
WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
ANY = "record"
CURRENCIES = ("EUR", "USD", "GBP", "CHF")
UNITS = ("C", "%", "hPa", "kg", "km/h", "V", "cm", "W", "dB")
LEVELS = ("debug", "info", "warning", "error", "critical")

VERBATIM = "x-verbatim"
"""Marks a string that is words of the message, or a number that it says."""
MAX_GROUNDED = 12_000  # characters of the message times verbatim values: a fifth of what can be compiled

Schema = dict[str, Any]
RecordTypes = Mapping[str, Schema]


def _object(**fields: Schema) -> Schema:
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_TEXT: Schema = {"type": "string", VERBATIM: True}
_PHONE: Schema = {"type": "string", "pattern": r"^\+?\d{3,20}$"}
_DATE: Schema = {"type": "string", "pattern": r"^20\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])$"}
_TIME: Schema = {"type": "string", "pattern": r"^([01]\d|2[0-3]):[0-5]\d$"}
_INTEGER: Schema = {"type": "integer", "minimum": 0, "maximum": 9999}  # computed: two hours are 120 minutes
_COUNT: Schema = {**_INTEGER, VERBATIM: True}
_NUMBER: Schema = {"type": "number", "minimum": -99_999, "maximum": 99_999, VERBATIM: True}
_WORDS: Schema = {"type": "array", "items": _TEXT, "maxItems": 4}

RECORD_TYPES: RecordTypes = {
    "appointment": _object(
        title=_TEXT,
        date=_or_null(_DATE),
        time=_or_null(_TIME),
        minutes=_or_null(_INTEGER),
        place=_or_null(_TEXT),
        people=_WORDS,
    ),
    "order": _object(
        customer=_or_null(_TEXT),
        currency=_or_null({"enum": list(CURRENCIES)}),
        due=_or_null(_DATE),
        items={
            "type": "array",
            "items": _object(name=_TEXT, count=_COUNT, price=_or_null(_NUMBER)),
            "minItems": 1,
            "maxItems": 3,
        },
    ),
    "contact": _object(
        name=_TEXT,
        company=_or_null(_TEXT),
        email=_or_null(_TEXT),
        phone=_or_null(_PHONE),
        city=_or_null(_TEXT),
    ),
    "measurement": _object(
        sensor=_or_null(_TEXT),
        quantity=_TEXT,
        value=_NUMBER,
        unit={"enum": list(UNITS)},
        date=_or_null(_DATE),
        time=_or_null(_TIME),
    ),
    "log": _object(
        level={"enum": list(LEVELS)},
        date=_or_null(_DATE),
        time=_or_null(_TIME),
        service=_TEXT,
        code=_or_null(_COUNT),
        message=_TEXT,
    ),
    "address": _object(
        name=_or_null(_TEXT),
        street=_TEXT,
        number=_TEXT,
        postcode=_or_null(_TEXT),
        city=_TEXT,
        country=_or_null(_TEXT),
    ),
}


def record_schema(type_: str, types: RecordTypes = RECORD_TYPES) -> Schema:
    """The JSON schema of a record type."""
    if type_ not in types:
        raise InputError.about(
            "type", f"is {type_!r}{suggestion(type_, list(types))} Types: {', '.join(types)}."
        )
    return types[type_]


def any_schema(types: RecordTypes = RECORD_TYPES) -> Schema:
    """A record of any type, which its first field names."""
    return {
        "anyOf": [_object(type={"const": type_}, **schema["properties"]) for type_, schema in types.items()]
    }


def grounded(schema: Schema, message: str) -> Schema:
    """The schema with its verbatim values bound to the words and numbers of the message.

    As it is, if that would take too long to compile.
    """
    count = 0

    def bound(part: Any) -> Any:
        nonlocal count
        if isinstance(part, list):
            return [bound(item) for item in part]
        if not isinstance(part, dict):
            return part
        found = {key: bound(value) for key, value in part.items() if key != VERBATIM}
        if part.get(VERBATIM) is True:
            count += 1
            found[SPAN_OF] = message
        return found

    made: Schema = bound(schema)
    return made if count * len(message) <= MAX_GROUNDED else schema


def make_prompt(type_: str | None, message: str, today: datetime.date) -> str:
    """What the model reads; the caller puts it into a user turn. Without a type the model names it."""
    days = [today + datetime.timedelta(days=number) for number in range(1, DAYS_AHEAD + 1)]
    header = f"{type_ or ANY} {today.isoformat()} {WEEKDAYS[today.weekday()]}"
    calendar = " ".join(f"{ahead}{WEEKDAYS[day.weekday()]}{day:%m-%d}" for ahead, day in enumerate(days, 1))
    return f"{header}\n{calendar}\n\n{message.strip()}"


def to_text(record: Any) -> str:
    """A record, or a part of one, as compact JSON."""
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"))
