"""Shapes of values: a scalar is a pattern, arrays and objects are given by what they hold."""

from __future__ import annotations

from dataclasses import dataclass

from dgemma.constraint.pattern import Node
from dgemma.constraint.schema_source import Together


@dataclass(frozen=True)
class Contains:
    """Items that have to be there, so many: what they are in each place."""

    prefix: tuple[Together, ...]
    rest: Together | None
    least: int
    most: int | None


@dataclass(frozen=True)
class ArrayShape:
    prefix: tuple[Together, ...]
    rest: Together | None  # None: nothing comes behind the prefix
    least: int
    most: int | None
    contains: Contains | None = None


@dataclass(frozen=True)
class DistinctShape:
    """An array of some of these items, each at most once."""

    items: tuple[Node, ...]
    least: int
    most: int


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


Shape = Node | ArrayShape | DistinctShape | ObjectShape


def inner(shape: Shape) -> list[Together]:
    """The schemas of what a shape holds."""
    if isinstance(shape, ArrayShape):
        found = [*shape.prefix, *([] if shape.rest is None else [shape.rest])]
        if (some := shape.contains) is not None:
            found += [*some.prefix, *([] if some.rest is None else [some.rest])]
        return found
    if isinstance(shape, ObjectShape):
        return [*(some.value for some in shape.named), *(value for _, value in shape.others)]
    return []
