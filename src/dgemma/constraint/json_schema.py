"""JSON Schema as a pattern: every text of it is JSON and valid.

A pattern is a machine without a stack, so what refers to itself is unfolded to a depth. Properties stand in
the order in which the schema names them, and what the schema does not mention is not written where it would
be allowed: a part of the valid texts, all of them valid. `docs/constraints.md` has the keywords.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dgemma.constraint.clock import Clock
from dgemma.constraint.json_containers import Found, array_pattern, distinct_pattern, object_pattern
from dgemma.constraint.json_text import Style
from dgemma.constraint.parts import fits
from dgemma.constraint.pattern import Either, Node
from dgemma.constraint.schema_graph import circles
from dgemma.constraint.schema_keywords import refused
from dgemma.constraint.schema_plan import Plan
from dgemma.constraint.schema_shapes import ArrayShape, DistinctShape, ObjectShape, Shape, inner
from dgemma.constraint.schema_source import SchemaSource, Together
from dgemma.errors import InputError

DEFAULT_SECONDS = 5.0
MAX_DEPTH = 8
FREE_DEPTH = 3
OBJECT_DEPTH = 4
_MAX_SCHEMAS = 5000
_MAX_NESTING = 60
_GOOD_SIZE = 8_000  # parts; a larger pattern is tried with less depth

Key = tuple[int, ...]


def schema_pattern(
    schema: object,
    style: Style,
    *,
    max_depth: int = MAX_DEPTH,
    free_depth: int = FREE_DEPTH,
    distinct_keys: bool = False,
    clock: Clock | None = None,
) -> Node:
    """The valid values of a JSON schema, written in a style.

    max_depth: how often a schema that refers to itself is unfolded, at most. free_depth: how deep a value of
    which the schema says nothing may be. Both give way while the machine is large, as long as something is
    valid. distinct_keys: an object has at most one member whose key the schema does not name. Without this
    there may be many, and no machine keeps two of their keys from being the same.
    """
    clock = clock or Clock(DEFAULT_SECONDS)
    try:
        writer = _Writer(SchemaSource(schema), style, 1 if distinct_keys else None, clock)
        return writer.fitting(max_depth, free_depth)
    except RecursionError:
        raise InputError(
            "the JSON schema is nested too deeply, in itself or by references; flatten it."
        ) from None


def any_json(style: Style, depth: int = OBJECT_DEPTH) -> Node:
    """Any JSON value; `depth` arrays and objects that hold something may be inside each other."""
    return schema_pattern(True, style, free_depth=depth)


def json_object_pattern(style: Style, depth: int = OBJECT_DEPTH) -> Node:
    """Any JSON object; `depth` arrays and objects that hold something, itself among them, may be nested."""
    return schema_pattern({"type": "object"}, style, free_depth=depth - 1)


@dataclass(frozen=True)
class _Limits:
    depth: int
    free_depth: int
    items: int | None  # of an array, where the schema does not ask for more

    def smaller(self) -> Iterator[_Limits]:
        """Itself, then less and less of everything."""
        yield self
        for share, items in ((0.65, 64), (0.4, 16), (0.25, 8), (0.125, 4), (0.0, 2)):
            yield _Limits(int(self.depth * share), int(self.free_depth * share + 0.5), items)


class _Writer:
    def __init__(self, source: SchemaSource, style: Style, most_others: int | None, clock: Clock) -> None:
        self._style = style
        self._most_others = most_others
        self._clock = clock
        self._plan = Plan(source, style, clock)
        self._shapes: dict[Key, list[Shape]] = {}
        self._root = self._planned(source.together([source.root]))
        self._circle = circles({key: _children(shapes) for key, shapes in self._shapes.items()})
        self._limits = _Limits(0, 0, None)
        self._written: dict[tuple[Key, int], tuple[Node | None, int]] = {}
        self._is_cut = False  # something was left out for lack of depth
        self._is_limited = False  # with other limits there would be another pattern

    def _planned(self, root: Together) -> Key:
        waiting = [root]
        self._kept = [root]
        while waiting:
            schemas = waiting.pop()
            key = _key(schemas)
            if key in self._shapes:
                continue
            if len(self._shapes) >= _MAX_SCHEMAS:
                raise InputError(
                    f"the JSON schema needs more than {_MAX_SCHEMAS} combinations of its parts; simplify it."
                )
            self._shapes[key] = self._plan.shapes(schemas)
            held = [some for shape in self._shapes[key] for some in inner(shape)]
            self._kept += held
            waiting += reversed(held)
        return _key(root)

    def fitting(self, depth: int, free_depth: int) -> Node:
        """The pattern of as much depth as fits, or of as little as there is."""
        found: Node | None = None
        wanted = _Limits(depth, free_depth, None)
        for limits in wanted.smaller():
            node = self._with(limits)
            if node is None and found is None and self._is_cut:
                node = self._deeper(limits)
            if node is None:
                break
            found = node
            if not self._is_limited or fits(node, _GOOD_SIZE, self._clock):
                break
        if found is not None:
            return found
        if self._is_cut:
            raise InputError(
                "the JSON schema refers to itself in such a way that no finite value is valid; make the "
                "reference optional, or an alternative of 'anyOf'."
            )
        if (missing := self._plan.branches.without_opposite) is not None:
            keyword, where = missing
            raise refused(
                where, keyword, "is asked for its opposite ('not', 'oneOf' or 'if'), which is not supported"
            )
        raise InputError(
            "nothing that can be written is valid for the JSON schema: what it asks for contradicts itself, "
            "or it asks for more members of an object than it names."
        )

    def _deeper(self, limits: _Limits) -> Node | None:
        """The least depth at which something is valid, when that is more than was asked for."""
        for depth in range(limits.depth + 1, _MAX_NESTING):
            node = self._with(_Limits(depth, limits.free_depth, limits.items))
            if node is not None or not self._is_cut:
                return node
        return None

    def _with(self, limits: _Limits) -> Node | None:
        self._limits = limits
        self._written = {}
        self._is_cut = self._is_limited = False
        return self._value(self._root, self._budget(self._root), 0)

    def _budget(self, key: Key) -> int:
        if key not in self._circle:
            return 0
        return self._limits.depth if key else self._limits.free_depth

    def _value(self, key: Key, budget: int, level: int) -> Node | None:
        """The values of a plan; None when there are none."""
        if level > _MAX_NESTING:
            raise InputError(f"the JSON schema nests values deeper than {_MAX_NESTING} levels; flatten it.")
        if (key, budget) not in self._written:
            self._clock.check()
            nodes = [self._shape(shape, key, budget, level) for shape in self._shapes[key]]
            found = [node for node in nodes if node is not None]
            node = None if not found else found[0] if len(found) == 1 else Either(tuple(found))
            self._written[key, budget] = (node, level)
        return self._written[key, budget][0]

    def _shape(self, shape: Shape, key: Key, budget: int, level: int) -> Node | None:
        def child(schemas: Together) -> Node | None:
            held = _key(schemas)
            self._is_limited |= held in self._circle
            if self._circle.get(held, -1) != self._circle.get(key, -2):
                return self._value(held, self._budget(held), level + 1)
            if budget == 0:
                self._is_cut |= bool(key)
                return None
            return self._value(held, budget - 1, level + 1)

        if isinstance(shape, ArrayShape):
            prefix = [child(schemas) for schemas in shape.prefix]
            rest = None if shape.rest is None else child(shape.rest)
            found = None
            if (some := shape.contains) is not None:
                places = [child(schemas) for schemas in some.prefix]
                found = Found(places, None if some.rest is None else child(some.rest), some.least, some.most)
            most, cap = shape.most, self._limits.items
            self._is_limited |= most is not None and most > max(2, shape.least, len(prefix))
            if most is not None and cap is not None:
                most = min(most, max(cap, shape.least, len(prefix)))
            return array_pattern(prefix, rest, shape.least, most, self._style, self._clock, found)
        if isinstance(shape, DistinctShape):
            return distinct_pattern(shape.items, shape.least, shape.most, self._style, self._clock)
        if isinstance(shape, ObjectShape):
            named = [(some.key, child(some.value), some.required) for some in shape.named]
            others = [(keys, child(value)) for keys, value in shape.others]
            return object_pattern(
                named, others, shape.least, shape.most, self._style, self._clock, self._most_others
            )
        return shape


def _key(schemas: Together) -> Key:
    return tuple(map(id, schemas))


def _children(shapes: list[Shape]) -> list[Key]:
    return [_key(schemas) for shape in shapes for schemas in inner(shape)]
