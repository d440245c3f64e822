"""What two languages have in common, and what one has and another has not: machines side by side."""

from __future__ import annotations

from itertools import groupby

from dgemma.constraint.automaton import MAX_STATES, Automaton, build
from dgemma.constraint.clock import Clock
from dgemma.constraint.pattern import Graph, Node
from dgemma.errors import InputError


def both(first: Node, second: Node, clock: Clock) -> Graph | None:
    """The texts of both; None when there are none. Neither may hold special tokens."""
    return _together(build(first, clock), build(second, clock), clock, keep_second=True)


def minus(first: Node, second: Node, clock: Clock) -> Graph | None:
    """The texts of `first` that `second` does not have; None when there are none."""
    return _together(build(first, clock), build(second, clock), clock, keep_second=False)


def _together(a: Automaton, b: Automaton, clock: Clock, *, keep_second: bool) -> Graph | None:
    assert not a.letter_of_token
    assert not b.letter_of_token
    pairs = list(zip(a.letter_of_byte.tolist(), b.letter_of_byte.tolist(), strict=True))
    bytes_of: dict[tuple[int, int], list[int]] = {}
    for byte, pair in enumerate(pairs):
        if pair[0] >= 0:
            bytes_of.setdefault(pair, []).append(byte)
    ranges = {pair: _joined(some) for pair, some in bytes_of.items()}
    # Rows as lists, with a last one for the state of `b` that leads nowhere.
    rows_a = a.table.tolist()
    rows_b = [*b.table.tolist(), [-1] * b.table.shape[1]]
    accepts_b = [*b.accepts.tolist(), False]
    states = [(0, 0)]
    numbers = {(0, 0): 0}
    arrows: list[list[tuple[int, int, int]]] = []
    for at_a, at_b in states:
        if len(arrows) % 1024 == 0:
            clock.check()
        found: list[tuple[int, int, int]] = []
        for (letter_a, letter_b), some in ranges.items():
            to_a = rows_a[at_a][letter_a]
            to_b = rows_b[at_b][letter_b] if letter_b >= 0 else -1
            if to_a < 0 or (keep_second and to_b < 0):
                continue
            if (to_a, to_b) not in numbers:
                if len(states) >= MAX_STATES:
                    raise InputError(f"the constraint needs more than {MAX_STATES} states; simplify it.")
                numbers[to_a, to_b] = len(states)
                states.append((to_a, to_b))
            found += [(low, high, numbers[to_a, to_b]) for low, high in some]
        arrows.append(found)
    accepts = frozenset(
        number
        for number, (at_a, at_b) in enumerate(states)
        if a.accepts[at_a] and accepts_b[at_b] == keep_second
    )
    return Graph(tuple(tuple(some) for some in arrows), accepts) if accepts else None


def _joined(numbers: list[int]) -> list[tuple[int, int]]:
    """Ascending numbers as ranges."""
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    return [(run[0], run[-1]) for run in runs]
