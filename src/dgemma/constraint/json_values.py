"""JSON values as Python has them: what kind they are, and which are the same."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any


def frozen(value: Any) -> Hashable:
    """Equal for values that are equal as JSON: 1 is 1.0 and is not true."""
    if isinstance(value, bool | None):
        return (value,)
    if isinstance(value, list):
        return ("array", *map(frozen, value))
    if isinstance(value, dict):
        return frozenset((key, frozen(item)) for key, item in value.items())
    scalar: Hashable = value
    return scalar


def same(a: Any, b: Any) -> bool:
    return frozen(a) == frozen(b)


def kind_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value == int(value) else "fraction"
        case str():
            return "string"
        case list():
            return "array"
    return "object"
