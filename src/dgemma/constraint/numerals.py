"""Numbers between bounds, as patterns of their digits.

A number is written as JSON writes it; between bounds without an exponent and without `-0`. Bounds are kept in
the arithmetic of those who check them: the text, read as Python reads it (an `int`, or the nearest `float`),
is compared with the bound as it was read. At most 15 digits stand around a decimal point: so many a `float`
tells apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

from dgemma.constraint.clock import Clock
from dgemma.constraint.pattern import EMPTY, Chars, Either, Graph, Node, Sequence, literal, parse
from dgemma.constraint.product import both, minus
from dgemma.errors import InputError

INTEGER_DIGITS = 18  # of an integer without bounds
FLOAT_DIGITS = 15
_FAR = 10**40  # a bound beyond this is none, as only shorter numbers are written
_MAX_REMAINDERS = 2000
_MAX_LISTED = 2000
_LEAST_DIVISOR = 0.25  # of numbers of 15 digits: quotients that a float tells apart
# The exponent is so short that no float is infinite.
_NUMBER = parse(r"-?(0|[1-9][0-9]{0,14})(\.[0-9]+)?([eE](\+?[0-9]{1,2}|-[0-9]{1,3}))?")
_POINT_ZEROS = parse(r"(\.0+)?")
_ZEROS = parse("0*")
_NO_INTEGER = parse(r"-?[0-9]+\.[0-9]*[1-9]")
_SHORT = parse(rf"-?[0-9]{{1,{FLOAT_DIGITS}}}(\.[0-9]+)?")

Number = int | float


class TooLongError(InputError):
    """Bounds between which there are only numbers of very many digits."""


@dataclass(frozen=True)
class Bounds:
    """Numbers from `low` to `high`; an end that is excluded is not among them."""

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


def integers(bounds: Bounds) -> Node | None:
    """The integers between bounds; None when there are none."""
    return _numerals(bounds, INTEGER_DIGITS, lambda length: 0)


def numbers(
    bounds: Bounds, clock: Clock, *, only_fractions: bool = False, plain: bool = False
) -> Node | None:
    """The numbers between bounds, or those among them that are no integers. plain: without exponents."""
    if not bounds and not only_fractions and not plain:
        return _NUMBER
    found = _numerals(bounds, FLOAT_DIGITS, lambda length: max(0, FLOAT_DIGITS - length))
    return both(found, _NO_INTEGER, clock) if only_fractions and found is not None else found


def _numerals(bounds: Bounds, digits: int, places: Callable[[int], int]) -> Node | None:
    """Numbers of up to `digits` before the point, more where a bound is longer, and `places` behind it."""
    ends = [abs(end) for end in (bounds.low, bounds.high) if end is not None and abs(end) < _FAR]
    if (bounds.low or 0) > _FAR or (bounds.high or 0) < -_FAR:
        raise TooLongError(f"it is beyond {_FAR:.0e}, and no number so long is written.")
    most = max([digits, *(len(str(int(end))) + 1 for end in ends)])
    ways: list[Node] = []
    for length in range(1, most + 1):
        scale = 10 ** places(length)
        first, last = (10 ** (length - 1) if length > 1 else 0) * scale, 10**length * scale - 1
        low, high = _least(bounds, length, scale), -_least(_turned(bounds), length, scale)
        for sign, a, b in (
            ("", max(low, first), min(high, last)),
            ("-", max(-high, first, 1), min(-low, last)),
        ):
            if a <= b:
                size = length + places(length)
                ways.append(
                    Sequence((literal(sign), _rest(str(a).zfill(size), str(b).zfill(size), length, size)))
                )
    return Either(tuple(ways)) if ways else None


def _turned(bounds: Bounds) -> Bounds:
    """The same numbers with the opposite sign."""
    return Bounds(
        None if bounds.high is None else -bounds.high,
        None if bounds.low is None else -bounds.low,
        bounds.high_excluded,
        bounds.low_excluded,
    )


def _least(bounds: Bounds, length: int, scale: int) -> int:
    """The least n, of so many digits before the point, for which n / scale is not below the bounds."""
    if bounds.low is None or bounds.low < -(10**length):
        return 1 - scale * int(10**length)
    if bounds.low > 10**length:
        return scale * int(10**length)
    n = math.ceil(Fraction(bounds.low) * scale) - 1
    only_low = Bounds(bounds.low, low_excluded=bounds.low_excluded)
    while not only_low.hold(n if scale == 1 else float(Fraction(n, scale))):
        n += 1
    return n


@lru_cache(maxsize=1 << 15)
def _rest(low: str | None, high: str | None, before_point: int, left: int) -> Node:
    """`left` digits from `low` to `high` (None: not a limit any more); zeros at the end may be left out.

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
            chars = Chars(((0x30 + some[0], 0x30 + some[-1]),))
            ways.append(Sequence((literal("." if before_point == 0 else ""), chars, rest)))
    return ways[0] if len(ways) == 1 else Either(tuple(ways))


