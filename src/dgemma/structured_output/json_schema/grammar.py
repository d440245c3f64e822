"""JSON Schema as a regular grammar: every text of it is JSON and valid.

A regular grammar has no stack, so recursive schemas are unfolded to a depth. Properties keep the order in
which the schema names them, and properties that it does not mention are mostly not generated: the texts are a
subset of the valid ones.

`SchemaPlanner` turns a conjunction of schemas into shapes, `_GrammarWriter` writes the shapes as a grammar.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dgemma.errors import InputError, error_field
from dgemma.structured_output.budget import TimeBudget
from dgemma.structured_output.dfa import intersection
from dgemma.structured_output.json_schema.arrays import (
    ArrayKeywords,
    ArrayShape,
    ContainsGrammar,
    DistinctShape,
    array_grammar,
    distinct_array_grammar,
)
from dgemma.structured_output.json_schema.branches import BranchExpander
from dgemma.structured_output.json_schema.keywords import (
    KINDS,
    NOT_EQUAL,
    NOT_MULTIPLE_OF,
    SPAN_OF,
    items,
    kinds_of,
    refused,
    text,
)
from dgemma.structured_output.json_schema.numbers import bounds_of, number_grammar
from dgemma.structured_output.json_schema.objects import ObjectKeywords, ObjectShape, object_grammar
from dgemma.structured_output.json_schema.source import Branch, Conjunction, SchemaSource
from dgemma.structured_output.json_schema.spans import (
    NumberRange,
    SpanTokens,
    SpliceError,
    number_span_grammar,
)
from dgemma.structured_output.json_schema.strings import StringKeywords
from dgemma.structured_output.json_schema.syntax import ValueSyntax, one_of, value_grammar
from dgemma.structured_output.json_schema.values import ValueValidator, frozen
from dgemma.structured_output.nfa import nfa_fits
from dgemma.structured_output.regex import Alternation, Node, literal

MAX_DEPTH = 8  # of a recursive schema
FREE_DEPTH = 3  # of values that the schema does not constrain
OBJECT_DEPTH = 4
_MAX_SCHEMAS = 5000
_MAX_NESTING = 60
_GOOD_SIZE = 8_000  # NFA states; a larger grammar is retried with less depth
_MAX_LISTED_CHARS = 200_000  # of the values of `enum` and `const`

Key = tuple[int, ...]


@error_field("json_schema")
def schema_grammar(
    schema: object,
    syntax: ValueSyntax,
    *,
    max_depth: int = MAX_DEPTH,
    free_depth: int = FREE_DEPTH,
    distinct_keys: bool = False,
    budget: TimeBudget | None = None,
) -> Node:
    """The valid values of a JSON schema, in a syntax.

    max_depth: how often a recursive schema is unfolded. free_depth: how deep a value may be that the schema
    does not constrain. Both are lowered while the grammar is large, as long as some value stays valid.
    distinct_keys: an object has at most one member that the schema does not name. Without it there may be
    many, and a DFA cannot exclude that two of them have the same key.
    """
    budget = budget or TimeBudget()
    try:
        writer = _GrammarWriter(SchemaSource(schema), syntax, 1 if distinct_keys else None, budget)
        return writer.fitting(max_depth, free_depth)
    except RecursionError:
        raise InputError(
            "the JSON schema is nested too deeply, in itself or by references; flatten it."
        ) from None


def json_object_grammar(syntax: ValueSyntax, depth: int = OBJECT_DEPTH) -> Node:
    """Any JSON object; at most `depth` non-empty arrays and objects are nested, itself included."""
    return schema_grammar({"type": "object"}, syntax, free_depth=depth - 1)


@dataclass(frozen=True)
class _DepthLimits:
    depth: int
    free_depth: int
    items: int | None  # of an array, unless `minItems` is larger

    def smaller(self) -> Iterator[_DepthLimits]:
        """These limits, then ever lower ones."""
        yield self
        for share, max_items in ((0.65, 64), (0.4, 16), (0.25, 8), (0.125, 4), (0.0, 2)):
            yield _DepthLimits(int(self.depth * share), int(self.free_depth * share + 0.5), max_items)


class _GrammarWriter:
    """Writes the grammar of a schema at the largest limits at which it is not too large."""

    def __init__(
        self, source: SchemaSource, syntax: ValueSyntax, max_unnamed: int | None, budget: TimeBudget
    ) -> None:
        self._syntax = syntax
        self._max_unnamed = max_unnamed
        self._budget = budget
        self._planner = SchemaPlanner(source, syntax, budget)
        self._shapes: dict[Key, list[Shape]] = {}
        self._root = self._plan_all(source.conjunction([source.root]))
        self._cycle_of = cycles({key: _children(shapes) for key, shapes in self._shapes.items()})
        self._limits = _DepthLimits(0, 0, None)
        self._written: dict[tuple[Key, int], Node | None] = {}
        self._is_cut = False  # a recursive value was left out at the depth limit
        self._is_limited = False  # the grammar depends on the limits

    def _plan_all(self, root: Conjunction) -> Key:
        pending = [root]
        self._kept = [root]
        while pending:
            schemas = pending.pop()
            key = _key(schemas)
            if key in self._shapes:
                continue
            if len(self._shapes) >= _MAX_SCHEMAS:
                raise InputError(
                    f"the JSON schema needs more than {_MAX_SCHEMAS} combinations of its parts; simplify it."
                )
            self._shapes[key] = self._planner.shapes(schemas)
            held = [some for shape in self._shapes[key] for some in inner(shape)]
            self._kept += held
            pending += reversed(held)
        return _key(root)

    def fitting(self, depth: int, free_depth: int) -> Node:
        """The first grammar that is small enough, or the smallest."""
        found: Node | None = None
        wanted = _DepthLimits(depth, free_depth, None)
        for limits in wanted.smaller():
            node = self._with(limits)
            if node is None and found is None and self._is_cut:
                node = self._deeper(limits)
            if node is None:
                break
            found = node
            if not self._is_limited or nfa_fits(node, _GOOD_SIZE, self._budget):
                break
        if found is not None:
            return found
        if self._is_cut:
            raise InputError(
                "the JSON schema refers to itself in such a way that no finite value is valid; make the "
                "reference optional, or an alternative of 'anyOf'."
            )
        if (missing := self._planner.branches.not_negated) is not None:
            keyword, where = missing
            raise refused(
                where, keyword, "has to be negated ('not', 'oneOf' or 'if'), which is not supported"
            )
        raise InputError(
            "nothing that can be written is valid for the JSON schema: what it asks for contradicts itself, "
            "or it asks for more members of an object than it names."
        )

    def _deeper(self, limits: _DepthLimits) -> Node | None:
        """The smallest larger depth at which some value is valid."""
        for depth in range(limits.depth + 1, _MAX_NESTING):
            node = self._with(_DepthLimits(depth, limits.free_depth, limits.items))
            if node is not None or not self._is_cut:
                return node
        return None

    def _with(self, limits: _DepthLimits) -> Node | None:
        self._limits = limits
        self._written = {}
        self._is_cut = self._is_limited = False
        return self._value(self._root, self._depth_limit(self._root), 0)

    def _depth_limit(self, key: Key) -> int:
        if key not in self._cycle_of:
            return 0
        return self._limits.depth if key else self._limits.free_depth

    def _value(self, key: Key, depth_left: int, level: int) -> Node | None:
        """The values of a conjunction; None if there are none."""
        if level > _MAX_NESTING:
            raise InputError(f"the JSON schema nests values deeper than {_MAX_NESTING} levels; flatten it.")
        if (key, depth_left) not in self._written:
            self._budget.check()
            nodes = [self._shape(shape, key, depth_left, level) for shape in self._shapes[key]]
            found = [node for node in nodes if node is not None]
            self._written[key, depth_left] = one_of(found)
        return self._written[key, depth_left]

    def _shape(self, shape: Shape, key: Key, depth_left: int, level: int) -> Node | None:
        def child(schemas: Conjunction) -> Node | None:
            held = _key(schemas)
            self._is_limited |= held in self._cycle_of
            if self._cycle_of.get(held, -1) != self._cycle_of.get(key, -2):
                return self._value(held, self._depth_limit(held), level + 1)
            if depth_left == 0:
                self._is_cut |= bool(key)
                return None
            return self._value(held, depth_left - 1, level + 1)

        if isinstance(shape, ArrayShape):
            prefix = [child(schemas) for schemas in shape.prefix]
            rest = None if shape.rest is None else child(shape.rest)
            found = None
            if (some := shape.contains) is not None:
                places = [child(schemas) for schemas in some.prefix]
                found = ContainsGrammar(
                    places, None if some.rest is None else child(some.rest), some.min_count, some.max_count
                )
            max_count, cap = shape.max_count, self._limits.items
            self._is_limited |= max_count is not None and max_count > max(2, shape.min_count, len(prefix))
            if max_count is not None and cap is not None:
                max_count = min(max_count, max(cap, shape.min_count, len(prefix)))
            return array_grammar(prefix, rest, shape.min_count, max_count, self._syntax, self._budget, found)
        if isinstance(shape, DistinctShape):
            return distinct_array_grammar(
                shape.items, shape.min_count, shape.max_count, self._syntax, self._budget
            )
        if isinstance(shape, ObjectShape):
            named = [(some.key, child(some.value), some.required) for some in shape.named]
            others = [(keys, child(value)) for keys, value in shape.others]
            return object_grammar(
                named, others, shape.min_count, shape.max_count, self._syntax, self._budget, self._max_unnamed
            )
        return shape


def _key(schemas: Conjunction) -> Key:
    return tuple(map(id, schemas))


def _children(shapes: list[Shape]) -> list[Key]:
    return [_key(schemas) for shape in shapes for schemas in inner(shape)]


Shape = Node | ArrayShape | DistinctShape | ObjectShape


def inner(shape: Shape) -> list[Conjunction]:
    """The conjunctions of the items or members of a shape."""
    if isinstance(shape, ArrayShape):
        found = [*shape.prefix, *([] if shape.rest is None else [shape.rest])]
        if (some := shape.contains) is not None:
            found += [*some.prefix, *([] if some.rest is None else [some.rest])]
        return found
    if isinstance(shape, ObjectShape):
        return [*(some.value for some in shape.named), *(value for _, value in shape.others)]
    return []


class SchemaPlanner:
    """Turns a conjunction of schemas into shapes: grammars of scalars, and shapes of arrays and objects."""

    def __init__(self, source: SchemaSource, syntax: ValueSyntax, budget: TimeBudget) -> None:
        self._source = source
        self._syntax = syntax
        self._budget = budget
        self.branches = BranchExpander(source, budget)
        self._strings = StringKeywords(source, syntax, budget)
        self._values = ValueValidator(source, self._strings)
        self._arrays = ArrayKeywords(source, syntax, self._all_values)
        self._objects = ObjectKeywords(source, syntax, budget, self._strings, self._values, self._contents)

    def shapes(self, schemas: Conjunction) -> list[Shape]:
        """The union of the valid values; an empty list if there are none."""
        found: list[Shape] = []
        for branch in self.branches.of(schemas):
            self._budget.check()
            if (values := self._listed(branch)) is not None:
                if values:
                    found.append(Alternation(tuple(value_grammar(value, self._syntax) for value in values)))
                continue
            kinds = self._kinds(branch)
            found += [literal(text) for text in self._literals(branch, kinds)]
            if kinds & {"integer", "fraction"}:
                number = self._number(branch, kinds)
                found += [number] if number is not None else []
            if "string" in kinds and (content := self._strings.content(branch)) is not None:
                found.append(self._syntax.quoted(content))
            if "array" in kinds:
                found += self._arrays.shapes(branch)
            if "object" in kinds:
                found += self._objects.shapes(branch)
        return found

    def _number(self, branch: Branch, kinds: frozenset[str]) -> Node | None:
        found_texts = (text(one, SPAN_OF, self._source.where(one)) for one in branch)
        texts = list(dict.fromkeys(source for source in found_texts if source is not None))
        if not texts:
            return number_grammar(branch, kinds, self._source, self._budget)
        taken = NumberRange(bounds_of(branch, self._source), only_integers="fraction" not in kinds)
        others = ("multipleOf", NOT_EQUAL, NOT_MULTIPLE_OF)
        if isinstance(self._syntax, SpanTokens):
            is_alone = len(texts) == 1 and not any(name in one for one in branch for name in others)
            if not is_alone or "integer" not in kinds:
                raise SpliceError
            return self._syntax.span(texts[0], taken)
        found = number_grammar(branch, kinds, self._source, self._budget)
        for source in texts:
            said = number_span_grammar(source, taken)
            if found is None or said is None:
                return None
            found = intersection(found, said, self._budget)
        return found

    def _kinds(self, branch: Branch) -> frozenset[str]:
        return frozenset(KINDS).intersection(*(kinds_of(one, self._source.where(one)) for one in branch))

    def _literals(self, branch: Branch, kinds: frozenset[str]) -> list[str]:
        excluded = {frozen(value) for schema in branch for value in schema.get(NOT_EQUAL, [])}
        literals = [("null", "null", None), ("true", "boolean", True), ("false", "boolean", False)]
        return [text for text, kind, value in literals if kind in kinds and frozen(value) not in excluded]

    def _listed(self, branch: Branch) -> list[Any] | None:
        """The valid values of `enum` and `const`; None if the branch has neither."""
        lists = [items(one, "enum", self._source.where(one)) for one in branch if "enum" in one]
        lists += [[one["const"]] for one in branch if "const" in one]
        if not lists:
            return None
        if sum(len(str(value)) for value in min(lists, key=len)) > _MAX_LISTED_CHARS:
            where = next(self._source.where(one) for one in branch if "enum" in one or "const" in one)
            raise refused(
                where, "enum", f"has more than {_MAX_LISTED_CHARS} characters; list fewer or shorter values"
            )
        listed = {frozen(value): value for value in min(lists, key=len)}
        return [
            value
            for value in listed.values()
            if all(self._values.valid(schema, value) is True for schema in branch)
        ]

    def _all_values(self, schemas: Conjunction) -> list[Any] | None:
        found: list[Any] = []
        for branch in self.branches.of(schemas):
            if (values := self._listed(branch)) is None:
                kinds = self._kinds(branch)
                if not kinds <= {"null", "boolean"}:
                    return None
                values = [
                    {"null": None, "true": True, "false": False}[x] for x in self._literals(branch, kinds)
                ]
            found += values
        return list({frozen(value): value for value in found}.values())

    def _contents(self, schemas: Conjunction) -> Node | None:
        """The escaped contents of the strings that satisfy a conjunction."""
        found: list[Node] = []
        for branch in self.branches.of(schemas):
            if (values := self._listed(branch)) is not None:
                found += [self._syntax.escaped(literal(value)) for value in values if isinstance(value, str)]
            elif "string" in self._kinds(branch) and (content := self._strings.content(branch)) is not None:
                found.append(content)
        return Alternation(tuple(found)) if found else None


K = TypeVar("K", bound=Hashable)


def cycles(edges: Mapping[K, Sequence[K]]) -> dict[K, int]:
    """The strongly connected component of each node on a cycle. Tarjan's algorithm, without recursion."""
    order: dict[K, int] = {}
    lowest: dict[K, int] = {}
    open_: list[K] = []
    is_open: set[K] = set()
    group: dict[K, int] = {}
    groups = 0
    for root in edges:
        if root in order:
            continue
        path = [(root, iter(edges[root]))]
        order[root] = lowest[root] = len(order)
        open_.append(root)
        is_open.add(root)
        while path:
            node, rest = path[-1]
            for to in rest:
                if to not in order:
                    order[to] = lowest[to] = len(order)
                    open_.append(to)
                    is_open.add(to)
                    path.append((to, iter(edges[to])))
                    break
                if to in is_open:
                    lowest[node] = min(lowest[node], order[to])
            else:
                path.pop()
                if path:
                    lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[node])
                if lowest[node] == order[node]:
                    at = open_.index(node)
                    found, open_[at:] = open_[at:], []
                    is_open.difference_update(found)
                    if len(found) > 1 or node in edges[node]:
                        group |= dict.fromkeys(found, groups)
                        groups += 1
    return group
