"""What a schema is not, as schemas: how `not`, `oneOf` and `if` are read.

Whatever satisfies one of the schemas given back surely does not satisfy the first one. The converse need not
hold: a part of what is not valid is enough, since a pattern has a part of what is valid anyway. A keyword
that says nothing about its opposite (`format`, which some ignore) adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dgemma.constraint.schema_keywords import (
    KINDS,
    MADE,
    NO_MULTIPLE,
    NOT_FOUND,
    ONLY_KINDS,
    UNLIKE,
    count,
    entries,
    items,
    kinds_of,
    names_by_name,
    number,
)
from dgemma.constraint.schema_source import Schema, SchemaSource

_OPPOSITE_BOUND = {
    "minimum": "exclusiveMaximum",
    "exclusiveMinimum": "maximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMaximum": "minimum",
}
_WITHOUT_OPPOSITE = (
    "additionalProperties", "format", "maxContains", "minContains", "patternProperties", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
)  # fmt: skip
_COUNTED = {"Length": "string", "Items": "array", "Properties": "object"}


class Negation:
    def __init__(self, source: SchemaSource) -> None:
        self._source = source
        self._known: dict[int, list[Schema]] = {}
        self.missing: tuple[str, str] | None = None  # a keyword without an opposite that was met, and where

    def of(self, schema: Schema) -> list[Schema]:
        """Schemas that are not satisfied where `schema` is; the same objects each time."""
        if isinstance(schema, bool):
            return [not schema]
        if id(schema) not in self._known:
            where = self._source.where(schema)
            found = self._all(schema, where)
            if met := [keyword for keyword in _WITHOUT_OPPOSITE if keyword in schema]:
                self.missing = (met[0], where)
            self._known[id(schema)] = [
                self._source.placed({**some, MADE: True}, schema) if isinstance(some, dict) else some
                for some in found
            ]
        return self._known[id(schema)]

    def _all(self, schema: dict[str, Any], where: str) -> Iterator[Schema]:
        kinds = kinds_of(schema, where)
        if kinds != frozenset(KINDS):
            yield {ONLY_KINDS: [kind for kind in KINDS if kind not in kinds]}
        if "const" in schema:
            yield {UNLIKE: [schema["const"]]}
        if "enum" in schema:
            yield {UNLIKE: items(schema, "enum", where)}
        yield from self._scalars(schema, where)
        yield from self._counts(schema, where)
        yield from self._arrays(schema, where)
        yield from self._objects(schema, where)
        yield from self._in_place(schema, where)

    def _scalars(self, schema: dict[str, Any], where: str) -> Iterator[Schema]:
        for keyword, opposite in _OPPOSITE_BOUND.items():
            if (bound := number(schema, keyword, where)) is not None:
                yield {"type": "number", opposite: bound}
        if "multipleOf" in schema:
            yield {"type": "number", NO_MULTIPLE: schema["multipleOf"]}
        if "pattern" in schema:
            yield {"type": "string", NOT_FOUND: schema["pattern"]}

    def _counts(self, schema: dict[str, Any], where: str) -> Iterator[Schema]:
        for what, kind in _COUNTED.items():
            if least := count(schema, f"min{what}", where):
                yield {"type": kind, f"max{what}": least - 1}
            if (most := count(schema, f"max{what}", where)) is not None:
                yield {"type": kind, f"min{what}": most + 1}

    def _arrays(self, schema: dict[str, Any], where: str) -> Iterator[Schema]:
        prefix = items(schema, "prefixItems", where)
        wrong = [*prefix, schema["items"]] if "items" in schema else prefix
        for at, part in enumerate(wrong):
            first = [*([True] * at), self._not(part)]
            yield {"type": "array", "minItems": at + 1, "prefixItems": first, "items": True}
        if (
            "contains" in schema
            and "maxContains" not in schema
            and count(schema, "minContains", where) in (None, 1)
        ):
            yield {"type": "array", "items": self._not(schema["contains"])}

    def _objects(self, schema: dict[str, Any], where: str) -> Iterator[Schema]:
        for name in items(schema, "required", where, of=str):
            yield {"type": "object", "properties": {name: False}}
        for name, part in entries(schema, "properties", where).items():
            yield {"type": "object", "required": [name], "properties": {name: self._not(part)}}
        for name, others in names_by_name(schema, "dependentRequired", where).items():
            for other in others:
                yield {"type": "object", "required": [name], "properties": {other: False}}
        for name, part in entries(schema, "dependentSchemas", where).items():
            yield {"type": "object", "required": [name], "not": part}

    def _in_place(self, schema: dict[str, Any], where: str) -> Iterator[Schema]:
        if "$ref" in schema:
            yield self._not(self._source.target(schema, schema["$ref"]))
        for part in items(schema, "allOf", where):
            yield self._not(part)
        if "anyOf" in schema:
            yield {"allOf": [self._not(part) for part in items(schema, "anyOf", where)]}
        if "oneOf" in schema:
            parts = items(schema, "oneOf", where)
            yield {"allOf": [self._not(part) for part in parts]}
            for at, part in enumerate(parts):
                for other in parts[:at]:
                    yield {"allOf": [part, other]}
        if "not" in schema:
            yield self._source.checked(schema["not"], f"{where}/not")
        if "if" in schema:
            if "then" in schema:
                yield {"allOf": [schema["if"], self._not(schema["then"])]}
            if "else" in schema:
                yield {"allOf": [self._not(schema["if"]), self._not(schema["else"])]}

    def _not(self, schema: Schema) -> Schema:
        schema = self._source.checked(schema, self._source.where(schema))
        if isinstance(schema, bool):
            return not schema
        return self._source.placed({"not": schema, MADE: True}, schema)
