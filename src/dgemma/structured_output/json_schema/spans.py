"""`x-spanOf`: strings that are runs of words of a given text, as a DFA.

The language is finite, and a subset construction from all word starts at once gives at most about two states
per byte of the text: they are the states of its suffix automaton.
"""

from __future__ import annotations

import re
from itertools import accumulate

from dgemma.structured_output.budget import TimeBudget
from dgemma.structured_output.json_schema.syntax import ValueSyntax
from dgemma.structured_output.regex import DFANode

_WORD = re.compile(r"[^\W_]+")
_BETWEEN_SPACES = re.compile(r"\S+")
_PLURAL = re.compile(r"(?<=...)e?s$")  # "bus" is not the plural of "bu"


def span_grammar(text: str, syntax: ValueSyntax, budget: TimeBudget) -> DFANode | None:
    """Runs of words as they stand in `text`, as written between quotes; None if it has no words.

    A run begins where a word begins and ends where a word ends. Its first letter may be lower case instead,
    because sentences begin with a capital, and its last word may lose a plural's ending.
    """
    starts, ends = _bounds(text)
    if not starts:
        return None
    written = [syntax.written(char).encode() for char in text]
    place_of = [0, *accumulate(map(len, written))]  # of each character, in bytes
    # The bytes of the text one after the other, then those of the lower-case first letters, each of which
    # leads to the place after its letter.
    byte_at = [*b"".join(written), -1]
    next_place = [*range(1, len(byte_at)), -1]
    first = {place_of[start] for start in starts}
    for start in starts:
        if (lower := text[start].lower()) != text[start]:
            first.add(len(byte_at))
            byte_at += syntax.written(lower).encode()
            next_place += [*range(len(next_place) + 1, len(byte_at)), place_of[start + 1]]
    accepting = {place_of[end] for end in ends}
    states = [frozenset(first)]  # the places that a string may have reached
    numbers = {states[0]: 0}
    transitions: list[tuple[tuple[int, int, int], ...]] = []
    for state in states:
        budget.check()
        reached: dict[int, set[int]] = {}
        for place in state:
            if byte_at[place] >= 0:
                reached.setdefault(byte_at[place], set()).add(next_place[place])
        row = []
        for byte, places in sorted(reached.items()):
            to = frozenset(places)
            if to not in numbers:
                numbers[to] = len(states)
                states.append(to)
            row.append((byte, byte, numbers[to]))
        transitions.append(tuple(row))
    accepts = frozenset(number for number, state in enumerate(states) if accepting & state)
    return DFANode(tuple(transitions), accepts, is_given=True)


def _bounds(text: str) -> tuple[set[int], set[int]]:
    """Where words begin and end: runs of letters and digits, and what stands between spaces."""
    starts, ends = set(), set()
    for pattern in (_WORD, _BETWEEN_SPACES):
        for word in pattern.finditer(text):
            starts.add(word.start())
            ends.add(word.end())
    for word in _WORD.finditer(text):
        if plural := _PLURAL.search(word[0]):
            # Without "s", and without "es" if that is there: which it is depends on the word.
            ends |= {word.end() - length for length in range(1, len(plural[0]) + 1)}
    return starts, ends
