"""What a schema says in place (references, `allOf`, `anyOf`, `if` and so on), unfolded into branches.

A value is valid when it satisfies every schema of at least one branch. Of the schemas in a branch only the
keywords that look at the value itself are left to read.
"""

from __future__ import annotations

from typing import Any

from dgemma.constraint.clock import Clock
from dgemma.constraint.schema_conflicts import Conflicts
from dgemma.constraint.schema_keywords import (
    MADE,
    check_keywords,
    entries,
    items,
    names_by_name,
    refused,
    text,
)
from dgemma.constraint.schema_negation import Negation
from dgemma.constraint.schema_source import Branch, Schema, SchemaSource, Together
from dgemma.errors import InputError

MAX_BRANCHES = 500
_MAX_REFERENCES = 100


class Branches:
    def __init__(self, source: SchemaSource, clock: Clock) -> None:
        self.source = source
        self._clock = clock
        self._negation = Negation(source)
        self._conflicts = Conflicts(source, self.of)
        self._known: dict[int, list[Branch]] = {}
        self._open: set[int] = set()
        self._hides: dict[int, dict[str, Any]] = {}

    @property
    def without_opposite(self) -> tuple[str, str] | None:
        """A keyword whose opposite was asked for and is not known, and where it stands."""
        return self._negation.missing

    def of(self, schemas: Together) -> list[Branch]:
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
        for ways in (
            *self._references(schema, where),
            *([part] for part in self._schemas(schema, "allOf", where)),
            *([self._schemas(schema, "anyOf", where)] if "anyOf" in schema else []),
            *([self._conditional(schema, where)] if "if" in schema else []),
            *self._dependent(schema, where),
        ):
            found = self._joined(found, [branch for way in ways for branch in self.of_one(way)], schema)
        if "not" in schema:
            found = self._joined(found, self._without(self._schema(schema, "not", where)), schema)
        if "oneOf" in schema:
            found = self._joined(found, self._one_of(schema, where), schema)
        if "unevaluatedProperties" in schema:
            found = [self._without_other_properties(schema, branch, where) for branch in found]
        if "unevaluatedItems" in schema:
            found = [self._without_other_items(schema, branch, where) for branch in found]
        return [(*branch[1:], schema) for branch in found] if _is_base_first(schema) else found

    def _schema(self, schema: dict[str, Any], keyword: str, where: str) -> Schema:
        return self.source.checked(schema.get(keyword, True), f"{where}/{keyword}")

    def _schemas(self, schema: dict[str, Any], keyword: str, where: str) -> list[Schema]:
        parts = items(schema, keyword, where)
        if keyword in schema and not parts:
            raise refused(where, keyword, "is empty; give at least one schema")
        return [self.source.checked(part, f"{where}/{keyword}/{at}") for at, part in enumerate(parts)]

    def _made(self, made: dict[str, Any], at: object) -> dict[str, Any]:
        return self.source.placed({**made, MADE: True}, at)

    def _references(self, schema: dict[str, Any], where: str) -> list[list[Schema]]:
        found = [[self.source.target(schema, schema["$ref"])]] if "$ref" in schema else []
        if (reference := text(schema, "$dynamicRef", where)) is not None:
            if self.source.is_dynamic(reference):
                raise refused(where, "$dynamicRef", "has several targets, by who refers to it; use '$ref'")
            found.append([self.source.target(schema, reference)])
        return found

    def _conditional(self, schema: dict[str, Any], where: str) -> list[Schema]:
        condition, then, otherwise = (self._schema(schema, name, where) for name in ("if", "then", "else"))
        return [
            self._made({"allOf": [condition, then]}, schema),
            self._made({"not": condition, "allOf": [otherwise]}, schema),
        ]

    def _dependent(self, schema: dict[str, Any], where: str) -> list[list[Schema]]:
        """For each name: it is not there, or more has to be."""
        there: list[tuple[str, dict[str, Any]]] = [
            (name, {"type": "object", "required": [name, *others]})
            for name, others in names_by_name(schema, "dependentRequired", where).items()
        ]
        there += [
            (name, {"type": "object", "required": [name], "allOf": [part]})
            for name, part in entries(schema, "dependentSchemas", where).items()
        ]
        return [
            [self._made({"properties": {name: False}}, schema), self._made(more, schema)]
            for name, more in there
        ]

    def _one_of(self, schema: dict[str, Any], where: str) -> list[Branch]:
        """Each part without all others, except those that exclude it anyway."""
        parts = self._schemas(schema, "oneOf", where)
        overlap = {
            frozenset({at, other})
            for at in range(len(parts))
            for other in range(at)
            if not self._conflicts.exclude(parts[at], parts[other])
        }
        found: list[Branch] = []
        for at, part in enumerate(parts):
            branches = self.of_one(part)
            for number, other in enumerate(parts):
                if {at, number} in overlap:
                    branches = self._joined(branches, self._without(other), schema)
            found += branches
        return found

    def _without(self, schema: Schema) -> list[Branch]:
        """What does not satisfy a schema. What is looked at only to find this out is not seen by others."""
        branches = [branch for way in self._negation.of(schema) for branch in self.of_one(way)]
        return [tuple(one if MADE in one else self._hidden(one) for one in branch) for branch in branches]

    def _hidden(self, schema: dict[str, Any]) -> dict[str, Any]:
        if id(schema) not in self._hides:
            self._hides[id(schema)] = self._made(schema, schema)
        return self._hides[id(schema)]

    def _without_other_properties(self, schema: dict[str, Any], branch: Branch, where: str) -> Branch:
        """Only properties that some schema of the branch looks at, unless one looks at all."""
        seen = [one for one in branch if MADE not in one]
        if any(
            "additionalProperties" in one or ("unevaluatedProperties" in one and one is not schema)
            for one in seen
        ):
            return branch
        made: dict[str, Any] = {
            "properties": dict.fromkeys(
                (name for one in seen for name in entries(one, "properties", where)), True
            ),
            "patternProperties": dict.fromkeys(
                (name for one in seen for name in entries(one, "patternProperties", where)), True
            ),
            "additionalProperties": self._schema(schema, "unevaluatedProperties", where),
        }
        return (*branch, self._made(made, schema))

    def _without_other_items(self, schema: dict[str, Any], branch: Branch, where: str) -> Branch:
        seen = [one for one in branch if MADE not in one]
        if any("items" in one or ("unevaluatedItems" in one and one is not schema) for one in seen):
            return branch
        size = max((len(items(one, "prefixItems", where)) for one in seen), default=0)
        made = {"prefixItems": [True] * size, "items": self._schema(schema, "unevaluatedItems", where)}
        return (*branch, self._made(made, schema))

    def _joined(self, first: list[Branch], second: list[Branch], schema: Schema) -> list[Branch]:
        """Each of the first with each of the second; a schema that stands in both stands there once."""
        self._clock.check()
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


def _is_base_first(schema: dict[str, Any]) -> bool:
    """Whether a schema refers to others before it names its own properties: theirs are then written first."""
    before = list(schema)[: list(schema).index("properties")] if "properties" in schema else []
    return "$ref" in before or "allOf" in before
