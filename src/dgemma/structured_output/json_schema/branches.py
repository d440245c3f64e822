"""Expansion of in-place keywords (`$ref`, `allOf`, `anyOf`, `oneOf`, `if`, ...) into branches.

A value is valid if it satisfies every schema of at least one branch: a disjunctive normal form. Of the
schemas in a branch only the keywords about the value itself are left to read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dgemma.errors import InputError
from dgemma.structured_output.budget import TimeBudget
from dgemma.structured_output.json_schema.keywords import (
    DERIVED,
    KINDS,
    check_keywords,
    entries,
    items,
    kinds_of,
    min_and_max_count,
    names_by_name,
    refused,
    text,
)
from dgemma.structured_output.json_schema.negation import SchemaNegator
from dgemma.structured_output.json_schema.numbers import bounds_of
from dgemma.structured_output.json_schema.source import Branch, Conjunction, Schema, SchemaSource
from dgemma.structured_output.json_schema.values import json_equal, kind_of

MAX_BRANCHES = 500
_MAX_REFERENCES = 100
_MAX_CONFLICT_DEPTH = 4


class BranchExpander:
    """Expands schemas into branches, each schema once."""

    def __init__(self, source: SchemaSource, budget: TimeBudget) -> None:
        self.source = source
        self._budget = budget
        self._negation = SchemaNegator(source)
        self._conflicts = ConflictFinder(source, self.of)
        self._known: dict[int, list[Branch]] = {}
        self._open: set[int] = set()
        self._hides: dict[int, dict[str, Any]] = {}

    @property
    def not_negated(self) -> tuple[str, str] | None:
        """A keyword that had to be negated but has no supported negation, and its location."""
        return self._negation.missing

    def of(self, schemas: Conjunction) -> list[Branch]:
        """The branches of a conjunction."""
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
                    f"the JSON schema at {where} follows more than {_MAX_REFERENCES} references; "
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

    def _derived(self, schema: dict[str, Any], at: object) -> dict[str, Any]:
        return self.source.derived({**schema, DERIVED: True}, at)

    def _references(self, schema: dict[str, Any], where: str) -> list[list[Schema]]:
        found = [[self.source.target(schema, schema["$ref"])]] if "$ref" in schema else []
        if (reference := text(schema, "$dynamicRef", where)) is not None:
            if self.source.is_dynamic(reference):
                raise refused(
                    where, "$dynamicRef", "has several targets, depending on the referring schema; use '$ref'"
                )
            found.append([self.source.target(schema, reference)])
        return found

    def _conditional(self, schema: dict[str, Any], where: str) -> list[Schema]:
        condition, then, otherwise = (self._schema(schema, name, where) for name in ("if", "then", "else"))
        return [
            self._derived({"allOf": [condition, then]}, schema),
            self._derived({"not": condition, "allOf": [otherwise]}, schema),
        ]

    def _dependent(self, schema: dict[str, Any], where: str) -> list[list[Schema]]:
        """For each name: the property is absent, or the dependent schema applies."""
        present: list[tuple[str, dict[str, Any]]] = [
            (name, {"type": "object", "required": [name, *others]})
            for name, others in names_by_name(schema, "dependentRequired", where).items()
        ]
        present += [
            (name, {"type": "object", "required": [name], "allOf": [part]})
            for name, part in entries(schema, "dependentSchemas", where).items()
        ]
        return [
            [self._derived({"properties": {name: False}}, schema), self._derived(more, schema)]
            for name, more in present
        ]

    def _one_of(self, schema: dict[str, Any], where: str) -> list[Branch]:
        """Each part and the negations of all others, except those that contradict it anyway."""
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
        """The branches of a negated schema. Its keywords do not count as evaluated (`unevaluated...`)."""
        branches = [branch for way in self._negation.of(schema) for branch in self.of_one(way)]
        return [tuple(one if DERIVED in one else self._hidden(one) for one in branch) for branch in branches]

    def _hidden(self, schema: dict[str, Any]) -> dict[str, Any]:
        if id(schema) not in self._hides:
            self._hides[id(schema)] = self._derived(schema, schema)
        return self._hides[id(schema)]

    def _without_other_properties(self, schema: dict[str, Any], branch: Branch, where: str) -> Branch:
        """`unevaluatedProperties`: close the object, unless a schema evaluates all properties."""
        seen = [one for one in branch if DERIVED not in one]
        if any(
            "additionalProperties" in one or ("unevaluatedProperties" in one and one is not schema)
            for one in seen
        ):
            return branch
        closed: dict[str, Any] = {
            "properties": dict.fromkeys(
                (name for one in seen for name in entries(one, "properties", where)), True
            ),
            "patternProperties": dict.fromkeys(
                (name for one in seen for name in entries(one, "patternProperties", where)), True
            ),
            "additionalProperties": self._schema(schema, "unevaluatedProperties", where),
        }
        return (*branch, self._derived(closed, schema))

    def _without_other_items(self, schema: dict[str, Any], branch: Branch, where: str) -> Branch:
        seen = [one for one in branch if DERIVED not in one]
        if any("items" in one or ("unevaluatedItems" in one and one is not schema) for one in seen):
            return branch
        size = max((len(items(one, "prefixItems", where)) for one in seen), default=0)
        closed = {"prefixItems": [True] * size, "items": self._schema(schema, "unevaluatedItems", where)}
        return (*branch, self._derived(closed, schema))

    def _joined(self, first: list[Branch], second: list[Branch], schema: Schema) -> list[Branch]:
        """The cross product of two lists of branches, without duplicate schemas."""
        self._budget.check()
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
    """Whether references come before the schema's own properties, whose order they then precede."""
    before = list(schema)[: list(schema).index("properties")] if "properties" in schema else []
    return "$ref" in before or "allOf" in before


