"""Numbers: bounds and divisors as grammars of decimal digits.

Numbers are written as JSON writes them; between bounds without an exponent and without `-0`. Bounds follow
the arithmetic of validators: the text, parsed by Python (an `int`, or the nearest `float`), is compared with
the bound as it was parsed. At most 15 digits are written around a decimal point, which a `float` represents
exactly enough to tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

from dgemma.errors import InputError
from dgemma.structured_output.budget import TimeBudget
from dgemma.structured_output.dfa import difference, intersection
from dgemma.structured_output.json_schema.keywords import NOT_EQUAL, NOT_MULTIPLE_OF, number, refused
from dgemma.structured_output.json_schema.source import Branch, SchemaSource
from dgemma.structured_output.regex import (
    EMPTY,
    Alternation,
    CharClass,
    Concat,
    DFANode,
    Node,
    literal,
    parse,
)

INTEGER_DIGITS = 18  # of an integer without bounds
FLOAT_DIGITS = 15
_FAR = 10**40  # bounds beyond this have no effect: only shorter numbers are written
_MAX_REMAINDERS = 2000
_MAX_LISTED = 2000
_LEAST_DIVISOR = 0.25  # quotients of 15-digit numbers then stay exact in a float
# The exponent is short, so that no float is infinite.
_NUMBER = parse(r"-?(0|[1-9][0-9]{0,14})(\.[0-9]+)?([eE](\+?[0-9]{1,2}|-[0-9]{1,3}))?")
_POINT_ZEROS = parse(r"(\.0+)?")
_ZEROS = parse("0*")
_NO_INTEGER = parse(r"-?[0-9]+\.[0-9]*[1-9]")
_SHORT = parse(rf"-?[0-9]{{1,{FLOAT_DIGITS}}}(\.[0-9]+)?")

Number = int | float


class NumberTooLongError(InputError):
    """Bounds that only numbers of too many digits satisfy."""


@dataclass(frozen=True)
class NumberBounds:
    """Numbers from `low` to `high`, each end included or excluded."""

    low: Number | None = None
    high: Number | None = None
    low_excluded: bool = False
    high_excluded: bool = False

    def __bool__(self) -> bool:
        return self.low is not None or self.high is not None

    def hold(self, value: Number) -> bool:
        above = self.low is None or value > self.low or (value == self.low and not self.low_excluded)
        below = self.high is None or value < self.high or (value == self.high and not self.high_excluded)
        return above and below


def integers_between(bounds: NumberBounds) -> Node | None:
    """The integers between bounds; None if there are none."""
    return _numerals(bounds, INTEGER_DIGITS, lambda length: 0)


def numbers_between(
    bounds: NumberBounds, budget: TimeBudget, *, only_fractions: bool = False, plain: bool = False
) -> Node | None:
    """The numbers between bounds. only_fractions: no integers. plain: without exponents."""
    if not bounds and not only_fractions and not plain:
        return _NUMBER
    found = _numerals(bounds, FLOAT_DIGITS, lambda length: max(0, FLOAT_DIGITS - length))
    return intersection(found, _NO_INTEGER, budget) if only_fractions and found is not None else found


def _numerals(bounds: NumberBounds, digits: int, places: Callable[[int], int]) -> Node | None:
    """Numbers of up to `digits` integer digits (more if a bound has more) and `places` decimal places."""
    ends = [abs(end) for end in (bounds.low, bounds.high) if end is not None and abs(end) < _FAR]
    if (bounds.low or 0) > _FAR or (bounds.high or 0) < -_FAR:
        raise NumberTooLongError(f"it is beyond {_FAR:.0e}, and no number so long is written.")
    max_count = max([digits, *(len(str(int(end))) + 1 for end in ends)])
    ways: list[Node] = []
    for length in range(1, max_count + 1):
        scale = 10 ** places(length)
        first, last = (10 ** (length - 1) if length > 1 else 0) * scale, 10**length * scale - 1
        low, high = _smallest(bounds, length, scale), -_smallest(_negated(bounds), length, scale)
        for sign, a, b in (
            ("", max(low, first), min(high, last)),
            ("-", max(-high, first, 1), min(-low, last)),
        ):
            if a <= b:
                size = length + places(length)
                ways.append(
                    Concat((literal(sign), _rest(str(a).zfill(size), str(b).zfill(size), length, size)))
                )
    return Alternation(tuple(ways)) if ways else None


def _negated(bounds: NumberBounds) -> NumberBounds:
    """The bounds of the negated numbers."""
    return NumberBounds(
        None if bounds.high is None else -bounds.high,
        None if bounds.low is None else -bounds.low,
        bounds.high_excluded,
        bounds.low_excluded,
    )


def _smallest(bounds: NumberBounds, length: int, scale: int) -> int:
    """The smallest n with `length` integer digits for which n / scale is not below the bounds."""
    if bounds.low is None or bounds.low < -(10**length):
        return 1 - scale * int(10**length)
    if bounds.low > 10**length:
        return scale * int(10**length)
    n = math.ceil(Fraction(bounds.low) * scale) - 1
    only_low = NumberBounds(bounds.low, low_excluded=bounds.low_excluded)
    while not only_low.hold(n if scale == 1 else float(Fraction(n, scale))):
        n += 1
    return n


@lru_cache(maxsize=4096)
def _rest(low: str | None, high: str | None, before_point: int, left: int) -> Node:
    """`left` digits from `low` to `high` (None: no limit any more); trailing zeros may be left out.

    The point comes after `before_point` digits, -1 when it is there already.
    """
    ways: list[Node] = []
    if before_point <= 0 and not (low or "").strip("0"):
        ways.append(EMPTY)
    if left:
        first, last = int(low[0]) if low else 0, int(high[0]) if high else 9
        leading: dict[tuple[bool, bool], list[int]] = {}
        for digit in range(first, last + 1):
            leading.setdefault((bool(low) and digit == first, bool(high) and digit == last), []).append(digit)
        for (is_low, is_high), some in leading.items():
            rest = _rest(
                low[1:] if low and is_low else None,
                high[1:] if high and is_high else None,
                max(before_point - 1, -1),
                left - 1,
            )
            chars = CharClass(((0x30 + some[0], 0x30 + some[-1]),))
            ways.append(Concat((literal("." if before_point == 0 else ""), chars, rest)))
    return ways[0] if len(ways) == 1 else Alternation(tuple(ways))


def multiples(node: Node, of: Number, bounds: NumberBounds, budget: TimeBudget) -> Node | None:
    """The numbers of `node` that are multiples of `of`, which is positive.

    Validators divide floats, by which 0.07 is no multiple of 0.01. So only divisors that a float represents
    exactly are supported, and only short numbers are written.
    """
    if isinstance(of, float):
        if Fraction(repr(of)) != Fraction(of):
            raise InputError(
                f"{of!r} has no exact binary form; give an integer or, such as 0.5, a sum of halves."
            )
        shorter = intersection(node, _SHORT, budget)
        if shorter is None:
            return None
        node = shorter
    divisor, places = _scaled(of)
    if divisor * (places + 1) <= _MAX_REMAINDERS:
        return intersection(node, _with_zeros(divisor, places), budget)
    low, high = bounds.low, bounds.high
    if low is None or high is None or Fraction(high) - Fraction(low) > _MAX_LISTED * Fraction(of):
        raise InputError(
            f"{of!r} is too large a divisor to count remainders of; give a minimum and a maximum."
        )
    first, last = math.floor(Fraction(low) / Fraction(of)), math.ceil(Fraction(high) / Fraction(of))
    listed = [Fraction(of) * n for n in range(first, last + 1)]
    numbers = [int(x) if x.denominator == 1 else float(x) for x in listed]
    texts = [repr(x) for x in numbers if bounds.hold(x)]
    return intersection(node, Alternation(tuple(map(literal, texts))), budget) if texts else None


def non_multiples(node: Node, of: Number, budget: TimeBudget) -> Node | None:
    """The numbers of `node` (without exponents) that are no multiples, exactly and in float arithmetic."""
    if of < _LEAST_DIVISOR or Fraction(repr(of)) != Fraction(of):
        return None
    short = intersection(node, _SHORT, budget)
    divisor, places = _scaled(of)
    if short is None or divisor * (places + 1) > _MAX_REMAINDERS:
        return None
    return difference(short, _with_zeros(divisor, places), budget)


def _with_zeros(divisor: int, places: int) -> Node:
    """Multiples of divisor / 10^places, also with trailing zeros."""
    return Concat((_remainders(divisor, places), _ZEROS if places else _POINT_ZEROS))


def _scaled(of: Number) -> tuple[int, int]:
    """(divisor, places) with of = divisor / 10^places."""
    places = next(places for places in range(1100) if (Fraction(of) * 10**places).denominator == 1)
    return int(Fraction(of) * 10**places), places


def not_equal_to(node: Node, value: Number, budget: TimeBudget) -> Node | None:
    """The numbers of `node` (without exponents) that do not equal `value`."""
    text = str(value) if isinstance(value, int) else f"{Decimal(repr(value)):f}"
    whole, _, places = text.partition(".")
    places = places.rstrip("0")
    sign = "-?" if Fraction(repr(value)) == 0 else ""
    value_grammar = rf"{sign}{whole}\.{places}0*" if places else rf"{sign}{whole}(\.0+)?"
    return difference(node, parse(value_grammar), budget)


@lru_cache(maxsize=8)
def _remainders(divisor: int, places: int) -> DFANode:
    """A DFA of the multiples of divisor / 10^places with up to `places` decimal places."""
    # A state is the number of decimal places read (0: before the point) and the remainder so far; further
    # states follow for the sign, the start and the point.
    number = {(place, r): place * divisor + r for place in range(places + 1) for r in range(divisor)}
    sign, begin = len(number), len(number) + 1
    point = {r: begin + 1 + r for r in range(divisor)} if places else {}
    transitions: list[list[tuple[int, int, int]]] = [[] for _ in range(begin + 1 + len(point))]

    def digits(state: int, place: int, r: int) -> None:
        for digit in range(10):
            transitions[state].append((0x30 + digit, 0x30 + digit, number[place, (r * 10 + digit) % divisor]))

    digits(sign, 0, 0)
    digits(begin, 0, 0)
    transitions[begin].append((0x2D, 0x2D, sign))
    for (place, r), state in number.items():
        if place == 0:
            digits(state, 0, r)
        elif place < places:
            digits(state, place + 1, r)
    for r, state in point.items():
        transitions[number[0, r]].append((0x2E, 0x2E, state))
        digits(state, 1, r)
    accepts = [state for (place, r), state in number.items() if r * 10 ** (places - place) % divisor == 0]
    # The start state has to be state 0.
    moved = {begin: 0, 0: begin}
    swapped = [[(a, b, moved.get(to, to)) for a, b, to in some] for some in transitions]
    swapped[0], swapped[begin] = swapped[begin], swapped[0]
    return DFANode(tuple(map(tuple, swapped)), frozenset(moved.get(state, state) for state in accepts))


_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def bounds_of(schemas: Iterable[dict[str, Any]], source: SchemaSource) -> NumberBounds:
    """The narrowest bounds of these schemas."""
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
    return NumberBounds(
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


def number_grammar(
    branch: Branch, kinds: frozenset[str], source: SchemaSource, budget: TimeBudget
) -> Node | None:
    """The numbers of a branch (integers, fractions or both); None if there are none."""
    bounds = bounds_of(branch, source)
    excluded = [
        value
        for schema in branch
        for value in schema.get(NOT_EQUAL, [])
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    # Where values are compared, numbers are short enough that different texts are different floats.
    plain = bool(excluded) or any("multipleOf" in schema or NOT_MULTIPLE_OF in schema for schema in branch)
    try:
        if "fraction" not in kinds:
            found = integers_between(bounds)
        else:
            found = numbers_between(bounds, budget, only_fractions="integer" not in kinds, plain=plain)
    except NumberTooLongError as error:
        where, keyword = next(
            (source.where(schema), keyword) for schema in branch for keyword in _BOUNDS if keyword in schema
        )
        raise refused(where, keyword, f"is not taken: {str(error).rstrip('.')}") from None
    for schema in branch:
        where = source.where(schema)
        try:
            if found is not None and (divisor := divisor_of(schema, where)) is not None:
                found = multiples(found, divisor, bounds, budget)
            if found is not None and (divisor := divisor_of(schema, where, NOT_MULTIPLE_OF)) is not None:
                found = non_multiples(found, divisor, budget)
        except InputError as error:
            raise refused(where, "multipleOf", f"is not taken: {str(error).rstrip('.')}") from None
    for value in excluded:
        found = not_equal_to(found, value, budget) if found is not None else None
    return found
