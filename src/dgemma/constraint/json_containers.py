"""Arrays and objects out of patterns of what they hold.

What follows is built first and shared by all that may come before it.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass

from dgemma.constraint.clock import Clock
from dgemma.constraint.json_text import Style, member
from dgemma.constraint.parts import MAX_PARTS, TooLargeError
from dgemma.constraint.pattern import EMPTY, Either, Node, Repeat, Sequence, literal

_MOST_OTHERS = 30  # members that are not named, where they are counted
_MOST_DISTINCT = 16  # items of an array that are told apart and stand in their order
_MOST_ARRANGED = 8  # distinct items of an array that may stand in any order
_CLOSE_ARRAY, _CLOSE_OBJECT = literal("]"), literal("}")


@dataclass(frozen=True)
class Found:
    """Items of a kind that is counted, in the places of an array's prefix and behind it."""

    prefix: Several[Node | None]
    rest: Node | None
    least: int
    most: int | None


def array_pattern(
    prefix: Several[Node | None],
    rest: Node | None,
    least: int,
    most: int | None,
    style: Style,
    clock: Clock,
    found: Found | None = None,
) -> Node | None:
    """The first items, each of its own kind (None: there is none), then others alike.

    None when there is no such array.
    """
    found = found or Found([], None, 0, None)
    size = max(len(prefix), least, 1) if most is None else most
    # By how many were found so far: what may follow after `size` items, then after one less, and so on.
    limit = found.least if found.most is None else found.most
    _check_size(size * limit, "items of an array ('minContains', 'maxContains')")
    follows: list[Node | None] = [
        _CLOSE_ARRAY if number >= found.least else None for number in range(limit + 1)
    ]
    if most is None:
        follows = _without_end(rest, found, limit, style)
    for at in reversed(range(size)):
        clock.check()
        item = prefix[at] if at < len(prefix) else rest
        counted = found.prefix[at] if at < len(found.prefix) else found.rest
        before: list[Node | None] = []
        for number, after in enumerate(follows):
            ways: list[Node] = [_CLOSE_ARRAY] if at >= least and number >= found.least else []
            comma = style.comma if at else EMPTY
            if item is not None and after is not None:
                ways.append(Sequence((comma, item, after)))
            more = _next(follows, number, found)
            if counted is not None and more is not None:
                ways.append(Sequence((comma, counted, more)))
            before.append(_one_of(ways))
        follows = before
    return None if follows[0] is None else Sequence((literal("["), follows[0]))


def _next(follows: list[Node | None], number: int, found: Found) -> Node | None:
    """What follows when one more is found; enough are enough where there is no most."""
    if found.most is not None:
        return follows[number + 1] if number < found.most else None
    return follows[number + 1] if number < found.least else None


def _without_end(rest: Node | None, found: Found, limit: int, style: Style) -> list[Node | None]:
    follows: list[Node | None] = [None] * (limit + 1)
    for number in reversed(range(limit + 1)):
        ways: list[Node] = [_CLOSE_ARRAY] if number >= found.least else []
        more = _next(follows, number, found)
        if found.rest is not None and more is not None:
            ways.append(Sequence((style.comma, found.rest, more)))
        end = _one_of(ways)
        if rest is not None and end is not None:
            end = Sequence((Repeat(Sequence((style.comma, rest)), 0, None), end))
        follows[number] = end
    return follows


def distinct_pattern(items: Several[Node], least: int, most: int, style: Style, clock: Clock) -> Node | None:
    """Arrays of these items, each at most once; of many items only those in their order."""
    in_order = len(items) > _MOST_ARRANGED
    most = min(most, max(least, _MOST_DISTINCT))
    known: dict[int, Node | None] = {}

    def follows(used: int) -> Node | None:
        """What may follow when those items are used up whose bits are set."""
        if used not in known:
            number = used.bit_count()
            ways: list[Node] = [_CLOSE_ARRAY] if number >= least else []
            for at, item in enumerate(items):
                if number < most and not used >> at & 1 and (rest := follows(used | 1 << at)) is not None:
                    ways.append(Sequence((style.comma if used else EMPTY, item, rest)))
            known[used] = _one_of(ways)
        return known[used]

    body = _ordered(items, least, most, style, clock) if in_order else follows(0)
    return None if body is None else Sequence((literal("["), body))


