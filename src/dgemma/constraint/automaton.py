"""A pattern as a machine on bytes and special tokens: deterministic, minimal, bounded in time and memory.

Letters of its alphabet are classes of bytes that no part of the pattern tells apart, and one letter for each
special token. A state from which no text of the language can be reached is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dgemma.constraint.pattern import Chars, Control, Either, Node, Ranges, Repeat, Sequence
from dgemma.errors import InputError

MAX_STATES = 60_000  # of the machine
_MAX_PARTS = 400_000  # of the machine before it is deterministic
_MAX_WORK = 8_000_000  # parts of states looked at while it is made so
DEFAULT_SECONDS = 5.0
_MOST_ROUNDS = 300  # of making it minimal

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


class Clock:
    """Refuses to go on when the time is up: the thread's own, so that a busy machine refuses nothing more."""

    def __init__(self, seconds: float) -> None:
        self._end = time.thread_time() + seconds
        self._seconds = seconds

    def check(self) -> None:
        if time.thread_time() > self._end:
            raise InputError(
                f"the constraint takes more than {self._seconds:g} seconds to compile; simplify it."
            )


def build(node: Node, clock: Clock | None = None) -> Automaton:
    """The machine of a pattern."""
    clock = clock or Clock(DEFAULT_SECONDS)
    parts = _Parts(clock)
    end = parts.new()
    start = parts.add(node, end)
    letter_of_byte, letter_of_token = _letters(parts)
    table, accepts = _determinize(parts, start, end, letter_of_byte, letter_of_token, clock)
    table, accepts = _minimize(*_live(table, accepts), clock)
    return Automaton(table, accepts, letter_of_byte, letter_of_token)


@dataclass
class _Parts:
    """States with arrows: silent ones, ranges of bytes, special tokens."""

    clock: Clock
    silent: list[list[int]] = field(default_factory=list)
    bytes_: list[list[tuple[int, int, int]]] = field(default_factory=list)  # low, high, to
    tokens: list[list[tuple[int, int]]] = field(default_factory=list)

    def new(self) -> int:
        if len(self.silent) >= _MAX_PARTS:
            raise InputError("the constraint is too large: its repetitions or choices multiply. Simplify it.")
        if len(self.silent) % 4096 == 0:
            self.clock.check()
        self.silent.append([])
        self.bytes_.append([])
        self.tokens.append([])
        return len(self.silent) - 1

    def add(self, node: Node, end: int) -> int:
        """A state from which `node` leads to `end`."""
        if isinstance(node, Chars):
            return self._chars(node.ranges, end)
        if isinstance(node, Control):
            start = self.new()
            self.tokens[start].append((node.token, end))
            return start
        if isinstance(node, Sequence):
            for part in reversed(node.parts):
                end = self.add(part, end)
            return end
        if isinstance(node, Either):
            start = self.new()
            self.silent[start] += [self.add(part, end) for part in node.parts]
            return start
        return self._repeat(node, end)

    def _repeat(self, node: Repeat, end: int) -> int:
        if node.most is None:
            loop = self.new()
            self.silent[loop] += [self.add(node.part, loop), end]
            start = loop
        else:
            # Each copy may be the last: it leads to the end at once, not through the others.
            start = end
            for _ in range(node.most - node.least):
                begin = self.new()
                self.silent[begin] += [self.add(node.part, start), end]
                start = begin
        for _ in range(node.least):
            start = self.add(node.part, start)
        return start

    def _chars(self, ranges: Ranges, end: int) -> int:
        start = self.new()
        ends: dict[tuple[tuple[int, int], ...], int] = {(): end}
        for low, high in ranges:
            for sequence in utf8_ranges(low, high):
                at = start
                for number, (a, b) in enumerate(sequence):
                    rest = sequence[number + 1 :]
                    if rest not in ends:
                        ends[rest] = self.new()
                    if (a, b, ends[rest]) not in self.bytes_[at]:
                        self.bytes_[at].append((a, b, ends[rest]))
                    at = ends[rest]
        return start


def utf8_ranges(low: int, high: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Byte ranges, one after another, that together spell exactly the characters from `low` to `high`."""
    for limit in (0x7F, 0x7FF, 0xFFFF):
        if low <= limit < high:
            yield from utf8_ranges(low, limit)
            yield from utf8_ranges(limit + 1, high)
            return
    if high < 0x80:
        yield ((low, high),)
        return
    for shift in (6, 12, 18):
        mask = (1 << shift) - 1
        if low >> shift != high >> shift:
            if low & mask:
                yield from utf8_ranges(low, low | mask)
                yield from utf8_ranges((low | mask) + 1, high)
                return
            if high & mask != mask:
                yield from utf8_ranges(low, (high & ~mask) - 1)
                yield from utf8_ranges(high & ~mask, high)
                return
    first, last = chr(low).encode("utf-8"), chr(high).encode("utf-8")
    yield tuple(zip(first, last, strict=True))


def _letters(parts: _Parts) -> tuple[Ints, dict[int, int]]:
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
    parts: _Parts,
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

    def closure(some: Iterable[int]) -> frozenset[int]:
        nonlocal work
        seen = set(some)
        queue = list(seen)
        while queue:
            for to in parts.silent[queue.pop()]:
                if to not in seen:
                    seen.add(to)
                    queue.append(to)
        work += len(seen)
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
    for state in states:
        if len(rows) % 256 == 0:
            clock.check()
        targets: dict[int, set[int]] = {}
        for part in state:
            for letter, to in arrows_of(part):
                targets.setdefault(letter, set()).add(to)
        row = [-1] * num_letters
        known: dict[frozenset[int], int] = {}
        for letter, some in targets.items():
            key = frozenset(some)
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


def _minimize(table: Ints, accepts: NDArray[np.bool_], clock: Clock) -> tuple[Ints, NDArray[np.bool_]]:
    """States that no text tells apart become one: groups are split until they hold.

    Long chains (`.{0,2000}`) are split one state at a time, and hold no two alike anyway: after some rounds
    the machine stays as it is, which is as right.
    """
    padded = np.where(table >= 0, table, len(table))
    factors = np.random.default_rng(0).integers(1, 1 << 62, table.shape[1] + 1, dtype=np.uint64) | np.uint64(
        1
    )
    group = accepts.astype(np.uint64)
    count = 0
    for _ in range(_MOST_ROUNDS):
        clock.check()
        seen = np.append(group + np.uint64(1), np.uint64(0))[padded]
        mixed = (seen * factors[1:]).sum(1, dtype=np.uint64) + group * factors[0]
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
    targets = np.append(of_state, np.int32(-1))[padded]
    chosen = first[order]
    # Numbers were mixed, not compared: make sure that no two different ones fell together.
    if not np.array_equal(targets, targets[chosen][of_state]) or not np.array_equal(
        accepts, accepts[chosen][of_state]
    ):
        return table, accepts
    return targets[chosen].astype(np.int32), accepts[chosen]
