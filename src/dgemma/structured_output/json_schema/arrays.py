"""Arrays: the array keywords of a branch as shapes, and shapes as grammars.

A grammar is built from the end of the array backwards, so that all alternatives share what follows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dgemma.structured_output.budget import TimeBudget
from dgemma.structured_output.json_schema.keywords import (
    DERIVED,
    NOT_EQUAL,
    count,
    items,
    min_and_max_count,
    refused,
)
from dgemma.structured_output.json_schema.source import Branch, Conjunction, Schema, SchemaSource
from dgemma.structured_output.json_schema.syntax import ValueSyntax, check_size, one_of, value_grammar
from dgemma.structured_output.regex import EMPTY, Concat, Node, Repeat, literal

_MAX_ITEMS = 1000  # of an array with `maxItems`; longer arrays are valid but not generated
_MAX_DISTINCT = 16  # items of an array with `uniqueItems`, unless `minItems` asks for more
_MAX_MIN_DISTINCT = 64  # `minItems` of such an array
_MAX_ANY_ORDER = 8  # listed values that `uniqueItems` allows in any order; more of them keep their order
_CLOSE = literal("]")


@dataclass(frozen=True)
class ContainsShape:
    """How many items satisfy `contains`, and their schemas by position."""

    prefix: tuple[Conjunction, ...]
    rest: Conjunction | None
    min_count: int
    max_count: int | None


@dataclass(frozen=True)
class ArrayShape:
    """Schemas of the first items, then one of all further items."""

    prefix: tuple[Conjunction, ...]
    rest: Conjunction | None  # None: no items after the prefix
    min_count: int
    max_count: int | None
    contains: ContainsShape | None = None


@dataclass(frozen=True)
class DistinctShape:
    """An array of some of these values, each at most once."""

    items: tuple[Node, ...]
    min_count: int
    max_count: int


class ArrayKeywords:
    """Reads the array keywords of a branch."""

    def __init__(
        self, source: SchemaSource, syntax: ValueSyntax, values_of: Callable[[Conjunction], list[Any] | None]
    ) -> None:
        """values_of: all values that satisfy a conjunction, if `enum`, `const` or booleans list them."""
        self._source = source
        self._syntax = syntax
        self._values_of = values_of
        self._negations: dict[int, Schema] = {}

    def shapes(self, branch: Branch) -> list[ArrayShape | DistinctShape]:
        min_count, max_count = min_and_max_count(branch, "Items", self._source.where)
        if min_count > _MAX_ITEMS:
            where = next(self._source.where(one) for one in branch if "minItems" in one)
            raise refused(
                where, "minItems", f"asks for {min_count} items; at most {_MAX_ITEMS} are supported"
            )
        max_count = max_count if max_count is None else min(max_count, _MAX_ITEMS)
        # To differ from excluded arrays, the array is shorter or longer than all of them.
        excluded = [len(v) for one in branch for v in one.get(NOT_EQUAL, []) if isinstance(v, list)]
        sizes = [(min_count, max_count)]
        if excluded:
            shorter, longer = min(excluded) - 1, max(excluded) + 1
            sizes = [
                (min_count, shorter if max_count is None else min(max_count, shorter)),
                (max(min_count, longer), max_count),
            ]
        found = [self._shape(branch, a, b) for a, b in sizes if b is None or a <= b]
        return [shape for shape in found if shape is not None]

    def _shape(
        self, branch: Branch, min_count: int, max_count: int | None
    ) -> ArrayShape | DistinctShape | None:
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
        # With `prefixItems` and without `items`, no further items are generated.
        if size > min_count and not contains and not any("items" in schema for schema in branch):
            max_count = size if max_count is None else min(max_count, size)

        def places(requested: list[Schema]) -> tuple[tuple[Conjunction, ...], Conjunction | None]:
            prefix = tuple(
                self._source.conjunction(
                    [
                        *requested,
                        *(p[at] if at < len(p) else rest for p, rest in zip(prefixes, rests, strict=True)),
                    ]
                )
                for at in range(size)
            )
            return prefix, self._source.conjunction(
                [*requested, *rests]
            ) if max_count is None or max_count > size else None

        unique = [schema for schema in branch if schema.get("uniqueItems") is True]
        if unique and (max_count is None or max_count > 1):
            values = self._values_of(self._source.conjunction(rests)) if not size and not contains else None
            if values is None or len(values) > _MAX_ITEMS or min_count > _MAX_MIN_DISTINCT:
                why = "asks to remember every item; it is taken where 'items' has an 'enum' of few values"
                raise refused(self._source.where(unique[0]), "uniqueItems", why)
            max_count = len(values) if max_count is None else min(max_count, len(values))
            nodes = tuple(value_grammar(value, self._syntax) for value in values)
            return DistinctShape(nodes, min_count, max_count) if min_count <= max_count else None
        if not contains:
            return ArrayShape(*places([]), min_count, max_count)
        return self._containing(contains, places, min_count, max_count)

    def _containing(
        self,
        contains: list[dict[str, Any]],
        places: Callable[[list[Schema]], tuple[tuple[Conjunction, ...], Conjunction | None]],
        min_count: int,
        max_count: int | None,
    ) -> ArrayShape:
        schema, where = contains[0], self._source.where(contains[0])
        if len(contains) > 1:
            raise refused(where, "contains", "stands there with another one; merge both into one")
        requested = self._source.checked(schema["contains"], f"{where}/contains")
        min_found, max_found = count(schema, "minContains", where), count(schema, "maxContains", where)
        min_found = 1 if min_found is None else min_found
        if max(min_found, max_found or 0) > _MAX_ITEMS:
            raise refused(where, "contains", f"counts more than {_MAX_ITEMS} items; ask for fewer")
        others = [] if max_found is None else [self._negation(requested)]
        return ArrayShape(
            *places(others), min_count, max_count, ContainsShape(*places([requested]), min_found, max_found)
        )

    def _negation(self, schema: Schema) -> Schema:
        if isinstance(schema, bool):
            return not schema
        if id(schema) not in self._negations:
            self._negations[id(schema)] = self._source.derived({"not": schema, DERIVED: True}, schema)
        return self._negations[id(schema)]


@dataclass(frozen=True)
class ContainsGrammar:
    """Grammars of items that satisfy `contains`, by position, and how many there are."""

    prefix: Sequence[Node | None]
    rest: Node | None
    min_count: int
    max_count: int | None


def array_grammar(
    prefix: Sequence[Node | None],
    rest: Node | None,
    min_count: int,
    max_count: int | None,
    syntax: ValueSyntax,
    budget: TimeBudget,
    found: ContainsGrammar | None = None,
) -> Node | None:
    """Arrays of `prefix` items, then any number of `rest` (None: no valid item). None: no valid array."""
    found = found or ContainsGrammar([], None, 0, None)
    size = max(len(prefix), min_count, 1) if max_count is None else max_count
    # follows[n]: what may follow after `size` items (then one less, ...) of which n satisfy `contains`.
    limit = found.min_count if found.max_count is None else found.max_count
    check_size(size * limit, "items of an array ('minContains', 'maxContains')")
    follows: list[Node | None] = [
        _CLOSE if number >= found.min_count else None for number in range(limit + 1)
    ]
    if max_count is None:
        follows = _unbounded(rest, found, limit, syntax)
    for at in reversed(range(size)):
        budget.check()
        item = prefix[at] if at < len(prefix) else rest
        counted = found.prefix[at] if at < len(found.prefix) else found.rest
        before: list[Node | None] = []
        for number, after in enumerate(follows):
            ways: list[Node] = [_CLOSE] if at >= min_count and number >= found.min_count else []
            comma = syntax.comma if at else EMPTY
            if item is not None and after is not None:
                ways.append(Concat((comma, item, after)))
            more = _next(follows, number, found)
            if counted is not None and more is not None:
                ways.append(Concat((comma, counted, more)))
            before.append(one_of(ways))
        follows = before
    return None if follows[0] is None else Concat((literal("["), follows[0]))


def _next(follows: list[Node | None], number: int, found: ContainsGrammar) -> Node | None:
    """What follows after one more item that satisfies `contains`; without `maxContains` counting stops."""
    if found.max_count is not None:
        return follows[number + 1] if number < found.max_count else None
    return follows[number + 1] if number < found.min_count else None


def _unbounded(
    rest: Node | None, found: ContainsGrammar, limit: int, syntax: ValueSyntax
) -> list[Node | None]:
    follows: list[Node | None] = [None] * (limit + 1)
    for number in reversed(range(limit + 1)):
        ways: list[Node] = [_CLOSE] if number >= found.min_count else []
        more = _next(follows, number, found)
        if found.rest is not None and more is not None:
            ways.append(Concat((syntax.comma, found.rest, more)))
        end = one_of(ways)
        if rest is not None and end is not None:
            end = Concat((Repeat(Concat((syntax.comma, rest)), 0, None), end))
        follows[number] = end
    return follows


def distinct_array_grammar(
    items: Sequence[Node], min_count: int, max_count: int, syntax: ValueSyntax, budget: TimeBudget
) -> Node | None:
    """Arrays of these items, each at most once; many items appear only in their order."""
    in_order = len(items) > _MAX_ANY_ORDER
    max_count = min(max_count, max(min_count, _MAX_DISTINCT))
    known: dict[int, Node | None] = {}

    def follows(used: int) -> Node | None:
        """What may follow when the items whose bits are set are used."""
        if used not in known:
            number = used.bit_count()
            ways: list[Node] = [_CLOSE] if number >= min_count else []
            for at, item in enumerate(items):
                if (
                    number < max_count
                    and not used >> at & 1
                    and (rest := follows(used | 1 << at)) is not None
                ):
                    ways.append(Concat((syntax.comma if used else EMPTY, item, rest)))
            known[used] = one_of(ways)
        return known[used]

    body = _distinct_in_order(items, min_count, max_count, syntax, budget) if in_order else follows(0)
    return None if body is None else Concat((literal("["), body))


def _distinct_in_order(
    items: Sequence[Node], min_count: int, max_count: int, syntax: ValueSyntax, budget: TimeBudget
) -> Node | None:
    # after[n]: what may follow when n items were used.
    after: list[Node | None] = [_CLOSE if number >= min_count else None for number in range(max_count + 1)]
    for item in reversed(items):
        budget.check()
        before: list[Node | None] = []
        for number in range(max_count + 1):
            ways = [way for way in (after[number],) if way is not None]
            if number < max_count and (rest := after[number + 1]) is not None:
                ways.append(Concat((syntax.comma if number else EMPTY, item, rest)))
            before.append(one_of(ways))
        after = before
    return after[0]