def _ordered(items: Several[Node], least: int, most: int, style: Style, clock: Clock) -> Node | None:
    # By how many were taken: what may follow from here on.
    after: list[Node | None] = [_CLOSE_ARRAY if number >= least else None for number in range(most + 1)]
    for item in reversed(items):
        clock.check()
        before: list[Node | None] = []
        for number in range(most + 1):
            ways = [way for way in (after[number],) if way is not None]
            if number < most and (rest := after[number + 1]) is not None:
                ways.append(Sequence((style.comma if number else EMPTY, item, rest)))
            before.append(_one_of(ways))
        after = before
    return after[0]


def object_pattern(
    named: Several[tuple[Node, Node | None, bool]],
    others: Several[tuple[Node, Node | None]],
    least: int,
    most: int | None,
    style: Style,
    clock: Clock,
    most_others: int | None = None,
) -> Node | None:
    """Named members in their order (key, value, whether it has to be there), then others.

    How many there are is counted where that matters. Keys of others may repeat, as no machine remembers them
    all: however many there are, they count as one towards `least`. With one of them at most, none can.
    """
    if any(required and value is None for _, value, required in named):
        return None
    members = [(member(key, value, style), required) for key, value, required in named if value is not None]
    if least > len(members) + 1:
        return None
    other = _one_of([member(key, value, style) for key, value in others if value is not None])
    if least <= sum(required for _, required in members):
        least = 0
    if most is not None and most >= len(members):
        most = None if other is None else min(most, len(members) + _MOST_OTHERS)
    limit = least if most is None else most
    _check_size(len(members) * limit, "members of an object ('minProperties', 'maxProperties')")
    # By the number of members so far: what may follow where a member has to (at the beginning, behind a
    # comma), and what may follow behind a member. That a comma stands once before all that may follow it
    # keeps the states of a machine few and small.
    wanted = _others(other, least, most, most_others, limit, style)
    may_close = True
    for node, required in reversed(members):
        clock.check()
        behind = _behind(wanted, least if may_close else None, style)
        wanted = [
            _one_of(
                [
                    *_some(node, _at(behind, number + 1, most)),
                    *([without] if without is not None and not required else []),
                ]
            )
            for number, without in enumerate(wanted)
        ]
        may_close = may_close and not required
    empty: list[Node] = [_CLOSE_OBJECT] if may_close and least == 0 else []
    begins = _one_of([*empty, *([wanted[0]] if wanted[0] is not None else [])])
    return None if begins is None else Sequence((literal("{"), begins))


def _behind(wanted: list[Node | None], least: int | None, style: Style) -> list[Node | None]:
    """The end, from `least` members on (None: not yet), or a comma and more."""
    return [
        _one_of(
            [
                *([_CLOSE_OBJECT] if least is not None and number >= least else []),
                *_some(style.comma, some),
            ]
        )
        for number, some in enumerate(wanted)
    ]


def _some(first: Node, then: Node | None) -> list[Node]:
    return [] if then is None else [Sequence((first, then))]


def _at(behind: list[Node | None], number: int, most: int | None) -> Node | None:
    """What follows behind so many members; without a most, more than are counted are as many as are."""
    if number < len(behind):
        return behind[number]
    return behind[-1] if most is None else None


def _others(
    other: Node | None, least: int, most: int | None, most_others: int | None, limit: int, style: Style
) -> list[Node | None]:
    """Members that nobody named, at least one, behind so many others, and the end."""
    if other is None:
        return [None] * (limit + 1)
    tails: dict[int | None, Node] = {}
    found: list[Node | None] = []
    for number in range(limit + 1):
        left = _least_of(None if most is None else most - number, most_others)
        if left == 0 or number + 1 < least:
            found.append(None)
            continue
        if left not in tails:
            again = Repeat(Sequence((style.comma, other)), 0, None if left is None else left - 1)
            tails[left] = Sequence((other, again, _CLOSE_OBJECT))
        found.append(tails[left])
    return found


def _check_size(cells: int, counted: str) -> None:
    """Refuses what no machine would hold before it is written."""
    if cells > MAX_PARTS:
        raise TooLargeError(f"the JSON schema counts too many {counted}; count fewer, or name fewer.")


def _least_of(first: int | None, second: int | None) -> int | None:
    return second if first is None else first if second is None else min(first, second)


def _one_of(ways: list[Node]) -> Node | None:
    return None if not ways else ways[0] if len(ways) == 1 else Either(tuple(ways))
