"""A pattern as a machine on bytes and special tokens: deterministic, minimal, bounded in time and memory.

Letters of its alphabet are classes of bytes that no part of the pattern tells apart, and one letter for each
special token. A state from which no text of the language can be reached is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dgemma.constraint.clock import Clock
from dgemma.constraint.parts import Parts
from dgemma.constraint.pattern import Node
from dgemma.errors import InputError

MAX_STATES = 60_000  # of the machine
_MAX_WORK = 8_000_000  # parts of states looked at while it is made so
_FEW = 4
_WORK_BETWEEN_CHECKS = 50_000
DEFAULT_SECONDS = 4.5
_MINIMIZING_WORK = 15_000_000  # arrows looked at while it is made minimal

__all__ = ["DEFAULT_SECONDS", "MAX_STATES", "Automaton", "Clock", "build"]

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Automaton:
    """Begins in state 0."""

    table: Ints  # [states, letters]: the next state, -1 for none
    accepts: NDArray[np.bool_]  # [states]
    letter_of_byte: Ints  # [256]; -1: a byte that no text of the language has
    letter_of_token: dict[int, int]  # special tokens

    @property
    def num_states(self) -> int:
        return len(self.accepts)

    def run(self, data: bytes, state: int = 0) -> int:
        """The state behind `data`, -1 for none: the plain twin of everything vectorized."""
        for byte in data:
            letter = int(self.letter_of_byte[byte])
            if state < 0 or letter < 0:
                return -1
            state = int(self.table[state, letter])
        return state

    def matches(self, text: str) -> bool:
        state = self.run(text.encode("utf-8"))
        return state >= 0 and bool(self.accepts[state])


def build(node: Node, clock: Clock | None = None) -> Automaton:
    """The machine of a pattern."""
    clock = clock or Clock(DEFAULT_SECONDS)
    parts = Parts(clock)
    end = parts.new()
    start = parts.add(node, end)
    letter_of_byte, letter_of_token = _letters(parts)
    table, accepts = _determinize(parts, start, end, letter_of_byte, letter_of_token, clock)
    table, accepts = _minimize(*_live(table, accepts), clock)
    return Automaton(table, accepts, letter_of_byte, letter_of_token)


def _letters(parts: Parts) -> tuple[Ints, dict[int, int]]:
    """Bytes that every arrow treats alike share a letter; each special token has its own."""
    edges = sorted({edge for arrows in parts.bytes_ for low, high, _ in arrows for edge in (low, high + 1)})
    used = np.zeros(256, np.bool_)
    for low, high in {(low, high) for arrows in parts.bytes_ for low, high, _ in arrows}:
        used[low : high + 1] = True
    number = np.searchsorted(np.array(edges or [0]), np.arange(256), side="right")
    found = np.full(256, -1, np.int32)
    letters: dict[int, int] = {}
    for byte in range(256):
        if used[byte]:
            found[byte] = letters.setdefault(int(number[byte]), len(letters))
    tokens = sorted({token for arrows in parts.tokens for token, _ in arrows})
    return found, {token: len(letters) + at for at, token in enumerate(tokens)}


def _determinize(
    parts: Parts,
    start: int,
    end: int,
    letter_of_byte: Ints,
    letter_of_token: dict[int, int],
    clock: Clock,
) -> tuple[Ints, NDArray[np.bool_]]:
    num_letters = int(letter_of_byte.max(initial=-1)) + 1 + len(letter_of_token)
    letters_of: dict[tuple[int, int], list[int]] = {}
    arrows: dict[int, list[tuple[int, int]]] = {}  # of a part: letter, to

    def arrows_of(part: int) -> list[tuple[int, int]]:
        if part not in arrows:
            found = []
            for low, high, to in parts.bytes_[part]:
                if (low, high) not in letters_of:
                    letters_of[low, high] = sorted({int(x) for x in letter_of_byte[low : high + 1]})
                found += [(letter, to) for letter in letters_of[low, high]]
            found += [(letter_of_token[token], to) for token, to in parts.tokens[part]]
            arrows[part] = found
        return arrows[part]

    work = 0
    checked = 0

    def closure(some: Iterable[int]) -> frozenset[int]:
        nonlocal work, checked
        seen = set(some)
        queue = list(seen)
        while queue:
            for to in parts.silent[queue.pop()]:
                if to not in seen:
                    seen.add(to)
                    queue.append(to)
        work += len(seen)
        if work > checked + _WORK_BETWEEN_CHECKS:
            checked = work
            clock.check()
        if work > _MAX_WORK:
            raise InputError(
                "the constraint is too ambiguous to compile: simplify its choices and repetitions."
            )
        # Only parts with arrows, and the end, tell states apart.
        return frozenset(part for part in seen if part == end or parts.bytes_[part] or parts.tokens[part])

    first = closure([start])
    numbers = {first: 0}
    states = [first]
    rows: list[list[int]] = []
    small: dict[frozenset[int], int] = {}  # where few parts lead; most states are met in this way many times
    for state in states:
        if len(rows) % 256 == 0:
            clock.check()
        targets: dict[int, set[int]] = {}
        for part in state:
            for letter, to in arrows_of(part):
                targets.setdefault(letter, set()).add(to)
        row = [-1] * num_letters
        large: dict[frozenset[int], int] = {}
        for letter, some in targets.items():
            key = frozenset(some)
            known = small if len(key) <= _FEW else large
            if key not in known:
                reached = closure(some)
                if reached not in numbers:
                    if len(numbers) >= MAX_STATES:
                        raise InputError(f"the constraint needs more than {MAX_STATES} states; simplify it.")
                    numbers[reached] = len(states)
                    states.append(reached)
                known[key] = numbers[reached]
            row[letter] = known[key]
        rows.append(row)
    table = np.array(rows, np.int32).reshape(len(states), num_letters)
    return table, np.array([end in state for state in states])


def _live(table: Ints, accepts: NDArray[np.bool_]) -> tuple[Ints, NDArray[np.bool_]]:
    """Only states from which the language can still be reached."""
    sources, letters = np.nonzero(table >= 0)
    targets = table[sources, letters]
    order = np.argsort(targets, kind="stable")
    sources, targets = sources[order], targets[order]
    bounds = np.searchsorted(targets, np.arange(len(table) + 1))
    alive = accepts.copy()
    queue = list(np.flatnonzero(accepts))
    while queue:
        state = queue.pop()
        for source in sources[bounds[state] : bounds[state + 1]]:
            if not alive[source]:
                alive[source] = True
                queue.append(source)
    if not alive[0]:
        raise InputError("no text at all satisfies the constraint.")
    number = np.full(len(table) + 1, -1, np.int32)
    number[:-1][alive] = np.arange(int(alive.sum()), dtype=np.int32)
    return number[table[alive]], accepts[alive]


def _longest(table: Ints) -> Ints:
    """The length of the longest text from each state; 0 where there is no end of them.

    Every state here is alive, so that a longest way always ends in the language. Taken off one by one from
    the end: what stays leads into a circle.
    """
    sources, letters = np.nonzero(table >= 0)
    arrows = np.unique(table[sources, letters].astype(np.int64) * len(table) + sources)
    targets, sources = np.divmod(arrows, len(table))
    bounds = np.searchsorted(targets, np.arange(len(table) + 1)).tolist()
    before = sources.tolist()
    left = np.bincount(sources, minlength=len(table)).tolist()
    length = [0] * len(table)
    queue = [state for state, count in enumerate(left) if count == 0]
    done = []
    while queue:
        state = queue.pop()
        done.append(state)
        for source in before[bounds[state] : bounds[state + 1]]:
            length[source] = max(length[source], length[state] + 1)
            left[source] -= 1
            if left[source] == 0:
                queue.append(source)
    found: Ints = np.zeros(len(table), np.int32)
    found[done] = np.array(length, np.int32)[done] + 1
    return found


def _minimize(table: Ints, accepts: NDArray[np.bool_], clock: Clock) -> tuple[Ints, NDArray[np.bool_]]:
    """States that no text tells apart become one: groups are split until they hold.

    States that differ in the length of the longest text behind them are told apart at once: a chain such as
    `.{0,2000}` would otherwise be split one state at a time. Should groups not hold after some work, the
    machine stays as it is, which is as right.
    """
    sources, letters = np.nonzero(table >= 0)
    arrows = table[sources, letters]
    bounds = np.searchsorted(sources, np.arange(len(table) + 1))
    factors = np.random.default_rng(0).integers(1, 1 << 62, table.shape[1] + 1, dtype=np.uint64)
    factor = (factors | np.uint64(1))[letters]
    group = _longest(table).astype(np.uint64) * np.uint64(2) + accepts.astype(np.uint64)
    count = 0
    for _ in range(_MINIMIZING_WORK // max(1, len(arrows)) + 2):
        clock.check()
        # What each arrow says, summed up for each state; sums wrap around, and so do their differences.
        sums = np.append(np.uint64(0), np.cumsum((group[arrows] + np.uint64(1)) * factor, dtype=np.uint64))
        mixed = sums[bounds[1:]] - sums[bounds[:-1]] + group * factors[-1]
        _, first, inverse = np.unique(mixed, return_index=True, return_inverse=True)
        group = inverse.astype(np.uint64)
        if len(first) == count:
            break
        count = len(first)
    else:
        return table, accepts
    # Numbered by where they first appear, so that the beginning is state 0.
    order = np.argsort(first, kind="stable")
    rank = np.empty(count, np.int32)
    rank[order] = np.arange(count, dtype=np.int32)
    of_state = rank[inverse]
    targets = np.append(of_state, np.int32(-1))[table]  # the last for none
    chosen = first[order]
    # Numbers were mixed, not compared: make sure that no two different ones fell together.
    if not np.array_equal(targets, targets[chosen][of_state]) or not np.array_equal(
        accepts, accepts[chosen][of_state]
    ):
        return table, accepts
    return targets[chosen].astype(np.int32), accepts[chosen]