class ConflictFinder:
    """Contradictions of two schemas by kinds, listed values, bounds and required properties."""

    def __init__(self, source: SchemaSource, branches_of: Callable[[Conjunction], list[Branch]]) -> None:
        self._source = source
        self._branches_of = branches_of

    def exclude(self, first: Schema, second: Schema) -> bool:
        """Whether no value satisfies both."""
        return self._none(self._source.conjunction([first, second]), 0)

    def _none(self, schemas: Conjunction, depth: int) -> bool:
        return depth < _MAX_CONFLICT_DEPTH and all(
            self._no_value(branch, depth) for branch in self._branches_of(schemas)
        )

    def _no_value(self, branch: Branch, depth: int) -> bool:
        kinds = frozenset(KINDS).intersection(*(kinds_of(one, self._source.where(one)) for one in branch))
        listed = _listed(branch, self._source)
        if listed is not None:
            return not any(kind_of(value) in kinds for value in listed)
        return all(self._no_value_of(kind, branch, depth) for kind in kinds)

    def _no_value_of(self, kind: str, branch: Branch, depth: int) -> bool:
        if kind in ("integer", "fraction"):
            bounds = bounds_of(branch, self._source)
            return bounds.low is not None and bounds.high is not None and bounds.low > bounds.high
        if kind == "string":
            return self._is_empty_range(branch, "Length")
        if kind == "array":
            return self._is_empty_range(branch, "Items")
        if kind == "object":
            required = {
                name: None
                for one in branch
                for name in items(one, "required", self._source.where(one), of=str)
            }
            return self._is_empty_range(branch, "Properties") or any(
                self._none(self._source.conjunction(self._at(branch, name)), depth + 1) for name in required
            )
        return False

    def _is_empty_range(self, branch: Branch, what: str) -> bool:
        min_count, max_count = min_and_max_count(branch, what, self._source.where)
        return max_count is not None and max_count < min_count

    def _at(self, branch: Branch, name: str) -> list[Schema]:
        """Some of the schemas of the value of a key."""
        found: list[Schema] = []
        for one in branch:
            properties = entries(one, "properties", self._source.where(one))
            if name in properties:
                found.append(properties[name])
            elif "patternProperties" not in one:
                found.append(one.get("additionalProperties", True))
        return [self._source.checked(part, self._source.where(part)) for part in found]


def _listed(branch: Branch, source: SchemaSource) -> list[Any] | None:
    """The values that every `enum` and `const` of a branch lists; None if it has neither."""
    lists = [[one["const"]] for one in branch if "const" in one]
    lists += [items(one, "enum", source.where(one)) for one in branch if "enum" in one]
    if not lists:
        return None
    first = min(lists, key=len)
    return [value for value in first if all(any(json_equal(value, x) for x in some) for some in lists)]
