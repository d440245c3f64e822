"""What values schemas that hold at once admit, as shapes."""

from __future__ import annotations

from typing import Any

from dgemma.constraint.clock import Clock
from dgemma.constraint.json_text import Style, written
from dgemma.constraint.json_values import frozen
from dgemma.constraint.pattern import Either, Node, literal
from dgemma.constraint.schema_arrays import Arrays
from dgemma.constraint.schema_branches import Branches
from dgemma.constraint.schema_keywords import KINDS, UNLIKE, items, kinds_of, refused
from dgemma.constraint.schema_numbers import number_pattern
from dgemma.constraint.schema_objects import Objects
from dgemma.constraint.schema_shapes import Shape
from dgemma.constraint.schema_source import Branch, SchemaSource, Together
from dgemma.constraint.schema_strings import Strings
from dgemma.constraint.schema_values import Values

_MOST_LISTED = 200_000  # characters of listed values


class Plan:
    def __init__(self, source: SchemaSource, style: Style, clock: Clock) -> None:
        self._source = source
        self._style = style
        self._clock = clock
        self.branches = Branches(source, clock)
        self._strings = Strings(source, style, clock)
        self._values = Values(source, self._strings)
        self._arrays = Arrays(source, style, self._all_values)
        self._objects = Objects(source, style, clock, self._strings, self._values, self._contents)

    def shapes(self, schemas: Together) -> list[Shape]:
        """All that is valid, as a union; nothing at all when the list is empty."""
        found: list[Shape] = []
        for branch in self.branches.of(schemas):
            self._clock.check()
            if (values := self._listed(branch)) is not None:
                if values:
                    found.append(Either(tuple(written(value, self._style) for value in values)))
                continue
            kinds = self._kinds(branch)
            found += [literal(word) for word in self._words(branch, kinds)]
            if kinds & {"integer", "fraction"}:
                number = number_pattern(branch, kinds, self._source, self._clock)
                found += [number] if number is not None else []
            if "string" in kinds and (content := self._strings.content(branch)) is not None:
                found.append(self._style.quoted(content))
            if "array" in kinds:
                found += self._arrays.shapes(branch)
            if "object" in kinds:
                found += self._objects.shapes(branch)
        return found

    def _kinds(self, branch: Branch) -> frozenset[str]:
        return frozenset(KINDS).intersection(*(kinds_of(one, self._source.where(one)) for one in branch))

    def _words(self, branch: Branch, kinds: frozenset[str]) -> list[str]:
        unlike = {frozen(value) for schema in branch for value in schema.get(UNLIKE, [])}
        words = [("null", "null", None), ("true", "boolean", True), ("false", "boolean", False)]
        return [word for word, kind, value in words if kind in kinds and frozen(value) not in unlike]

    def _listed(self, branch: Branch) -> list[Any] | None:
        """The valid ones of the values that a branch lists; None when it does not list them."""
        lists = [items(one, "enum", self._source.where(one)) for one in branch if "enum" in one]
        lists += [[one["const"]] for one in branch if "const" in one]
        if not lists:
            return None
        if sum(len(str(value)) for value in min(lists, key=len)) > _MOST_LISTED:
            where = next(self._source.where(one) for one in branch if "enum" in one or "const" in one)
            raise refused(
                where, "enum", f"has more than {_MOST_LISTED} characters; list fewer or shorter values"
            )
        listed = {frozen(value): value for value in min(lists, key=len)}
        return [
            value
            for value in listed.values()
            if all(self._values.valid(schema, value) is True for schema in branch)
        ]

    def _all_values(self, schemas: Together) -> list[Any] | None:
        found: list[Any] = []
        for branch in self.branches.of(schemas):
            if (values := self._listed(branch)) is None:
                kinds = self._kinds(branch)
                if not kinds <= {"null", "boolean"}:
                    return None
                values = [{"null": None, "true": True, "false": False}[x] for x in self._words(branch, kinds)]
            found += values
        return list({frozen(value): value for value in found}.values())

    def _contents(self, schemas: Together) -> Node | None:
        """The spelled strings that satisfy schemas."""
        found: list[Node] = []
        for branch in self.branches.of(schemas):
            if (values := self._listed(branch)) is not None:
                found += [self._style.spelled(literal(value)) for value in values if isinstance(value, str)]
            elif "string" in self._kinds(branch) and (content := self._strings.content(branch)) is not None:
                found.append(content)
        return Either(tuple(found)) if found else None
