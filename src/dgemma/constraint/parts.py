"""A pattern as states with arrows, several of which may leave on one letter: the step before a machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from dgemma.constraint.clock import Clock
from dgemma.constraint.pattern import Chars, Control, Either, Graph, Node, Ranges, Repeat, Sequence
from dgemma.errors import InputError

MAX_PARTS = 250_000
_MAX_INLINE = 20


class TooLargeError(InputError):
    """A pattern of more parts than there may be."""


@dataclass
class Parts:
    """States with arrows: silent ones, ranges of bytes, special tokens.

    A node that stands in several places of a tree, always with the same thing behind it, is built once. That
    keeps `p_i S_i+1 | F_i+1` linear in the number of properties and holds the value of `[ v (, v)* ]` once.
    """

    clock: Clock
    most: int = MAX_PARTS
    silent: list[list[int]] = field(default_factory=list)
    bytes_: list[list[tuple[int, int, int]]] = field(default_factory=list)  # low, high, to
    tokens: list[list[tuple[int, int]]] = field(default_factory=list)
    # By identity, except characters: nodes compare by value, and comparing a deep tree is a recursion of its
    # own. A key stays good because the node is held beside it.
    _known: dict[tuple[int | Ranges, int], tuple[Node, int]] = field(default_factory=dict)
    _waiting: list[tuple[int, Node, int]] = field(default_factory=list)

    def new(self) -> int:
        if len(self.silent) >= self.most:
            raise TooLargeError(
                "the constraint is too large: its repetitions or choices multiply. Simplify it."
            )
        if len(self.silent) % 4096 == 0:
            self.clock.check()
        self.silent.append([])
        self.bytes_.append([])
        self.tokens.append([])
        return len(self.silent) - 1

    def add(self, node: Node, end: int) -> int:
        """A state from which `node` leads to `end`. Trees may be deep: nothing here calls itself."""
        start = self._begin(node, end)
        while self._waiting:
            self._fill(*self._waiting.pop())
        return start

    def _begin(self, node: Node, end: int, depth: int = 0) -> int:
        """The state of `node` before `end`, whose arrows are drawn later."""
        is_short = isinstance(node, Chars) and len(node.ranges) < 4
        key = (node.ranges if isinstance(node, Chars) and is_short else id(node), end)
        if key not in self._known:
            # A sequence begins where its first part does and needs no state, unless they are nested deeply.
            if isinstance(node, Sequence) and depth < _MAX_INLINE:
                self._known[key] = (node, self._sequence(node, end, depth + 1))
            else:
                self._known[key] = (node, self.new())
                self._waiting.append((self._known[key][1], node, end))
        return self._known[key][1]

    def _sequence(self, node: Sequence, end: int, depth: int = 0) -> int:
        for part in reversed(node.parts):
            end = self._begin(part, end, depth)
        return end

    def _fill(self, start: int, node: Node, end: int) -> None:
        if isinstance(node, Chars):
            self._chars(start, node.ranges, end)
        elif isinstance(node, Control):
            self.tokens[start].append((node.token, end))
        elif isinstance(node, Sequence):
            self.silent[start].append(self._sequence(node, end))
        elif isinstance(node, Either):
            self.silent[start] += [self._begin(part, end) for part in node.parts]
        elif isinstance(node, Repeat):
            self._repeat(start, node, end)
        else:
            self._graph(start, node, end)

    def _repeat(self, start: int, node: Repeat, end: int) -> None:
        if node.most is None:
            # Without copies before it the beginning is the loop: `v (, v)*` then has one end for both v.
            at = self.new() if node.least else start
            self.silent[at] += [self._begin(node.part, at), end]
        else:
            # Each copy may be the last: it leads to the end at once, not through the others.
            at = end
            for _ in range(node.most - node.least):
                begin = self.new()
                self.silent[begin] += [self._begin(node.part, at), end]
                at = begin
        for _ in range(node.least):
            at = self._begin(node.part, at)
        if at != start:
            self.silent[start].append(at)

    def _graph(self, start: int, node: Graph, end: int) -> None:
        states = [self.new() for _ in node.arrows]
        self.silent[start].append(states[0])
        for state, arrows in zip(states, node.arrows, strict=True):
            self.bytes_[state] += [(low, high, states[to]) for low, high, to in arrows]
        for accepting in node.accepts:
            self.silent[states[accepting]].append(end)

    def _chars(self, start: int, ranges: Ranges, end: int) -> None:
        spelled = _spelled(ranges)
        states = [start, *(self.new() for _ in spelled[1:]), end]
        for state, arrows in zip(states, spelled, strict=False):
            self.bytes_[state] += [(low, high, states[to]) for low, high, to in arrows]


def fits(node: Node, most: int, clock: Clock) -> bool:
    """Whether a pattern has no more parts than this: looked at before more work is spent on it."""
    parts = Parts(clock, most)
    try:
        parts.add(node, parts.new())
    except TooLargeError:
        return False
    return True


@lru_cache(maxsize=4096)
def _spelled(ranges: Ranges) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Arrows that spell one character out of `ranges`: from state 0 to state -1. Endings are shared."""
    arrows: list[dict[tuple[int, int, int], None]] = [{}]
    ends: dict[tuple[tuple[int, int], ...], int] = {(): -1}
    for low, high in ranges:
        for sequence in utf8_ranges(low, high):
            at = 0
            for number, (a, b) in enumerate(sequence):
                rest = sequence[number + 1 :]
                if rest not in ends:
                    ends[rest] = len(arrows)
                    arrows.append({})
                arrows[at][a, b, ends[rest]] = None
                at = ends[rest]
    return tuple(tuple(some) for some in arrows)


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
