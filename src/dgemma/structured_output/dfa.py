"""Deterministic finite automata (DFA) on bytes and special tokens: minimal, bounded in time and memory.

`build_dfa`: NFA by Thompson's construction (`nfa.py`), DFA by subset construction, dead states removed, then
Moore's minimization by partition refinement. `intersection` and `difference`: product construction.

The symbols of the alphabet are byte classes (bytes on which the NFA has the same transitions) and one symbol
for each special token.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from dgemma.errors import InputError
from dgemma.structured_output.budget import TimeBudget
from dgemma.structured_output.nfa import NFA
from dgemma.structured_output.regex import DFANode, Node

MAX_STATES = 60_000
_MAX_CLOSURE_WORK = 8_000_000  # NFA states visited by the subset construction
_SMALL_SET = 4
_WORK_BETWEEN_CHECKS = 50_000
_MAX_MINIMIZE_WORK = 15_000_000  # transitions visited by the minimization

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class DFA:
    """State 0 is the start state. Every state can reach an accepting one."""

    transitions: Ints  # [states, symbols]: the next state, -1 for none
    accepts: Bools  # [states]
    symbol_of_byte: Ints  # [256]; -1: a byte in no text of the language
    symbol_of_token: dict[int, int]  # special tokens

    @property
    def num_states(self) -> int:
        return len(self.accepts)

    def run(self, data: bytes, state: int = 0) -> int:
        """The state after `data`, -1 for none. The reference implementation of all vectorized code."""
        for byte in data:
            symbol = int(self.symbol_of_byte[byte])
            if state < 0 or symbol < 0:
                return -1
            state = int(self.transitions[state, symbol])
        return state

    def matches(self, text: str) -> bool:
        state = self.run(text.encode("utf-8"))
        return state >= 0 and bool(self.accepts[state])


def build_dfa(node: Node, budget: TimeBudget | None = None) -> DFA:
    """The minimal DFA of a regular expression tree."""
    budget = budget or TimeBudget()
    nfa = NFA(budget)
    end = nfa.new()
    start = nfa.add(node, end)
    symbol_of_byte, symbol_of_token = _alphabet(nfa)
    transitions, accepts = _determinize(nfa, start, end, symbol_of_byte, symbol_of_token, budget)
    transitions, accepts = _minimize(*_without_dead_states(transitions, accepts), budget)
    return DFA(transitions, accepts, symbol_of_byte, symbol_of_token)


def _alphabet(nfa: NFA) -> tuple[Ints, dict[int, int]]:
    """Bytes that all transitions treat alike share a symbol; each special token has its own."""
    ranges = {(low, high) for transitions in nfa.byte_transitions for low, high, _ in transitions}
    edges = sorted({edge for low, high in ranges for edge in (low, high + 1)})
    used = np.zeros(256, np.bool_)
    for low, high in ranges:
        used[low : high + 1] = True
    interval = np.searchsorted(np.array(edges or [0]), np.arange(256), side="right")
    symbol_of_byte = np.full(256, -1, np.int32)
    symbols: dict[int, int] = {}
    for byte in range(256):
        if used[byte]:
            symbol_of_byte[byte] = symbols.setdefault(int(interval[byte]), len(symbols))
    tokens = sorted({token for transitions in nfa.token_transitions for token, _ in transitions})
    return symbol_of_byte, {token: len(symbols) + at for at, token in enumerate(tokens)}


def _determinize(
    nfa: NFA,
    start: int,
    end: int,
    symbol_of_byte: Ints,
    symbol_of_token: dict[int, int],
    budget: TimeBudget,
) -> tuple[Ints, Bools]:
    """Subset construction: a DFA state is the epsilon closure of a set of NFA states."""
    num_symbols = int(symbol_of_byte.max(initial=-1)) + 1 + len(symbol_of_token)
    symbols_of: dict[tuple[int, int], list[int]] = {}  # of a byte range
    nfa_transitions: dict[int, list[tuple[int, int]]] = {}  # of an NFA state: symbol, to

    def transitions_of(source: int) -> list[tuple[int, int]]:
        if source not in nfa_transitions:
            found = []
            for low, high, to in nfa.byte_transitions[source]:
                if (low, high) not in symbols_of:
                    symbols_of[low, high] = sorted({int(x) for x in symbol_of_byte[low : high + 1]})
                found += [(symbol, to) for symbol in symbols_of[low, high]]
            found += [(symbol_of_token[token], to) for token, to in nfa.token_transitions[source]]
            nfa_transitions[source] = found
        return nfa_transitions[source]

    work = 0
    checked = 0

    def closure(sources: Iterable[int]) -> bytes:
        """The NFA states of a DFA state as sorted int32 numbers: a tenth of the memory of a set."""
        nonlocal work, checked
        seen = set(sources)
        queue = list(seen)
        while queue:
            for to in nfa.epsilon[queue.pop()]:
                if to not in seen:
                    seen.add(to)
                    queue.append(to)
        work += len(seen)
        if work > checked + _WORK_BETWEEN_CHECKS:
            checked = work
            budget.check()
        if work > _MAX_CLOSURE_WORK:
            raise InputError(
                "the constraint is too ambiguous to compile: simplify its choices and repetitions."
            )
        # Only states with transitions, and the end state, distinguish sets.
        kept = [
            state
            for state in seen
            if state == end or nfa.byte_transitions[state] or nfa.token_transitions[state]
        ]
        return array("i", sorted(kept)).tobytes()

    first = closure([start])
    numbers = {first: 0}
    states = [first]
    rows: list[list[int]] = []
    small: dict[frozenset[int], int] = {}  # closures of small sets, which recur in many states
    for state in states:
        if len(rows) % 256 == 0:
            budget.check()
        targets: dict[int, set[int]] = {}
        for source in memoryview(state).cast("i"):
            for symbol, to in transitions_of(source):
                targets.setdefault(symbol, set()).add(to)
        row = [-1] * num_symbols
        large: dict[frozenset[int], int] = {}
        for symbol, some in targets.items():
            key = frozenset(some)
            known = small if len(key) <= _SMALL_SET else large
            if key not in known:
                reached = closure(some)
                if reached not in numbers:
                    if len(numbers) >= MAX_STATES:
                        raise _too_many_states()
                    numbers[reached] = len(states)
                    states.append(reached)
                known[key] = numbers[reached]
            row[symbol] = known[key]
        rows.append(row)
    transitions = np.array(rows, np.int32).reshape(len(states), num_symbols)
    return transitions, np.array([end in memoryview(state).cast("i") for state in states])


def _too_many_states() -> InputError:
    return InputError(f"the constraint needs more than {MAX_STATES} states; simplify it.")


def _without_dead_states(transitions: Ints, accepts: Bools) -> tuple[Ints, Bools]:
    """Only states from which an accepting state can be reached."""
    sources, symbols = np.nonzero(transitions >= 0)
    targets = transitions[sources, symbols]
    order = np.argsort(targets, kind="stable")
    sources, targets = sources[order], targets[order]
    bounds = np.searchsorted(targets, np.arange(len(transitions) + 1))
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
    number = np.full(len(transitions) + 1, -1, np.int32)
    number[:-1][alive] = np.arange(int(alive.sum()), dtype=np.int32)
    return number[transitions[alive]], accepts[alive]


def longest_text(transitions: Ints) -> Ints:
    """One more than the length of the longest text from each state; 0 where lengths are unbounded.

    No state is dead, so a longest path ends in an accepting state. States are removed in reverse topological
    order; the states that remain lead into a cycle.
    """
    sources, symbols = np.nonzero(transitions >= 0)
    edges = np.unique(transitions[sources, symbols].astype(np.int64) * len(transitions) + sources)
    targets, sources = np.divmod(edges, len(transitions))
    bounds = np.searchsorted(targets, np.arange(len(transitions) + 1)).tolist()
    predecessors = sources.tolist()
    num_left = np.bincount(sources, minlength=len(transitions)).tolist()
    length = [0] * len(transitions)
    queue = [state for state, count in enumerate(num_left) if count == 0]
    done = []
    while queue:
        state = queue.pop()
        done.append(state)
        for source in predecessors[bounds[state] : bounds[state + 1]]:
            length[source] = max(length[source], length[state] + 1)
            num_left[source] -= 1
            if num_left[source] == 0:
                queue.append(source)
    found: Ints = np.zeros(len(transitions), np.int32)
    found[done] = np.array(length, np.int32)[done] + 1
    return found


def _minimize(transitions: Ints, accepts: Bools, budget: TimeBudget) -> tuple[Ints, Bools]:
    """Moore's minimization: refine a partition of the states until no block splits.

    The first partition is by acceptance and by the longest text, which any two equivalent states share: a
    chain such as `.{0,2000}` would otherwise split one state per round. If the work limit is reached first,
    the DFA is returned as it is, which accepts the same language.
    """
    sources, symbols = np.nonzero(transitions >= 0)
    targets = transitions[sources, symbols]
    bounds = np.searchsorted(sources, np.arange(len(transitions) + 1))
    factors = np.random.default_rng(0).integers(1, 1 << 62, transitions.shape[1] + 1, dtype=np.uint64)
    factor = (factors | np.uint64(1))[symbols]
    block = longest_text(transitions).astype(np.uint64) * np.uint64(2) + accepts.astype(np.uint64)
    count = 0
    for _ in range(_MAX_MINIMIZE_WORK // max(1, len(targets)) + 2):
        budget.check()
        # The signature of a state is a hash of (symbol, block of the target) over its transitions: a sum
        # modulo 2**64, as a difference of prefix sums, which wrap around too.
        sums = np.append(np.uint64(0), np.cumsum((block[targets] + np.uint64(1)) * factor, dtype=np.uint64))
        signature = sums[bounds[1:]] - sums[bounds[:-1]] + block * factors[-1]
        _, first, inverse = np.unique(signature, return_index=True, return_inverse=True)
        block = inverse.astype(np.uint64)
        if len(first) == count:
            break
        count = len(first)
    else:
        return transitions, accepts
    # Blocks are numbered by their first state, so that the start state stays state 0.
    order = np.argsort(first, kind="stable")
    rank = np.empty(count, np.int32)
    rank[order] = np.arange(count, dtype=np.int32)
    of_state = rank[inverse]
    merged = np.append(of_state, np.int32(-1))[transitions]  # the last entry is for -1
    chosen = first[order]
    # Signatures are hashes: keep the DFA as it is if two different states collided.
    if not np.array_equal(merged, merged[chosen][of_state]) or not np.array_equal(
        accepts, accepts[chosen][of_state]
    ):
        return transitions, accepts
    return merged[chosen].astype(np.int32), accepts[chosen]


def intersection(first: Node, second: Node, budget: TimeBudget) -> DFANode | None:
    """The texts of both; None if there are none. Neither may hold special tokens."""
    return _product(build_dfa(first, budget), build_dfa(second, budget), budget, in_second=True)


def difference(first: Node, second: Node, budget: TimeBudget) -> DFANode | None:
    """The texts of `first` that are no texts of `second`; None if there are none."""
    return _product(build_dfa(first, budget), build_dfa(second, budget), budget, in_second=False)


def _product(a: DFA, b: DFA, budget: TimeBudget, *, in_second: bool) -> DFANode | None:
    """Product construction: states are pairs; -1 is the dead state of `b`."""
    assert not a.symbol_of_token
    assert not b.symbol_of_token
    pairs = list(zip(a.symbol_of_byte.tolist(), b.symbol_of_byte.tolist(), strict=True))
    bytes_of: dict[tuple[int, int], list[int]] = {}
    for byte, pair in enumerate(pairs):
        if pair[0] >= 0:
            bytes_of.setdefault(pair, []).append(byte)
    ranges = {pair: _byte_ranges(some) for pair, some in bytes_of.items()}
    # Rows as lists, with a last one for the dead state of `b`.
    rows_a = a.transitions.tolist()
    rows_b = [*b.transitions.tolist(), [-1] * b.transitions.shape[1]]
    accepts_b = [*b.accepts.tolist(), False]
    states = [(0, 0)]
    numbers = {(0, 0): 0}
    transitions: list[list[tuple[int, int, int]]] = []
    for at_a, at_b in states:
        if len(transitions) % 1024 == 0:
            budget.check()
        row: list[tuple[int, int, int]] = []
        for (symbol_a, symbol_b), some in ranges.items():
            to_a = rows_a[at_a][symbol_a]
            to_b = rows_b[at_b][symbol_b] if symbol_b >= 0 else -1
            if to_a < 0 or (in_second and to_b < 0):
                continue
            if (to_a, to_b) not in numbers:
                if len(states) >= MAX_STATES:
                    raise _too_many_states()
                numbers[to_a, to_b] = len(states)
                states.append((to_a, to_b))
            row += [(low, high, numbers[to_a, to_b]) for low, high in some]
        transitions.append(row)
    accepts = frozenset(
        number
        for number, (at_a, at_b) in enumerate(states)
        if a.accepts[at_a] and accepts_b[at_b] == in_second
    )
    return DFANode(tuple(map(tuple, transitions)), accepts) if accepts else None


def _byte_ranges(numbers: list[int]) -> list[tuple[int, int]]:
    """Ascending numbers as ranges."""
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    return [(run[0], run[-1]) for run in runs]
