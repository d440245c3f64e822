"""A JSON schema from outside: copied into plain Python and bounded, with what its references point at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from dgemma.constraint.schema_keywords import ANNOTATIONS, MADE_KEYWORDS
from dgemma.errors import InputError

MAX_VALUES = 50_000
MAX_CHARS = 1_000_000
MAX_DEPTH = 150
_MAX_INT_BITS = 1024
_MOST_STEPS = 50
_ONLY_REFERS = ANNOTATIONS | {"$ref"}
_SCHEMAS = (
    "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")

Schema = dict[str, Any] | bool
Together = tuple[Schema, ...]
"""Schemas that hold at once. None of them is `true`; a single `false` says that nothing is valid."""
Branch = tuple[dict[str, Any], ...]
"""Schemas that hold at once, of which only the keywords are read that look at the value itself."""


class SchemaSource:
    """A schema, where each part of it stands, and the schemas that its references name."""

    def __init__(self, schema: object) -> None:
        self._values_left = MAX_VALUES
        self._chars_left = MAX_CHARS
        self._where: dict[int, str] = {}
        self._base: dict[int, str] = {}  # the address that references in a schema are relative to
        self._named: dict[str, Schema] = {}  # by address, with or without an anchor
        self._dynamic: dict[str, int] = {}  # how often a dynamic anchor stands there
        self._kept: list[object] = []  # so that an identity stays good
        self.root = self.checked(self._copied(schema, "#", 0), "#")
        self._index(self.root)

    def where(self, schema: object) -> str:
        """The place of a part of the schema, or of what was made for it."""
        return self._where.get(id(schema), "#")

    def placed(self, schema: dict[str, Any], at: object) -> dict[str, Any]:
        """A schema that was made for the one `at`: errors in it name that place."""
        self._where[id(schema)] = self.where(at)
        self._base[id(schema)] = self._base.get(id(at), "")
        self._kept.append(schema)
        return schema

    def checked(self, schema: object, where: str) -> Schema:
        if not isinstance(schema, dict | bool):
            raise InputError(
                f"the JSON schema has {str(schema)[:40]!r} at {where}, where a schema has to stand; give an "
                "object, true or false."
            )
        return schema

    def together(self, schemas: Iterable[Schema]) -> Together:
        """Schemas that hold at once, each once; one that only refers to another is that other.

        One that says nothing is left out, so that what is free is free in the same way everywhere.
        """
        found = {id(schema): schema for schema in map(self._referred, schemas) if schema is not True}
        return (False,) if False in found.values() else tuple(found.values())

    def _referred(self, schema: Schema) -> Schema:
        for _ in range(_MOST_STEPS):
            if not isinstance(schema, dict) or "$ref" not in schema or not schema.keys() <= _ONLY_REFERS:
                break
            schema = self.target(schema, schema["$ref"])
        return True if isinstance(schema, dict) and schema.keys() <= ANNOTATIONS else schema

    def is_dynamic(self, reference: str) -> bool:
        """Whether an anchor has a meaning that depends on who refers to it: it stands in several places."""
        return self._dynamic.get(urldefrag(reference)[1], 0) > 1

    def target(self, schema: dict[str, Any], reference: object) -> Schema:
        """What `$ref` in `schema` points at."""
        where = self.where(schema)
        if not isinstance(reference, str):
            raise InputError(
                f"the JSON schema's '$ref' at {where} is not a string; give one such as '#/$defs/x'."
            )
        base = self._base.get(id(schema), "")
        address = base + reference if reference.startswith("#") else urljoin(base, reference)
        resource, fragment = urldefrag(address)
        fragment = unquote(fragment)
        found: object = self._named.get(resource)
        if found is not None and fragment.startswith("/"):
            found = _pointed_at(found, fragment)
        elif found is not None and fragment:
            found = self._named.get(f"{resource}#{fragment}")
        if found is None:
            raise InputError(
                f"the JSON schema's '$ref' at {where} points at {reference[:80]!r}, which is not in the "
                "schema; put it under '$defs'."
            )
        return self.checked(found, f"{where}/$ref")

    def _copied(self, value: object, where: str, depth: int) -> Any:
        self._values_left -= 1
        if self._values_left < 0:
            raise InputError(f"the JSON schema holds more than {MAX_VALUES} values; shorten it.")
        if depth > MAX_DEPTH:
            raise InputError(f"the JSON schema is nested deeper than {MAX_DEPTH} levels; flatten it.")
        match value:
            case None | bool():
                return value
            case str():
                return self._text(value, where)
            case int():
                if value.bit_length() > _MAX_INT_BITS:
                    raise InputError(
                        f"the JSON schema has an integer of {value.bit_length()} bits at {where}."
                    )
                return int(value)
            case float():
                if not math.isfinite(value):
                    raise InputError(f"the JSON schema has {value} at {where}; JSON has finite numbers only.")
                return float(value)
            case list() | tuple():
                items = [self._copied(item, _under(where, at), depth + 1) for at, item in enumerate(value)]
                return self._kept_at(items, where)
            case dict():
                entries = {
                    self._text(key, where): self._copied(item, _under(where, key), depth + 1)
                    for key, item in value.items()
                }
                return self._kept_at(entries, where)
        raise InputError(
            f"the JSON schema has a value of type {type(value).__name__} at {where}; give JSON values only."
        )

    def _kept_at(self, value: Any, where: str) -> Any:
        self._where[id(value)] = where if len(where) <= 200 else f"{where}..."
        self._kept.append(value)
        return value

    def _text(self, value: object, where: str) -> str:
        if not isinstance(value, str):
            raise InputError(f"the JSON schema has a key of type {type(value).__name__} at {where}.")
        if value in MADE_KEYWORDS:
            raise InputError(f"the JSON schema has {value!r} at {where}, which is reserved; remove it.")
        self._chars_left -= len(value)
        if self._chars_left < 0:
            raise InputError(f"the JSON schema holds more than {MAX_CHARS} characters; shorten it.")
        if any("\ud800" <= char <= "\udfff" for char in value):
            raise InputError(f"the JSON schema has a lone surrogate at {where}; it is half a character.")
        return str(value)

    def _index(self, root: Schema) -> None:
        self._named[""] = root
        waiting: list[tuple[Schema, str]] = [(root, "")]
        while waiting:
            schema, base = waiting.pop()
            if isinstance(schema, bool):
                continue
            if isinstance(address := schema.get("$id"), str):
                base = urldefrag(urljoin(base, address))[0]
                self._named.setdefault(base, schema)
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(anchor := schema.get(keyword), str):
                    self._named.setdefault(f"{base}#{anchor}", schema)
                    self._dynamic[anchor] = self._dynamic.get(anchor, 0) + (keyword == "$dynamicAnchor")
            self._base[id(schema)] = base
            waiting += [(inner, base) for inner in _inner(schema)]


def _under(where: str, step: object) -> str:
    return f"{where}/{str(step)[:60]}" if len(where) < 200 else where


def _inner(schema: dict[str, Any]) -> Iterator[Schema]:
    """The schemas right inside a schema; what is no schema is met again, and refused, where it is used."""
    found = [schema.get(keyword) for keyword in _SCHEMAS]
    for keyword in _LISTS:
        if isinstance(some := schema.get(keyword), list):
            found += some
    for keyword in _MAPS:
        if isinstance(some := schema.get(keyword), dict):
            found += some.values()
    return (inner for inner in found if isinstance(inner, dict | bool))


def _pointed_at(value: object, pointer: str) -> object:
    for step in pointer.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and key.isascii() and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value
