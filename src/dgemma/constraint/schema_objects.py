"""What a branch of a schema says about an object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dgemma.constraint.clock import Clock
from dgemma.constraint.json_text import Style
from dgemma.constraint.pattern import Either, Node, literal
from dgemma.constraint.product import both, minus
from dgemma.constraint.schema_keywords import MADE, UNLIKE, entries, items, least_and_most
from dgemma.constraint.schema_shapes import ObjectShape, Property
from dgemma.constraint.schema_source import Branch, Schema, SchemaSource, Together
from dgemma.constraint.schema_strings import Strings
from dgemma.constraint.schema_values import Values


class Objects:
    def __init__(
        self,
        source: SchemaSource,
        style: Style,
        clock: Clock,
        strings: Strings,
        values: Values,
        contents_of: Callable[[Together], Node | None],
    ) -> None:
        """contents_of: the spelled strings that satisfy schemas."""
        self._source = source
        self._style = style
        self._clock = clock
        self._strings = strings
        self._values = values
        self._contents_of = contents_of

    def shapes(self, branch: Branch) -> list[ObjectShape]:
        least, most = least_and_most(branch, "Properties", self._source.where)
        # An object that must not equal some others has fewer or more members than they have.
        unlike = [len(v) for one in branch for v in one.get(UNLIKE, []) if isinstance(v, dict)]
        sizes = [(least, most)]
        if unlike:
            fewer, more = min(unlike) - 1, max(unlike) + 1
            sizes = [(least, fewer if most is None else min(most, fewer)), (max(least, more), most)]
        sizes = [(a, b) for a, b in sizes if b is None or a <= b]
        if not sizes:
            return []
        required: dict[str, None] = {}
        names: dict[str, None] = {}
        for schema in branch:
            where = self._source.where(schema)
            required |= dict.fromkeys(items(schema, "required", where, of=str))
            names |= dict.fromkeys(entries(schema, "properties", where))
        named = tuple(
            Property(self._style.key(name), self._at(branch, name), name in required)
            for name in names | required
        )
        others = tuple(self._others(branch, list(names | required)))
        return [ObjectShape(named, others, a, b) for a, b in sizes]

    def _at(self, branch: Branch, name: str) -> Together:
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
        return self._source.together(found)

    def _additional(self, schema: dict[str, Any]) -> Schema:
        where = self._source.where(schema)
        return self._source.checked(schema.get("additionalProperties", True), f"{where}/additionalProperties")

    def _others(self, branch: Branch, names: list[str]) -> list[tuple[Node, Together]]:
        """Keys that are not named: none where some are named and nothing is said of others."""
        closed = [
            schema
            for schema in branch
            if not {MADE, "additionalProperties", "unevaluatedProperties"} & schema.keys()
            and {"properties", "patternProperties"} & schema.keys()
        ]
        patterns: dict[str, list[tuple[dict[str, Any], Schema]]] = {}
        for schema in branch:
            where = self._source.where(schema)
            for pattern, part in entries(schema, "patternProperties", where).items():
                checked = self._source.checked(part, f"{where}/patternProperties/{pattern[:60]}")
                patterns.setdefault(pattern, []).append((schema, checked))
        found: list[tuple[Node, Together]] = []
        for pattern, owned in patterns.items():
            owners = {id(owner) for owner, _ in owned}
            value = self._source.together(
                [part for _, part in owned]
                + [self._additional(schema) for schema in branch if id(schema) not in owners]
            )
            if value == (False,) or any(id(schema) not in owners for schema in closed):
                continue
            keys = self._keys(branch, names, pattern, [other for other in patterns if other != pattern])
            if keys is not None:
                found.append((self._style.quoted(keys), value))
        value = self._source.together(self._additional(schema) for schema in branch)
        if not closed and value != (False,):
            keys = self._keys(branch, names, None, list(patterns))
            if keys is not None:
                found.append((self._style.free_keys(keys), value))
        return found

    def _keys(self, branch: Branch, names: list[str], found: str | None, others: list[str]) -> Node | None:
        """Spelled keys that are no names, in which one pattern is found and others are not."""
        style, clock, where = self._style, self._clock, self._source.where(branch[0] if branch else None)
        keys: Node | None = style.spelled(style.free_key)
        if found is not None:
            keys = style.spelled(self._strings.searched(found, "surely", where, "patternProperties"))
        allowed = self._source.together(
            self._source.checked(schema["propertyNames"], f"{self._source.where(schema)}/propertyNames")
            for schema in branch
            if "propertyNames" in schema
        )
        if allowed and keys is not None:
            contents = self._contents_of(allowed)
            keys = both(keys, contents, clock) if contents is not None else None
        if names and keys is not None:
            keys = minus(keys, Either(tuple(style.spelled(literal(name)) for name in names)), clock)
        for pattern in others:
            if keys is not None:
                matched = self._strings.searched(pattern, "possibly", where, "patternProperties")
                keys = minus(keys, style.spelled(matched), clock)
        return keys
