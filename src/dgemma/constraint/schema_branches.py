"""What a schema says in place: references, `allOf`, `anyOf`, unfolded into branches of plain schemas.

A value is valid when it satisfies every schema of at least one branch. Of the schemas in a branch only the
keywords that look at the value itself are left to read.
"""

from __future__ import annotations

from typing import Any

from dgemma.constraint.schema_keywords import check_keywords, items, kinds_of, refused
from dgemma.constraint.schema_source import Schema, SchemaSource
from dgemma.errors import InputError

MAX_BRANCHES = 500
_MAX_REFERENCES = 100

Branch = tuple[dict[str, Any], ...]


class Branches:
    def __init__(self, source: SchemaSource) -> None:
        self.source = source
        self._known: dict[int, list[Branch]] = {}
        self._open: set[int] = set()

    def of(self, schemas: tuple[Schema, ...]) -> list[Branch]:
        """Of all these schemas together."""
        found: list[Branch] = [()]
        for schema in schemas:
            found = self._joined(found, self.of_one(schema), schema)
        return found

    def of_one(self, schema: Schema) -> list[Branch]:
        if isinstance(schema, bool):
            return [()] if schema else []
        key = id(schema)
        if key not in self._known:
            where = self.source.where(schema)
            if key in self._open:
                raise InputError(
                    f"the JSON schema at {where} refers to itself without a value in between; a reference "
                    "back has to stand inside 'properties', 'items' or the like."
                )
            if len(self._open) > _MAX_REFERENCES:
                raise InputError(
                    f"the JSON schema at {where} stands behind more than {_MAX_REFERENCES} references; "
                    "shorten them."
                )
            self._open.add(key)
            self._known[key] = self._unfolded(schema, where)
            self._open.remove(key)
        return self._known[key]

    def _unfolded(self, schema: dict[str, Any], where: str) -> list[Branch]:
        check_keywords(schema, where)
        found: list[Branch] = [(schema,)]
        if "$ref" in schema:
            found = self._joined(found, self.of_one(self.source.target(schema, schema["$ref"])), schema)
        for part in self._schemas(schema, "allOf", where):
            found = self._joined(found, self.of_one(part), schema)
        if "anyOf" in schema:
            parts = self._schemas(schema, "anyOf", where)
            found = self._joined(found, [branch for part in parts for branch in self.of_one(part)], schema)
        if "oneOf" in schema:
            found = self._joined(found, self._one_of(schema, where), schema)
        return found

    def _schemas(self, schema: dict[str, Any], keyword: str, where: str) -> list[Schema]:
        parts = items(schema, keyword, where)
        if keyword in schema and not parts:
            raise refused(where, keyword, "is empty; give at least one schema")
        return [self.source.checked(part, f"{where}/{keyword}/{at}") for at, part in enumerate(parts)]

    def _one_of(self, schema: dict[str, Any], where: str) -> list[Branch]:
        """Only where no value can satisfy two of them."""
        seen: list[frozenset[str]] = []
        found: list[Branch] = []
        for part in self._schemas(schema, "oneOf", where):
            branches = self.of_one(part)
            kinds: frozenset[str] = frozenset()
            for branch in branches:
                kinds |= frozenset.intersection(*(kinds_of(one, where) for one in branch))
            if any(kinds & other for other in seen):
                raise refused(where, "oneOf", "has parts that may be valid at once; use 'anyOf'")
            seen.append(kinds)
            found += branches
        return found

    def _joined(self, first: list[Branch], second: list[Branch], schema: Schema) -> list[Branch]:
        """Each of the first with each of the second; a schema that stands in both stands there once."""
        found: dict[tuple[int, ...], Branch] = {}
        if len(first) * len(second) > MAX_BRANCHES:
            raise InputError(
                f"the JSON schema at {self.source.where(schema)} has more than {MAX_BRANCHES} combinations "
                "of alternatives ('anyOf' and the like); simplify it."
            )
        for one in first:
            for other in second:
                branch = tuple({id(part): part for part in (*one, *other)}.values())
                found[tuple(id(part) for part in branch)] = branch
        return list(found.values())
