"""A JSON schema from a caller: copied into plain Python and bounded, with the targets of its references."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote, urljoin

from dgemma.errors import InputError
from dgemma.structured_output.json_schema.keywords import ANNOTATIONS, DERIVED_KEYWORDS

MAX_VALUES = 50_000
MAX_CHARS = 1_000_000
MAX_DEPTH = 150
_MAX_INT_BITS = 1024
_MAX_REF_STEPS = 50
_INDEX = re.compile(r"[0-9]{1,9}")  # in a JSON pointer
_ONLY_REFERS = ANNOTATIONS | {"$ref"}
_SCHEMAS = (
    "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")

Schema = dict[str, Any] | bool
Conjunction = tuple[Schema, ...]
"""Schemas that a value must all satisfy. None of them is `true`; a single `false`: nothing is valid."""
Branch = tuple[dict[str, Any], ...]
"""A conjunction after expansion: only the keywords about the value itself are left to read."""


class SchemaSource:
    """A schema, the location of each of its parts, and the targets of its references."""

    def __init__(self, schema: object) -> None:
        self._values_left = MAX_VALUES
        self._chars_left = MAX_CHARS
        self._where: dict[int, str] = {}
        self._base: dict[int, str] = {}  # base URI of the references in a schema
        self._named: dict[str, Schema] = {}  # by URI, with or without an anchor
        self._dynamic: dict[str, int] = {}  # how many times a dynamic anchor is defined
        self._kept: list[object] = []  # keeps ids of derived parts valid
        self.root = self.checked(self._copied(schema, "#", 0), "#")
        self._index(self.root)

    def where(self, schema: object) -> str:
        """The location of a part of the schema, or of the part that it was derived from."""
        return self._where.get(id(schema), "#")

    def derived(self, schema: dict[str, Any], at: object) -> dict[str, Any]:
        """Register a schema derived from `at`: errors in it name that location."""
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

    def conjunction(self, schemas: Iterable[Schema]) -> Conjunction:
        """Schemas that a value must all satisfy, without duplicates; plain references are resolved.

        Schemas without constraints are left out, so that all unconstrained values share one grammar.
        """
        found = {id(schema): schema for schema in map(self._referred, schemas) if schema is not True}
        return (False,) if False in found.values() else tuple(found.values())

    def _referred(self, schema: Schema) -> Schema:
        for _ in range(_MAX_REF_STEPS):
            if not isinstance(schema, dict) or "$ref" not in schema or not schema.keys() <= _ONLY_REFERS:
                break
            schema = self.target(schema, schema["$ref"])
        return True if isinstance(schema, dict) and schema.keys() <= ANNOTATIONS else schema

    def is_dynamic(self, reference: str) -> bool:
        """Whether a dynamic anchor is defined several times: its target then depends on the referrer."""
        return self._dynamic.get(reference.partition("#")[2], 0) > 1

    def target(self, schema: dict[str, Any], reference: object) -> Schema:
        """The target of `$ref` in `schema`."""
        where = self.where(schema)
        if not isinstance(reference, str):
            raise InputError(
                f"the JSON schema's '$ref' at {where} is not a string; give one such as '#/$defs/x'."
            )
        base = self._base.get(id(schema), "")
        uri = base + reference if reference.startswith("#") else _joined_uri(base, reference, where)
        resource, _, fragment = uri.partition("#")
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
        if value in DERIVED_KEYWORDS:
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
            if isinstance(uri := schema.get("$id"), str):
                base = _joined_uri(base, uri, self.where(schema)).partition("#")[0]
                self._named.setdefault(base, schema)
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(anchor := schema.get(keyword), str):
                    self._named.setdefault(f"{base}#{anchor}", schema)
                    self._dynamic[anchor] = self._dynamic.get(anchor, 0) + (keyword == "$dynamicAnchor")
            self._base[id(schema)] = base
            waiting += [(inner, base) for inner in _inner(schema)]


def _joined_uri(base: str, uri: str, where: str) -> str:
    try:
        return urljoin(base, uri)
    except ValueError as error:
        raise InputError(f"the JSON schema has {uri[:80]!r} at {where}, which is no URI: {error}.") from None


def _under(where: str, step: object) -> str:
    return f"{where}/{str(step)[:60]}" if len(where) < 200 else where


def _inner(schema: dict[str, Any]) -> Iterator[Schema]:
    """The direct subschemas; values that are no schemas are refused later, where they are used."""
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
        elif isinstance(value, list) and _INDEX.fullmatch(key) and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value
