"""The DFA of a regular expression is minimal, and compiling it is bounded."""

from __future__ import annotations

import numpy as np
import pytest

from dgemma.errors import InputError
from dgemma.structured_output.budget import TimeBudget
from dgemma.structured_output.dfa import build_dfa
from dgemma.structured_output.nfa import NFA, utf8_ranges
from dgemma.structured_output.regex import (
    Alternation,
    Concat,
    DFANode,
    Node,
    Repeat,
    SpecialToken,
    literal,
    parse,
)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 0x10FFFF), (0x7F, 0x80), (0x7FF, 0x801), (0xE9, 0x1F600), (65, 65)]
)
def test_byte_ranges_spell_exactly_the_characters_between(low: int, high: int) -> None:
    covered = []
    for ranges in utf8_ranges(low, high):
        first, last = bytes(a for a, _ in ranges), bytes(b for _, b in ranges)
        size = 1
        for a, b in ranges:
            size *= b - a + 1
        covered.append((first, last, size))
    edges = [c for c in (low, low + 1, (low + high) // 2, high - 1, high) if low <= c <= high]
    for code in edges:
        if 0xD800 <= code <= 0xDFFF:
            continue
        spelled = chr(code).encode()
        assert sum(first <= spelled <= last and len(first) == len(spelled) for first, last, _ in covered) == 1
    assert sum(size for *_, size in covered) == high - low + 1


@pytest.mark.parametrize(
    ("pattern", "states"), [("(a|b)*abb", 4), ("(x+x+)+y", 4), ("ab|cb", 3), ("a?a?a?", 4)]
)
def test_equivalent_states_are_merged(pattern: str, states: int) -> None:
    assert build_dfa(parse(pattern)).num_states == states


def test_every_state_can_still_reach_the_language() -> None:
    dfa = build_dfa(parse("a(b|cd)"))
    reaches = dfa.accepts.copy()
    for _ in range(dfa.num_states):
        targets = np.where(dfa.transitions >= 0, reaches[dfa.transitions], False)
        reaches |= targets.any(1)
    assert reaches.all()


def test_a_long_bounded_string_compiles() -> None:
    dfa = build_dfa(parse('"[^"]{0,500}"'), TimeBudget(60))
    assert dfa.matches('"' + "é" * 500 + '"')
    assert not dfa.matches('"' + "é" * 501 + '"')


def test_special_tokens_are_symbols_of_their_own() -> None:
    dfa = build_dfa(Concat((literal("a"), SpecialToken(7), literal("b"))))
    state = dfa.run(b"a")
    assert dfa.run(b"b", state) == -1
    state = int(dfa.transitions[state, dfa.symbol_of_token[7]])
    assert dfa.accepts[dfa.run(b"b", state)]


@pytest.mark.parametrize(
    "pattern", ["(a{0,999}){0,999}", "(a|b)*a(a|b){20}", "((a{0,30}){0,30}){0,30}", "(.{1,200}x){200}"]
)
def test_patterns_that_explode_are_refused_in_bounded_time(pattern: str) -> None:
    with pytest.raises(InputError, match=r"simplify|Simplify"):
        build_dfa(parse(pattern), TimeBudget(1))


def test_a_node_before_the_same_end_state_is_built_once() -> None:
    value = parse("[a-f]{40}")
    comma = literal(",")
    alone = NFA(TimeBudget(30))
    alone.add(value, alone.new())
    shared = NFA(TimeBudget(30))
    shared.add(Concat((value, Repeat(Concat((comma, value)), 0, None))), shared.new())
    assert len(shared.epsilon) < len(alone.epsilon) + 10


def test_a_chain_of_thousands_of_nodes_is_no_recursion() -> None:
    node: Node = literal("z")
    for _ in range(5000):
        node = Alternation((Concat((literal("a"), node)), literal("b")))
    assert build_dfa(node, TimeBudget(30)).matches("a" * 4000 + "b")


def test_a_dfa_is_a_leaf_of_a_tree() -> None:
    even = DFANode((((97, 97, 1),), ((97, 97, 0),)), frozenset({0}))
    dfa = build_dfa(Concat((even, literal("b"))))
    assert [dfa.matches("a" * n + "b") for n in range(4)] == [True, False, True, False]
