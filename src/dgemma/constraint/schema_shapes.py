"""What values a set of schemas admits: scalars as patterns, arrays and objects by their parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dgemma.constraint import numerals
from dgemma.constraint.clock import Clock
from dgemma.constraint.json_text import Style, written
from dgemma.constraint.pattern import Either, Node, literal
from dgemma.constraint.product import both, minus
from dgemma.constraint.schema_branches import Branch, Branches
from dgemma.constraint.schema_keywords import KINDS, count, entries, items, kinds_of, refused
from dgemma.constraint.schema_source import Schema, SchemaSource
from dgemma.constraint.schema_strings import Strings
from dgemma.constraint.schema_values import Values, bounds_of, divisor_of
from dgemma.errors import InputError

_MOST_ITEMS = 1000  # of an array of limited size; a larger `maxItems` allows arrays that are not written

Together = tuple[Schema, ...]
"""Schemas that hold at once. None of them is `true`; a single `false` says that nothing is valid."""


@dataclass(frozen=True)
class ArrayShape:
    prefix: tuple[Together, ...]
    rest: Together | None  # None: nothing comes behind the prefix
    least: int
    most: int | None
    distinct: tuple[Node, ...] = ()  # the items, when each may stand there once


@dataclass(frozen=True)
class Property:
    key: Node
    value: Together
    required: bool


@dataclass(frozen=True)
class ObjectShape:
    named: tuple[Property, ...]
    others: tuple[tuple[Node, Together], ...]  # keys that are not named, and what they may hold
    least: int
    most: int | None


Shape = Node | ArrayShape | ObjectShape


def together(schemas: list[Schema]) -> Together:
    if any(schema is False for schema in schemas):
        return (False,)
    return tuple({id(schema): schema for schema in schemas if schema is not True}.values())


class Shapes:
    def __init__(self, source: SchemaSource, style: Style, clock: Clock) -> None:
        self._source = source
        self._style = style
        self._clock = clock
        self._branches = Branches(source)
        self._strings = Strings(source, style, clock)
        self._values = Values(source, self._strings)

    def of(self, schemas: Together) -> list[Shape]:
        """All that is valid, as a union; nothing at all when the list is empty."""
        found: list[Shape] = []
        for branch in self._branches.of(schemas):
            self._clock.check()
            if any("const" in schema or "enum" in schema for schema in branch):
                found += self._listed(branch)
                continue
            kinds = frozenset(KINDS)
            for schema in branch:
                kinds &= kinds_of(schema, self._source.where(schema))
            found += self._scalars(branch, kinds)
            if "array" in kinds and (array := self._array(branch)) is not None:
                found.append(array)
            if "object" in kinds and (object_ := self._object(branch)) is not None:
                found.append(object_)
        return found

    def _listed(self, branch: Branch) -> list[Shape]:
        values: list[Any] | None = None
        for schema in branch:
            if "enum" in schema:
                values = items(schema, "enum", self._source.where(schema)) if values is None else values
            if "const" in schema:
                values = [schema["const"]]
        valid = [
            value for value in values or [] if all(self._values.valid(schema, value) for schema in branch)
        ]
        return [Either(tuple(written(value, self._style) for value in valid))] if valid else []

    def _scalars(self, branch: Branch, kinds: frozenset[str]) -> list[Shape]:
        found: list[Node | None] = [literal("null")] if "null" in kinds else []
        if "boolean" in kinds:
            found += [literal("true"), literal("false")]
        if kinds & {"integer", "fraction"}:
            found.append(self._number(branch, kinds))
        if "string" in kinds and (content := self._strings.content(branch)) is not None:
            found.append(self._style.quoted(content))
        return [node for node in found if node is not None]

    def _number(self, branch: Branch, kinds: frozenset[str]) -> Node | None:
        bounds = bounds_of(branch, self._source)
        if "fraction" not in kinds:
            found = numerals.integers(bounds)
        else:
            found = numerals.numbers(bounds, self._clock, only_fractions="integer" not in kinds)
        for schema in branch:
            where = self._source.where(schema)
            if found is not None and (divisor := divisor_of(schema, where)) is not None:
                try:
                    found = numerals.multiples(found, divisor, bounds, self._clock)
                except InputError as error:
                    raise refused(where, "multipleOf", f"is not taken: {str(error).rstrip('.')}") from None
        return found

    def _array(self, branch: Branch) -> ArrayShape | None:
        least, most = 0, None
        prefixes = []
        for schema in branch:
            where = self._source.where(schema)
            least = max(least, count(schema, "minItems", where) or 0)
            limit = count(schema, "maxItems", where)
            most = limit if most is None or (limit is not None and limit < most) else most
            prefixes.append(
                [
                    self._source.checked(part, f"{where}/prefixItems/{at}")
                    for at, part in enumerate(items(schema, "prefixItems", where))
                ]
            )
        size = max(map(len, prefixes), default=0)
        rests = [
            self._source.checked(schema.get("items", True), f"{self._source.where(schema)}/items")
            for schema in branch
        ]
        prefix = tuple(
            together([p[at] if at < len(p) else rest for p, rest in zip(prefixes, rests, strict=True)])
            for at in range(size)
        )
        # Where the first items are named and nothing is said of others, there are no others.
        if size > least and not any("items" in schema for schema in branch):
            most = size if most is None else min(most, size)
        if least > _MOST_ITEMS:
            raise InputError(
                f"the JSON schema asks for {least} items of an array; at most {_MOST_ITEMS} are taken."
            )
        most = most if most is None else min(most, _MOST_ITEMS)
        if most is not None and most < least:
            return None
        rest = together(rests) if most is None or most > size else None
        unique = [schema for schema in branch if schema.get("uniqueItems") is True]
        if unique and (most is None or most > 1):
            where = self._source.where(unique[0])
            raise refused(where, "uniqueItems", "is not supported: no machine remembers all items; remove it")
        return ArrayShape(prefix, rest, least, most)

    def _object(self, branch: Branch) -> ObjectShape | None:
        least, most = 0, None
        required: dict[str, None] = {}
        names: dict[str, None] = {}
        for schema in branch:
            where = self._source.where(schema)
            least = max(least, count(schema, "minProperties", where) or 0)
            limit = count(schema, "maxProperties", where)
            most = limit if most is None or (limit is not None and limit < most) else most
            required |= dict.fromkeys(items(schema, "required", where, of=str))
            names |= dict.fromkeys(entries(schema, "properties", where))
        named = [
            Property(self._style.key(name), self._at_key(branch, name), name in required)
            for name in names | required
        ]
        if most is not None and most < max(least, len(required)):
            return None
        return ObjectShape(tuple(named), tuple(self._others(branch, list(names | required))), least, most)

    def _at_key(self, branch: Branch, name: str) -> Together:
        """What the value of a key has to be."""
        found: list[Schema] = []
        for schema in branch:
            where = self._source.where(schema)
            properties = entries(schema, "properties", where)
            is_named: bool | None = name in properties
            if name in properties:
                found.append(self._source.checked(properties[name], f"{where}/properties/{name[:60]}"))
            for pattern, part in entries(schema, "patternProperties", where).items():
                matches = self._strings.matches(pattern, name, where, "patternProperties")
                if matches is not False:  # where readers differ, the value pleases both
                    found.append(self._source.checked(part, f"{where}/patternProperties/{pattern[:60]}"))
                is_named = is_named or matches
            if not is_named:
                found.append(self._additional(schema))
            if "propertyNames" in schema and not self._values.valid(schema["propertyNames"], name):
                return (False,)
        return together(found)

    def _additional(self, schema: dict[str, Any]) -> Schema:
        where = self._source.where(schema)
        return self._source.checked(schema.get("additionalProperties", True), f"{where}/additionalProperties")

    def _others(self, branch: Branch, names: list[str]) -> list[tuple[Node, Together]]:
        """Keys that are not named: none where some are named and nothing is said of others."""
        closed = [
            schema
            for schema in branch
            if "additionalProperties" not in schema
            and ("properties" in schema or "patternProperties" in schema)
        ]
        patterns = [
            (schema, pattern, part)
            for schema in branch
            for pattern, part in entries(schema, "patternProperties", self._source.where(schema)).items()
        ]
        found: list[tuple[Node, Together]] = []
        for at, (owner, pattern, part) in enumerate(patterns):
            value = together([part, *(self._additional(schema) for schema in branch if schema is not owner)])
            if value == (False,) or any(schema is not owner for schema in closed):
                continue
            excluded = [other for number, (_, other, _) in enumerate(patterns) if number != at]
            keys = self._keys(branch, names, [pattern], excluded)
            if keys is not None:
                found.append((self._style.quoted(keys), value))
        value = together([self._additional(schema) for schema in branch])
        if not closed and value != (False,):
            keys = self._keys(branch, names, [], [pattern for _, pattern, _ in patterns])
            if keys is not None:
                found.append((self._style.free_keys(keys), value))
        return found

    def _keys(self, branch: Branch, names: list[str], found: list[str], excluded: list[str]) -> Node | None:
        """Spelled keys that are no names, in which one pattern is found and others are not."""
        style, clock = self._style, self._clock
        where = "#"
        keys: Node | None
        if found:
            keys = style.spelled(self._strings.searched(found[0], "surely", where, "patternProperties"))
        else:
            keys = style.spelled(style.free_key)
        allowed = together([schema["propertyNames"] for schema in branch if "propertyNames" in schema])
        if allowed and keys is not None:
            contents = self._contents(allowed)
            keys = both(keys, contents, clock) if contents is not None else None
        if names and keys is not None:
            keys = minus(keys, Either(tuple(style.spelled(literal(name)) for name in names)), clock)
        for pattern in excluded:
            if keys is not None:
                matched = self._strings.searched(pattern, "possibly", where, "patternProperties")
                keys = minus(keys, style.spelled(matched), clock)
        return keys

    def _contents(self, schemas: Together) -> Node | None:
        """Spelled strings that satisfy schemas."""
        found: list[Node] = []
        for branch in self._branches.of(schemas):
            if any("const" in schema or "enum" in schema for schema in branch):
                where = self._source.where(branch[0])
                raise refused(where, "propertyNames", "lists keys; name them in 'properties'")
            kinds = [kinds_of(schema, self._source.where(schema)) for schema in branch]
            if all("string" in some for some in kinds):
                content = self._strings.content(branch)
                found += [content] if content is not None else []
        return Either(tuple(found)) if found else None