def multiples(node: Node, of: Number, bounds: Bounds, clock: Clock) -> Node | None:
    """Those of the numbers `node` that are multiples; `of` is above 0.

    A float is divided by a float where this is checked: with 0.01 that calls 0.07 no multiple. So only
    divisors that a float holds exactly are taken, and short numbers.
    """
    if isinstance(of, float):
        if Fraction(repr(of)) != Fraction(of):
            raise InputError(
                f"{of!r} has no exact binary form; give an integer or, such as 0.5, a sum of halves."
            )
        shorter = both(node, _SHORT, clock)
        if shorter is None:
            return None
        node = shorter
    divisor, places = _scaled(of)
    if divisor * (places + 1) <= _MAX_REMAINDERS:
        return both(node, _with_zeros(divisor, places), clock)
    low, high = bounds.low, bounds.high
    if low is None or high is None or (high - low) / of > _MAX_LISTED:
        raise InputError(
            f"{of!r} is too large a divisor to count remainders of; give a minimum and a maximum."
        )
    listed = [Fraction(of) * n for n in range(math.floor(low / of), math.ceil(high / of) + 1)]
    texts = [str(int(x)) if x.denominator == 1 else repr(float(x)) for x in listed if bounds.hold(float(x))]
    return both(node, Either(tuple(map(literal, texts))), clock) if texts else None


def no_multiples(node: Node, of: Number, clock: Clock) -> Node | None:
    """Those of the numbers `node`, written without exponents, that are multiples to no arithmetic."""
    if of < _LEAST_DIVISOR or Fraction(repr(of)) != Fraction(of):
        return None
    short = both(node, _SHORT, clock)
    divisor, places = _scaled(of)
    if short is None or divisor * (places + 1) > _MAX_REMAINDERS:
        return None
    return minus(short, _with_zeros(divisor, places), clock)


def _with_zeros(divisor: int, places: int) -> Node:
    """Multiples of divisor / 10^places, also with zeros behind them, which make multiples of multiples."""
    return Sequence((_remainders(divisor, places), _ZEROS if places else _POINT_ZEROS))


def _scaled(of: Number) -> tuple[int, int]:
    """A divisor and places: of = divisor / 10^places."""
    places = next(places for places in range(1100) if (Fraction(of) * 10**places).denominator == 1)
    return int(Fraction(of) * 10**places), places


def unlike(node: Node, value: Number, clock: Clock) -> Node | None:
    """Those of the numbers `node`, written without exponents, that do not equal `value`."""
    text = str(value) if isinstance(value, int) else f"{Decimal(repr(value)):f}"
    whole, _, places = text.partition(".")
    places = places.rstrip("0")
    sign = "-?" if Fraction(repr(value)) == 0 else ""
    written = rf"{sign}{whole}\.{places}0*" if places else rf"{sign}{whole}(\.0+)?"
    return minus(node, parse(written), clock)


@lru_cache(maxsize=64)
def _remainders(divisor: int, places: int) -> Graph:
    """Numbers of up to so many places behind the point that are multiples of divisor / 10^places."""
    # Behind how many places we are (0: before the point) and the remainder so far; then signs and points.
    number = {(place, r): place * divisor + r for place in range(places + 1) for r in range(divisor)}
    sign, begin = len(number), len(number) + 1
    point = {r: begin + 1 + r for r in range(divisor)} if places else {}
    arrows: list[list[tuple[int, int, int]]] = [[] for _ in range(begin + 1 + len(point))]

    def digits(state: int, place: int, r: int) -> None:
        for digit in range(10):
            arrows[state].append((0x30 + digit, 0x30 + digit, number[place, (r * 10 + digit) % divisor]))

    digits(sign, 0, 0)
    digits(begin, 0, 0)
    arrows[begin].append((0x2D, 0x2D, sign))
    for (place, r), state in number.items():
        if place == 0:
            digits(state, 0, r)
        elif place < places:
            digits(state, place + 1, r)
    for r, state in point.items():
        arrows[number[0, r]].append((0x2E, 0x2E, state))
        digits(state, 1, r)
    accepts = [state for (place, r), state in number.items() if r * 10 ** (places - place) % divisor == 0]
    # The beginning has to be state 0.
    moved = {begin: 0, 0: begin}
    swapped = [[(a, b, moved.get(to, to)) for a, b, to in some] for some in arrows]
    swapped[0], swapped[begin] = swapped[begin], swapped[0]
    return Graph(tuple(map(tuple, swapped)), frozenset(moved.get(state, state) for state in accepts))
