"""What a branch of a schema says about an array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dgemma.constraint.json_text import Style, written
from dgemma.constraint.schema_keywords import MADE, UNLIKE, count, items, least_and_most, refused
from dgemma.constraint.schema_shapes import ArrayShape, Contains, DistinctShape
from dgemma.constraint.schema_source import Branch, Schema, SchemaSource, Together

_MOST_DISTINCT = 64
_MOST_ITEMS = 1000  # of an array of limited size; a larger `maxItems` allows arrays that are not written


class Arrays:
    def __init__(
        self, source: SchemaSource, style: Style, values_of: Callable[[Together], list[Any] | None]
    ) -> None:
        """values_of: all values that satisfy schemas; None when they are not listed."""
        self._source = source
        self._style = style
        self._values_of = values_of
        self._opposites: dict[int, Schema] = {}

    def shapes(self, branch: Branch) -> list[ArrayShape | DistinctShape]:
        least, most = least_and_most(branch, "Items", self._source.where)
        if least > _MOST_ITEMS:
            where = next(self._source.where(one) for one in branch if "minItems" in one)
            raise refused(where, "minItems", f"asks for {least} items; at most {_MOST_ITEMS} are taken")
        most = most if most is None else min(most, _MOST_ITEMS)
        # An array that must not equal some others is shorter or longer than they are.
        unlike = [len(v) for one in branch for v in one.get(UNLIKE, []) if isinstance(v, list)]
        sizes = [(least, most)]
        if unlike:
            shorter, longer = min(unlike) - 1, max(unlike) + 1
            sizes = [(least, shorter if most is None else min(most, shorter)), (max(least, longer), most)]
        found = [self._shape(branch, a, b) for a, b in sizes if b is None or a <= b]
        return [shape for shape in found if shape is not None]

    def _shape(self, branch: Branch, least: int, most: int | None) -> ArrayShape | DistinctShape | None:
        prefixes, rests = [], []
        for schema in branch:
            where = self._source.where(schema)
            prefixes.append(
                [
                    self._source.checked(part, f"{where}/prefixItems/{at}")
                    for at, part in enumerate(items(schema, "prefixItems", where))
                ]
            )
            rests.append(self._source.checked(schema.get("items", True), f"{where}/items"))
        size = max(map(len, prefixes), default=0)
        contains = [schema for schema in branch if "contains" in schema]
        # Where the first items are named and nothing is said of others, there are no others.
        if size > least and not contains and not any("items" in schema for schema in branch):
            most = size if most is None else min(most, size)

        def places(asked: list[Schema]) -> tuple[tuple[Together, ...], Together | None]:
            prefix = tuple(
                self._source.together(
                    [
                        *asked,
                        *(p[at] if at < len(p) else rest for p, rest in zip(prefixes, rests, strict=True)),
                    ]
                )
                for at in range(size)
            )
            return prefix, self._source.together([*asked, *rests]) if most is None or most > size else None

        unique = [schema for schema in branch if schema.get("uniqueItems") is True]
        if unique and (most is None or most > 1):
            values = self._values_of(self._source.together(rests)) if not size and not contains else None
            if values is None or len(values) > _MOST_ITEMS or least > _MOST_DISTINCT:
                why = "asks to remember every item; it is taken where 'items' has an 'enum' of few values"
                raise refused(self._source.where(unique[0]), "uniqueItems", why)
            most = len(values) if most is None else min(most, len(values))
            nodes = tuple(written(value, self._style) for value in values)
            return DistinctShape(nodes, least, most) if least <= most else None
        if not contains:
            return ArrayShape(*places([]), least, most)
        return self._containing(contains, places, least, most)

    def _containing(
        self,
        contains: list[dict[str, Any]],
        places: Callable[[list[Schema]], tuple[tuple[Together, ...], Together | None]],
        least: int,
        most: int | None,
    ) -> ArrayShape:
        schema, where = contains[0], self._source.where(contains[0])
        if len(contains) > 1:
            raise refused(where, "contains", "stands there with another one; put what both ask for into one")
        asked = self._source.checked(schema["contains"], f"{where}/contains")
        least_found, most_found = count(schema, "minContains", where), count(schema, "maxContains", where)
        least_found = 1 if least_found is None else least_found
        if max(least_found, most_found or 0) > _MOST_ITEMS:
            raise refused(where, "contains", f"counts more than {_MOST_ITEMS} items; ask for fewer")
        others = [] if most_found is None else [self._opposite(asked)]
        return ArrayShape(*places(others), least, most, Contains(*places([asked]), least_found, most_found))

    def _opposite(self, schema: Schema) -> Schema:
        if isinstance(schema, bool):
            return not schema
        if id(schema) not in self._opposites:
            self._opposites[id(schema)] = self._source.placed({"not": schema, MADE: True}, schema)
        return self._opposites[id(schema)]
