"""Objects: the object keywords of a branch as shapes, and shapes as grammars.

Named properties keep the order in which the schema names them; unnamed ones (`additionalProperties`,
`patternProperties`) come after them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dgemma.structured_output.budget import TimeBudget
from dgemma.structured_output.dfa import difference, intersection
from dgemma.structured_output.json_schema.keywords import (
    DERIVED,
    NOT_EQUAL,
    entries,
    items,
    min_and_max_count,
)
from dgemma.structured_output.json_schema.source import Branch, Conjunction, Schema, SchemaSource
from dgemma.structured_output.json_schema.strings import StringKeywords
from dgemma.structured_output.json_schema.syntax import ValueSyntax, check_size, member_grammar, one_of
from dgemma.structured_output.json_schema.values import ValueValidator
from dgemma.structured_output.regex import Alternation, Concat, Node, Repeat, literal

_MAX_UNNAMED = 30  # unnamed members, where members are counted
_CLOSE = literal("}")


@dataclass(frozen=True)
class PropertyShape:
    """A named property."""

    key: Node
    value: Conjunction
    required: bool


@dataclass(frozen=True)
class ObjectShape:
    """Named properties in their order, then unnamed ones."""

    named: tuple[PropertyShape, ...]
    others: tuple[tuple[Node, Conjunction], ...]  # unnamed keys and the schemas of their values
    min_count: int
    max_count: int | None


class ObjectKeywords:
    """Reads the object keywords of a branch."""

    def __init__(
        self,
        source: SchemaSource,
        syntax: ValueSyntax,
        budget: TimeBudget,
        strings: StringKeywords,
        values: ValueValidator,
        contents_of: Callable[[Conjunction], Node | None],
    ) -> None:
        """contents_of: the escaped contents of strings that satisfy a conjunction."""
        self._source = source
        self._syntax = syntax
        self._budget = budget
        self._strings = strings
        self._values = values
        self._contents_of = contents_of

    def shapes(self, branch: Branch) -> list[ObjectShape]:
        min_count, max_count = min_and_max_count(branch, "Properties", self._source.where)
        # To differ from excluded objects, the object has fewer or more members than all of them.
        excluded = [len(v) for one in branch for v in one.get(NOT_EQUAL, []) if isinstance(v, dict)]
        sizes = [(min_count, max_count)]
        if excluded:
            fewer, more = min(excluded) - 1, max(excluded) + 1
            sizes = [
                (min_count, fewer if max_count is None else min(max_count, fewer)),
                (max(min_count, more), max_count),
            ]
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
            PropertyShape(self._syntax.key(name), self._at(branch, name), name in required)
            for name in names | required
        )
        others = tuple(self._others(branch, list(names | required)))
        return [ObjectShape(named, others, a, b) for a, b in sizes]

    def _at(self, branch: Branch, name: str) -> Conjunction:
        """All schemas of the value of a named key."""
        found: list[Schema] = []
        for schema in branch:
            where = self._source.where(schema)
            properties = entries(schema, "properties", where)
            is_named: bool | None = name in properties
            if name in properties:
                found.append(self._source.checked(properties[name], f"{where}/properties/{name[:60]}"))
            for pattern, part in entries(schema, "patternProperties", where).items():
                matches = self._strings.matches(pattern, name, where, "patternProperties")
                if matches is not False:  # where validators may differ, the value satisfies both
                    found.append(self._source.checked(part, f"{where}/patternProperties/{pattern[:60]}"))
                is_named = is_named or matches
            if not is_named:
                found.append(self._additional(schema))
            if "propertyNames" in schema and not self._values.valid(schema["propertyNames"], name):
                return (False,)
        return self._source.conjunction(found)

    def _additional(self, schema: dict[str, Any]) -> Schema:
        where = self._source.where(schema)
        return self._source.checked(schema.get("additionalProperties", True), f"{where}/additionalProperties")

    def _others(self, branch: Branch, names: list[str]) -> list[tuple[Node, Conjunction]]:
        """Unnamed keys. With `properties` and without `additionalProperties`, none are generated."""
        closed = [
            schema
            for schema in branch
            if not {DERIVED, "additionalProperties", "unevaluatedProperties"} & schema.keys()
            and {"properties", "patternProperties"} & schema.keys()
        ]
        patterns: dict[str, list[tuple[dict[str, Any], Schema]]] = {}
        for schema in branch:
            where = self._source.where(schema)
            for pattern, part in entries(schema, "patternProperties", where).items():
                checked = self._source.checked(part, f"{where}/patternProperties/{pattern[:60]}")
                patterns.setdefault(pattern, []).append((schema, checked))
        found: list[tuple[Node, Conjunction]] = []
        for pattern, owned in patterns.items():
            owners = {id(owner) for owner, _ in owned}
            value = self._source.conjunction(
                [part for _, part in owned]
                + [self._additional(schema) for schema in branch if id(schema) not in owners]
            )
            if value == (False,) or any(id(schema) not in owners for schema in closed):
                continue
            keys = self._keys(branch, names, pattern, [other for other in patterns if other != pattern])
            if keys is not None:
                found.append((self._syntax.quoted(keys), value))
        value = self._source.conjunction(self._additional(schema) for schema in branch)
        if not closed and value != (False,):
            keys = self._keys(branch, names, None, list(patterns))
            if keys is not None:
                found.append((self._syntax.free_keys(keys), value))
        return found

    def _keys(self, branch: Branch, names: list[str], found: str | None, others: list[str]) -> Node | None:
        """Escaped keys not in `names` that match the pattern `found` and no pattern of `others`."""
        syntax, budget, where = self._syntax, self._budget, self._source.where(branch[0] if branch else None)
        keys: Node | None = syntax.escaped(syntax.free_key)
        if found is not None:
            keys = syntax.escaped(self._strings.searched(found, "certain", where, "patternProperties"))
        allowed = self._source.conjunction(
            self._source.checked(schema["propertyNames"], f"{self._source.where(schema)}/propertyNames")
            for schema in branch
            if "propertyNames" in schema
        )
        if allowed and keys is not None:
            contents = self._contents_of(allowed)
            keys = intersection(keys, contents, budget) if contents is not None else None
        if names and keys is not None:
            keys = difference(
                keys, Alternation(tuple(syntax.escaped(literal(name)) for name in names)), budget
            )
        for pattern in others:
            if keys is not None:
                matched = self._strings.searched(pattern, "possible", where, "patternProperties")
                keys = difference(keys, syntax.escaped(matched), budget)
        return keys


def object_grammar(
    named: Sequence[tuple[Node, Node | None, bool]],
    others: Sequence[tuple[Node, Node | None]],
    min_count: int,
    max_count: int | None,
    syntax: ValueSyntax,
    budget: TimeBudget,
    max_unnamed: int | None = None,
) -> Node | None:
    """Named members in their order (key, value, whether it is required), then others.

    Members are counted only where the schema limits their number. Unnamed keys may repeat, since a DFA cannot
    remember all of them: together they count as one towards `min_count`. `max_unnamed=1` excludes duplicates.
    """
    if any(required and value is None for _, value, required in named):
        return None
    members = [
        (member_grammar(key, value, syntax), required) for key, value, required in named if value is not None
    ]
    if min_count > len(members) + 1:
        return None
    other = one_of([member_grammar(key, value, syntax) for key, value in others if value is not None])
    if min_count <= sum(required for _, required in members):
        min_count = 0
    if max_count is not None and max_count >= len(members):
        max_count = None if other is None else min(max_count, len(members) + _MAX_UNNAMED)
    limit = min_count if max_count is None else max_count
    check_size(len(members) * limit, "members of an object ('minProperties', 'maxProperties')")
    # By the number of members so far: `next_member` is what may follow where a member must (at the beginning
    # or after a comma), `after` what may follow a member. One comma before all alternatives keeps the DFA
    # small.
    next_member = _others(other, min_count, max_count, max_unnamed, limit, syntax)
    may_close = True
    for node, required in reversed(members):
        budget.check()
        after = _after_member(next_member, min_count if may_close else None, syntax)
        next_member = [
            one_of(
                [
                    *_concat(node, _at(after, number + 1, max_count)),
                    *([without] if without is not None and not required else []),
                ]
            )
            for number, without in enumerate(next_member)
        ]
        may_close = may_close and not required
    empty: list[Node] = [_CLOSE] if may_close and min_count == 0 else []
    begins = one_of([*empty, *([next_member[0]] if next_member[0] is not None else [])])
    return None if begins is None else Concat((literal("{"), begins))


def _after_member(
    next_member: list[Node | None], min_count: int | None, syntax: ValueSyntax
) -> list[Node | None]:
    """The closing brace, from `min_count` members on (None: not yet), or a comma and a member."""
    return [
        one_of(
            [
                *([_CLOSE] if min_count is not None and number >= min_count else []),
                *_concat(syntax.comma, some),
            ]
        )
        for number, some in enumerate(next_member)
    ]


def _concat(first: Node, then: Node | None) -> list[Node]:
    return [] if then is None else [Concat((first, then))]


def _at(after: list[Node | None], number: int, max_count: int | None) -> Node | None:
    """What follows after `number` members; without a maximum, counting stops at the last entry."""
    if number < len(after):
        return after[number]
    return after[-1] if max_count is None else None


def _others(
    other: Node | None,
    min_count: int,
    max_count: int | None,
    max_unnamed: int | None,
    limit: int,
    syntax: ValueSyntax,
) -> list[Node | None]:
    """By the number of members so far: one or more unnamed members and the closing brace."""
    if other is None:
        return [None] * (limit + 1)
    tails: dict[int | None, Node] = {}
    found: list[Node | None] = []
    for number in range(limit + 1):
        left = _minimum(None if max_count is None else max_count - number, max_unnamed)
        if left == 0 or number + 1 < min_count:
            found.append(None)
            continue
        if left not in tails:
            again = Repeat(Concat((syntax.comma, other)), 0, None if left is None else left - 1)
            tails[left] = Concat((other, again, _CLOSE))
        found.append(tails[left])
    return found


def _minimum(first: int | None, second: int | None) -> int | None:
    return second if first is None else first if second is None else min(first, second)
