"""Arrays and objects out of patterns of what they hold.

What follows is built first and shared by all that may come before it.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

from dgemma.constraint.json_text import Style, member
from dgemma.constraint.pattern import EMPTY, Either, Node, Repeat, Sequence, literal

_MOST_OTHERS = 30  # members that are not named, where they are counted
_CLOSE_ARRAY, _CLOSE_OBJECT = literal("]"), literal("}")


def array_pattern(
    prefix: Several[Node | None], rest: Node | None, least: int, most: int | None, style: Style
) -> Node | None:
    """The first items, each of its own kind (None: there is none), then others alike.

    None when there is no such array.
    """
    size = max(len(prefix), least, 1) if most is None else most
    # What may follow after `size` items, then after one less, and so on.
    follows: Node | None = _CLOSE_ARRAY
    if most is None and rest is not None:
        follows = Sequence((Repeat(Sequence((style.comma, rest)), 0, None), _CLOSE_ARRAY))
    for at in reversed(range(size)):
        item = prefix[at] if at < len(prefix) else rest
        ways: list[Node] = [_CLOSE_ARRAY] if at >= least else []
        if item is not None and follows is not None:
            ways.append(Sequence((style.comma if at else EMPTY, item, follows)))
        follows = _one_of(ways)
    return None if follows is None else Sequence((literal("["), follows))


def object_pattern(
    named: Several[tuple[Node, Node | None, bool]],
    others: Several[tuple[Node, Node | None]],
    least: int,
    most: int | None,
    style: Style,
) -> Node | None:
    """Named members in their order (key, value, whether it has to be there), then others.

    How many there are is counted where that matters. Keys of others may repeat, as no machine remembers them
    all: however many there are, they count as one towards `least`.
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
    # By the number of members so far: what follows when there are some, and when there are none.
    follows = [_last(other, number, least, most, style) for number in range(limit + 1)]
    begins = _first(other, least, most, style)
    for node, required in reversed(members):
        nexts: list[Node | None] = [
            follows[min(number + 1, limit)] if most is None or number < most else None
            for number in range(limit + 1)
        ]
        begins = _either_way(node, nexts[0], begins, required, EMPTY)
        follows = [
            _either_way(node, after, without, required, style.comma)
            for after, without in zip(nexts, follows, strict=True)
        ]
    return None if begins is None else Sequence((literal("{"), begins))


def _either_way(
    node: Node, after: Node | None, without: Node | None, required: bool, comma: Node
) -> Node | None:
    ways: list[Node] = [] if after is None else [Sequence((comma, node, after))]
    if not required and without is not None:
        ways.append(without)
    return _one_of(ways)


def _last(other: Node | None, number: int, least: int, most: int | None, style: Style) -> Node | None:
    """What follows behind the named members, when there are so many of them, and at least one."""
    ways: list[Node] = [_CLOSE_OBJECT] if number >= least else []
    left = None if most is None else most - number
    if other is not None and number + 1 >= least and left != 0:
        again = Sequence((style.comma, other))
        if number >= least:
            return Sequence((Repeat(again, 0, left), _CLOSE_OBJECT))
        ways.append(Sequence((again, Repeat(again, 0, None if left is None else left - 1), _CLOSE_OBJECT)))
    return _one_of(ways)


def _first(other: Node | None, least: int, most: int | None, style: Style) -> Node | None:
    """The same when there are none."""
    ways: list[Node] = [_CLOSE_OBJECT] if least == 0 else []
    if other is not None and least <= 1 and most != 0:
        again = Repeat(Sequence((style.comma, other)), 0, None if most is None else most - 1)
        ways.append(Sequence((other, again, _CLOSE_OBJECT)))
    return _one_of(ways)


def _one_of(ways: list[Node]) -> Node | None:
    return None if not ways else ways[0] if len(ways) == 1 else Either(tuple(ways))
