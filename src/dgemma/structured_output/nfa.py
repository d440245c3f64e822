"""A regular expression tree as a nondeterministic finite automaton (NFA) on UTF-8 bytes and special tokens.

Thompson's construction, from the end state backwards, with epsilon transitions. It differs in that equal
(node, end state) pairs share one start state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from dgemma.errors import InputError
from dgemma.structured_output.budget import TimeBudget
from dgemma.structured_output.regex import (
    Alternation,
    CharClass,
    Concat,
    DFANode,
    Node,
    Ranges,
    Repeat,
    SpecialToken,
)

MAX_NFA_STATES = 250_000
_MAX_INLINE = 20  # nested concatenations that need no state of their own


class GrammarTooLargeError(InputError):
    """A grammar whose NFA would exceed the state limit."""


@dataclass
class NFA:
    """Epsilon transitions, transitions on byte ranges and transitions on special tokens, by state.

    A node that occurs several times before the same end state is built once. So `p_i S_i+1 | F_i+1` has a
    number of states linear in the number of properties, and `[ v (, v)* ]` holds `v` once.
    """

    budget: TimeBudget
    max_states: int = MAX_NFA_STATES
    epsilon: list[list[int]] = field(default_factory=list)
    byte_transitions: list[list[tuple[int, int, int]]] = field(default_factory=list)  # low, high, to
    token_transitions: list[list[tuple[int, int]]] = field(default_factory=list)  # token, to
    # Keyed by identity, except character classes: comparing deep trees by value would recurse. The node is
    # stored with its state, so that its id stays valid.
    _starts: dict[tuple[int | Ranges, int], tuple[Node, int]] = field(default_factory=dict)
    _pending: list[tuple[int, Node, int]] = field(default_factory=list)

    def new(self) -> int:
        if len(self.epsilon) >= self.max_states:
            raise GrammarTooLargeError(
                "the constraint is too large: its repetitions or choices multiply. Simplify it."
            )
        if len(self.epsilon) % 4096 == 0:
            self.budget.check()
        self.epsilon.append([])
        self.byte_transitions.append([])
        self.token_transitions.append([])
        return len(self.epsilon) - 1

    def add(self, node: Node, end: int) -> int:
        """Return a state from which the texts of `node` lead to `end`. Iterative: trees may be deep."""
        start = self._begin(node, end)
        while self._pending:
            self._fill(*self._pending.pop())
        return start

    def _begin(self, node: Node, end: int, depth: int = 0) -> int:
        """The start state of `node` before `end`; its transitions are added later, from the worklist."""
        is_short = isinstance(node, CharClass) and len(node.ranges) < 4
        key = (node.ranges if isinstance(node, CharClass) and is_short else id(node), end)
        if key not in self._starts:
            # A concatenation starts where its first part does, unless nested too deeply to recurse.
            if isinstance(node, Concat) and depth < _MAX_INLINE:
                self._starts[key] = (node, self._concat(node, end, depth + 1))
            else:
                self._starts[key] = (node, self.new())
                self._pending.append((self._starts[key][1], node, end))
        return self._starts[key][1]

    def _concat(self, node: Concat, end: int, depth: int = 0) -> int:
        for part in reversed(node.parts):
            end = self._begin(part, end, depth)
        return end

    def _fill(self, start: int, node: Node, end: int) -> None:
        if isinstance(node, CharClass):
            self._chars(start, node.ranges, end)
        elif isinstance(node, SpecialToken):
            self.token_transitions[start].append((node.token, end))
        elif isinstance(node, Concat):
            self.epsilon[start].append(self._concat(node, end))
        elif isinstance(node, Alternation):
            self.epsilon[start] += [self._begin(part, end) for part in node.parts]
        elif isinstance(node, Repeat):
            self._repeat(start, node, end)
        else:
            self._dfa_node(start, node, end)

    def _repeat(self, start: int, node: Repeat, end: int) -> None:
        if node.max_count is None:
            # Without mandatory copies the start state is the loop: `v (, v)*` then has one end for both v.
            at = self.new() if node.min_count else start
            self.epsilon[at] += [self._begin(node.part, at), end]
        else:
            # Each optional copy may be the last, so it leads directly to the end.
            at = end
            for _ in range(node.max_count - node.min_count):
                begin = self.new()
                self.epsilon[begin] += [self._begin(node.part, at), end]
                at = begin
        for _ in range(node.min_count):
            at = self._begin(node.part, at)
        if at != start:
            self.epsilon[start].append(at)

    def _dfa_node(self, start: int, node: DFANode, end: int) -> None:
        states = [self.new() for _ in node.transitions]
        self.epsilon[start].append(states[0])
        for state, transitions in zip(states, node.transitions, strict=True):
            self.byte_transitions[state] += [(low, high, states[to]) for low, high, to in transitions]
        for accepting in node.accepts:
            self.epsilon[states[accepting]].append(end)

    def _chars(self, start: int, ranges: Ranges, end: int) -> None:
        steps = _utf8_transitions(ranges)
        states = [start, *(self.new() for _ in steps[1:]), end]
        for state, transitions in zip(states, steps, strict=False):
            self.byte_transitions[state] += [(low, high, states[to]) for low, high, to in transitions]


class _SizeProbe(NFA):
    """Counts a given DFA as one state."""

    def _dfa_node(self, start: int, node: DFANode, end: int) -> None:
        if not node.is_given:
            super()._dfa_node(start, node, end)


def nfa_fits(node: Node, max_states: int, budget: TimeBudget) -> bool:
    """Whether the NFA of a grammar has at most `max_states` states; cheaper than building its DFA."""
    nfa = _SizeProbe(budget, max_states)
    try:
        nfa.add(node, nfa.new())
    except GrammarTooLargeError:
        return False
    return True


@lru_cache(maxsize=256)
def _utf8_transitions(ranges: Ranges) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Byte transitions of one character of `ranges`, from state 0 to state -1, with shared suffixes."""
    transitions: list[dict[tuple[int, int, int], None]] = [{}]
    ends: dict[tuple[tuple[int, int], ...], int] = {(): -1}
    for low, high in ranges:
        for sequence in utf8_ranges(low, high):
            at = 0
            for number, (a, b) in enumerate(sequence):
                rest = sequence[number + 1 :]
                if rest not in ends:
                    ends[rest] = len(transitions)
                    transitions.append({})
                transitions[at][a, b, ends[rest]] = None
                at = ends[rest]
    return tuple(tuple(some) for some in transitions)


def utf8_ranges(low: int, high: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Sequences of byte ranges that encode exactly the code points from `low` to `high`."""
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
