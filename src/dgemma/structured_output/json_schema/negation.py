"""Negation of schemas, for `not`, `oneOf` and `if`.

Every value that satisfies one of the returned schemas does not satisfy the negated one. The converse need not
hold: a grammar generates a subset of the valid values anyway. A keyword without a usable negation (`format`,
which some validators ignore) contributes no schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dgemma.structured_output.json_schema.keywords import (
    DERIVED,
    KIND_IN,
    KINDS,
    NOT_EQUAL,
    NOT_MULTIPLE_OF,
    NOT_PATTERN,
    count,
    entries,
    items,
    kinds_of,
    names_by_name,
    number,
)
from dgemma.structured_output.json_schema.source import Schema, SchemaSource

_NEGATED_BOUND = {
    "minimum": "exclusiveMaximum",
    "exclusiveMinimum": "maximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMaximum": "minimum",
}
_NOT_NEGATED = (
    "additionalProperties", "format", "maxContains", "minContains", "patternProperties", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
)  # fmt: skip
_COUNTED = {"Length": "string", "Items": "array", "Properties": "object"}


class SchemaNegator:
    """Negates schemas, each once."""

    def __init__(self, source: SchemaSource) -> None:
        self._source = source
        self._known: dict[int, list[Schema]] = {}
        self.missing: tuple[str, str] | None = None  # a keyword that was not negated, and its location

    def of(self, schema: Schema) -> list[Schema]:
        """Schemas whose union is contained in the negation of `schema`; the same objects each time."""
        if isinstance(schema, bool):
            return [not schema]
        if id(schema) not in self._known:
            where = self._source.where(schema)
            found = self._all(schema, where)
            if met := [keyword for keyword in _NOT_NEGATED if keyword in schema]:
                self.missing = (met[0], where)
            self._known[id(schema)] = [
                self._source.derived({**some, DERIVED: True}, schema) if isinstance(some, dict) else some
                for some in found
            ]
        return self._known[id(schema)]

    def _all(self, schema: dict[str, Any], where: str) -> Iterator[Schema]:
        kinds = kinds_of(schema, where)
        if kinds != frozenset(KINDS):
            yield {KIND_IN: [kind for kind in KINDS if kind not in kinds]}
        if "const" in schema:
            yield {NOT_EQUAL: [schema["const"]]}
        if "enum" in schema:
            yield {NOT_EQUAL: items(schema, "enum", where)}
        yield from self._scalars(schema, where)
        yield from self._counts(schema, where)
        yield from self._arrays(schema, where)
        yield from self._objects(schema, where)
        yield from self._in_place(schema, where)

    def _scalars(self, schema: dict[str, Any], where: str) -> Iterator[Schema]:
        for keyword, negated in _NEGATED_BOUND.items():
            if (bound := number(schema, keyword, where)) is not None:
                yield {"type": "number", negated: bound}
        if "multipleOf" in schema:
            yield {"type": "number", NOT_MULTIPLE_OF: schema["multipleOf"]}
        if "pattern" in schema:
            yield {"type": "string", NOT_PATTERN: schema["pattern"]}

    def _counts(self, schema: dict[str, Any], where: str) -> Iterator[Schema]:
        for what, kind in _COUNTED.items():
            if min_count := count(schema, f"min{what}", where):
                yield {"type": kind, f"max{what}": min_count - 1}
            if (max_count := count(schema, f"max{what}", where)) is not None:
                yield {"type": kind, f"min{what}": max_count + 1}

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
        return self._source.derived({"not": schema, DERIVED: True}, schema)
