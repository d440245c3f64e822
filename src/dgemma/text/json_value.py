"""JSON values from callers, copied into plain Python values and bounded. Templates see only such copies."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from dgemma.errors import InputError

MAX_DEPTH = 32
MAX_VALUES = 1_000_000
MAX_CHARS = 16 << 20
_MAX_INT_BITS = 1024


@dataclass
class JsonReader:
    """Copies values within one budget of values and characters: one reader per chat."""

    num_values_left: int = field(default=MAX_VALUES)
    num_chars_left: int = field(default=MAX_CHARS)

    def read(self, value: object, where: str, *, depth: int = 0) -> Any:
        """A copy made of dict, list, str, int, float, bool and None only. `where` names it in errors."""
        self.num_values_left -= 1
        if self.num_values_left < 0:
            raise InputError(f"the chat holds more than {MAX_VALUES} JSON values; shorten it.")
        if depth > MAX_DEPTH:
            raise InputError(f"{where} is nested deeper than {MAX_DEPTH} levels; flatten it.")
        match value:
            case None | bool():
                return value
            case str():
                return self.text(value, where)
            case int():
                if value.bit_length() > _MAX_INT_BITS:
                    raise InputError(f"{where} holds an integer of {value.bit_length()} bits; give a string.")
                return int(value)
            case float():
                if not math.isfinite(value):
                    raise InputError(f"{where} holds {value}; JSON has finite numbers only.")
                return float(value)
            case list() | tuple():
                return [self.read(item, where, depth=depth + 1) for item in value]
            case dict():
                return {
                    self.key(key, where): self.read(item, where, depth=depth + 1)
                    for key, item in value.items()
                }
        raise InputError(f"{where} holds a value of type {type(value).__name__}; give JSON values only.")

    def text(self, value: object, where: str) -> str:
        if not isinstance(value, str):
            raise InputError(f"{where} is of type {type(value).__name__}; give a string.")
        self.num_chars_left -= len(value)
        if self.num_chars_left < 0:
            raise InputError(f"the chat holds more than {MAX_CHARS} characters; shorten it.")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"{where} holds the lone surrogate U+{ord(value[error.start]):04X} at position "
                f"{error.start}; it is half a character. Remove or repair it."
            ) from None
        return str(value)

    def key(self, value: object, where: str) -> str:
        if not isinstance(value, str):
            raise InputError(f"{where} has a key of type {type(value).__name__}; JSON keys are strings.")
        return self.text(value, where)
