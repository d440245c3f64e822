"""Whether a branch of a schema surely has no valid value: when parts of `oneOf` exclude each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dgemma.constraint.json_values import kind_of, same
from dgemma.constraint.schema_keywords import KINDS, entries, items, kinds_of, least_and_most
from dgemma.constraint.schema_numbers import bounds_of
from dgemma.constraint.schema_source import Branch, Schema, SchemaSource, Together

_MAX_DEPTH = 4


class Conflicts:
    """Only what is plain to see: kinds, listed values, bounds, and properties that have to be there."""

    def __init__(self, source: SchemaSource, branches_of: Callable[[Together], list[Branch]]) -> None:
        self._source = source
        self._branches_of = branches_of

    def exclude(self, first: Schema, second: Schema) -> bool:
        """Whether no value satisfies both."""
        return self._none(self._source.together([first, second]), 0)

    def _none(self, schemas: Together, depth: int) -> bool:
        return depth < _MAX_DEPTH and all(
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
            return self._too_few(branch, "Length")
        if kind == "array":
            return self._too_few(branch, "Items")
        if kind == "object":
            required = {
                name: None
                for one in branch
                for name in items(one, "required", self._source.where(one), of=str)
            }
            return self._too_few(branch, "Properties") or any(
                self._none(self._source.together(self._at(branch, name)), depth + 1) for name in required
            )
        return False

    def _too_few(self, branch: Branch, what: str) -> bool:
        least, most = least_and_most(branch, what, self._source.where)
        return most is not None and most < least

    def _at(self, branch: Branch, name: str) -> list[Schema]:
        """Some of what the value of a key has to be."""
        found: list[Schema] = []
        for one in branch:
            properties = entries(one, "properties", self._source.where(one))
            if name in properties:
                found.append(properties[name])
            elif "patternProperties" not in one:
                found.append(one.get("additionalProperties", True))
        return [self._source.checked(part, self._source.where(part)) for part in found]


def _listed(branch: Branch, source: SchemaSource) -> list[Any] | None:
    """The values that every `enum` and `const` of a branch has; None when there is none of them."""
    lists = [[one["const"]] for one in branch if "const" in one]
    lists += [items(one, "enum", source.where(one)) for one in branch if "enum" in one]
    if not lists:
        return None
    first = min(lists, key=len)
    return [value for value in first if all(any(same(value, x) for x in some) for some in lists)]
