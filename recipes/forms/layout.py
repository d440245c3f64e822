"""A record as a form: JSON in which each field begins at the same token, whatever the fields before it hold.

    {"title":"Lunch",         "date":"2026-11-19",  "time":"12:00",  "minutes":null,    "place":"Rome", ...

A canvas is written at all places at once. In compact JSON the place of a field depends on the length of all
fields before it, which a first step cannot know; here it is known. The spaces after a comma are JSON as any
other. Left to right there is no such need: there the model learns compact JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dgemma.forms.record_types import to_text

# Tokens of a field with its key, quotes, comma and spaces. Of a hundred values of a field a few are longer;
# then the fields after it begin later, until one is short enough to make up for it.
WIDTHS = {
    "type": 7, "title": 15, "date": 16, "time": 11, "minutes": 8, "place": 12, "person": 15,
    "customer": 17, "currency": 9, "due": 16, "item": 31, "item name": 14,
    "name": 18, "company": 15, "email": 23, "phone": 19, "city": 14,
    "sensor": 15, "quantity": 7, "value": 10, "unit": 9,
    "level": 7, "service": 11, "code": 9, "street": 14, "number": 10, "postcode": 14,
}  # fmt: skip
CANVAS = 128
ROOMY_ITEMS = 2  # an order of more items has narrower places, or it would not fit
NARROW = WIDTHS | {"customer": 13, "currency": 7, "due": 15, "item": 25, "item name": 10}

Count = Callable[[str], int]
"""The number of tokens of a text."""


def form_text(record: Mapping[str, Any], count: Count, *, limit: int) -> str:
    """The record as a form; compact, if that has more than `limit` tokens."""
    widths = NARROW if len(record.get("items") or ()) > ROOMY_ITEMS else WIDTHS
    fields = [
        (f'"{key}":{_value(key, value, widths, count)}', widths.get(key, 0)) for key, value in record.items()
    ]
    text = _joined(fields, "{}", count)
    return text if count(text) <= limit else to_text(record)


def _value(key: str, value: Any, widths: Mapping[str, int], count: Count) -> str:
    if key == "people" and value:
        return _joined([(to_text(person), widths["person"]) for person in value], "[]", count)
    if key == "items":
        items = [(_item(item, widths["item name"], count), widths["item"]) for item in value]
        return _joined(items, "[]", count)
    return to_text(value)


def _item(item: Mapping[str, Any], width: int, count: Count) -> str:
    name, *others = (f'"{key}":{to_text(value)}' for key, value in item.items())
    return _joined([(name, width), (",".join(others), 0)], "{}", count)


def _joined(parts: Sequence[tuple[str, int]], brackets: str, count: Count) -> str:
    """The parts in brackets, with a comma after each but the last, and at least one space up to its width."""
    text, end = brackets[0], 0
    for part, width in parts[:-1]:
        text, end = f"{text}{part},", end + width
        text += " " * max(1, end - count(text))
    return text + parts[-1][0] + brackets[1]
