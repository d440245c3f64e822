"""The machine of a pattern: minimal where that is quick, bounded always."""

from __future__ import annotations

import numpy as np
import pytest

from dgemma.constraint.automaton import Clock, build
from dgemma.constraint.parts import Parts, utf8_ranges
from dgemma.constraint.pattern import Control, Either, Graph, Node, Repeat, Sequence, literal, parse
from dgemma.errors import InputError


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
def test_states_that_no_text_tells_apart_are_one(pattern: str, states: int) -> None:
    assert build(parse(pattern)).num_states == states


def test_every_state_can_still_reach_the_language() -> None:
    machine = build(parse("a(b|cd)"))
    reaches = machine.accepts.copy()
    for _ in range(machine.num_states):
        targets = np.where(machine.table >= 0, reaches[machine.table], False)
        reaches |= targets.any(1)
    assert reaches.all()


def test_a_long_bounded_string_compiles() -> None:
    machine = build(parse('"[^"]{0,500}"'), Clock(60))
    assert machine.matches('"' + "é" * 500 + '"')
    assert not machine.matches('"' + "é" * 501 + '"')


def test_special_tokens_are_letters_of_their_own() -> None:
    machine = build(Sequence((literal("a"), Control(7), literal("b"))))
    state = machine.run(b"a")
    assert machine.run(b"b", state) == -1
    state = int(machine.table[state, machine.letter_of_token[7]])
    assert machine.accepts[machine.run(b"b", state)]


@pytest.mark.parametrize(
    "pattern", ["(a{0,999}){0,999}", "(a|b)*a(a|b){20}", "((a{0,30}){0,30}){0,30}", "(.{1,200}x){200}"]
)
def test_patterns_that_explode_are_refused_in_bounded_time(pattern: str) -> None:
    with pytest.raises(InputError, match=r"simplify|Simplify"):
        build(parse(pattern), Clock(1))


def test_a_node_that_stands_twice_before_the_same_end_is_built_once() -> None:
    value = parse("[a-f]{40}")
    comma = literal(",")
    alone = Parts(Clock(30))
    alone.add(value, alone.new())
    shared = Parts(Clock(30))
    shared.add(Sequence((value, Repeat(Sequence((comma, value)), 0, None))), shared.new())
    assert len(shared.silent) < len(alone.silent) + 10


def test_a_chain_of_thousands_of_nodes_is_no_recursion() -> None:
    node: Node = literal("z")
    for _ in range(5000):
        node = Either((Sequence((literal("a"), node)), literal("b")))
    assert build(node, Clock(30)).matches("a" * 4000 + "b")


def test_a_graph_stands_for_its_language() -> None:
    even = Graph((((97, 97, 1),), ((97, 97, 0),)), frozenset({0}))
    machine = build(Sequence((even, literal("b"))))
    assert [machine.matches("a" * n + "b") for n in range(4)] == [True, False, True, False]
