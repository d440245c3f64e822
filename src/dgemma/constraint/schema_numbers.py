"""What a branch of a schema says about a number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dgemma.constraint import numerals
from dgemma.constraint.clock import Clock
from dgemma.constraint.numerals import Bounds
from dgemma.constraint.pattern import Node
from dgemma.constraint.schema_keywords import NO_MULTIPLE, UNLIKE, number, refused
from dgemma.constraint.schema_source import Branch, SchemaSource
from dgemma.errors import InputError

_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def bounds_of(schemas: Iterable[dict[str, Any]], source: SchemaSource) -> Bounds:
    """The narrowest of the bounds that these schemas give a number."""
    low: tuple[int | float, bool] | None = None
    high: tuple[int | float, bool] | None = None
    for schema in schemas:
        where = source.where(schema)
        for keyword, excluded in (("minimum", False), ("exclusiveMinimum", True)):
            value = number(schema, keyword, where)
            if value is not None and (low is None or (value, excluded) > low):
                low = (value, excluded)
        for keyword, excluded in (("maximum", False), ("exclusiveMaximum", True)):
            value = number(schema, keyword, where)
            if value is not None and (high is None or (value, not excluded) < (high[0], not high[1])):
                high = (value, excluded)
    return Bounds(
        None if low is None else low[0],
        None if high is None else high[0],
        low is not None and low[1],
        high is not None and high[1],
    )


def divisor_of(schema: dict[str, Any], where: str, keyword: str = "multipleOf") -> int | float | None:
    divisor = number(schema, keyword, where)
    if divisor is not None and divisor <= 0:
        raise refused(where, "multipleOf", f"is {divisor}; give a number above 0")
    return divisor


def number_pattern(branch: Branch, kinds: frozenset[str], source: SchemaSource, clock: Clock) -> Node | None:
    """The numbers of a branch, integers, fractions or both; None when there are none."""
    bounds = bounds_of(branch, source)
    unlike = [
        value
        for schema in branch
        for value in schema.get(UNLIKE, [])
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    # Where numbers are compared, they are written in so many digits as a float tells apart.
    plain = bool(unlike) or any("multipleOf" in schema or NO_MULTIPLE in schema for schema in branch)
    try:
        if "fraction" not in kinds:
            found = numerals.integers(bounds)
        else:
            found = numerals.numbers(bounds, clock, only_fractions="integer" not in kinds, plain=plain)
    except numerals.TooLongError as error:
        where, keyword = next(
            (source.where(schema), keyword) for schema in branch for keyword in _BOUNDS if keyword in schema
        )
        raise refused(where, keyword, f"is not taken: {str(error).rstrip('.')}") from None
    for schema in branch:
        where = source.where(schema)
        try:
            if found is not None and (divisor := divisor_of(schema, where)) is not None:
                found = numerals.multiples(found, divisor, bounds, clock)
            if found is not None and (divisor := divisor_of(schema, where, NO_MULTIPLE)) is not None:
                found = numerals.no_multiples(found, divisor, clock)
        except InputError as error:
            raise refused(where, "multipleOf", f"is not taken: {str(error).rstrip('.')}") from None
    for value in unlike:
        found = numerals.unlike(found, value, clock) if found is not None else None
    return found
