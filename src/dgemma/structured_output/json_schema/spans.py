"""`x-spanOf`: strings that are runs of words of a given text, and numbers that it says, as DFAs.

The language of strings is finite, and a subset construction from all word starts at once gives at most about
two states per byte of the text: they are the states of its suffix automaton.

Messages differ while their schema stays the same. So the schema is compiled once, with a special token in the
place of each such value, and the DFAs of the texts are spliced in (`splice`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from dgemma.structured_output.budget import TimeBudget
from dgemma.structured_output.dfa import DFA, MAX_STATES
from dgemma.structured_output.json_schema.keywords import SPAN_OF
from dgemma.structured_output.json_schema.numbers import FLOAT_DIGITS, NumberBounds
from dgemma.structured_output.json_schema.source import MAX_DEPTH
from dgemma.structured_output.json_schema.syntax import JsonSyntax, ValueSyntax
from dgemma.structured_output.regex import Alternation, DFANode, Node, SpecialToken, literal

_WORD = re.compile(r"[^\W_]+")
_BETWEEN_SPACES = re.compile(r"\S+")
_PLURAL = re.compile(r"(?<=...)e?s$")  # "bus" is not the plural of "bu"
_NUMERAL = re.compile(r"(?:(?<![^\W_])-)?[0-9]+(?:[.,][0-9]+)*")
_SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_NUMBER_WORDS = {
    **{word: number for number, word in enumerate(_SMALL)},
    "dozen": 12,
    **{word: 10 * tens for tens, word in enumerate(_TENS, 2)},
    **{f"{word}-{_SMALL[n]}": 10 * tens + n for tens, word in enumerate(_TENS, 2) for n in range(1, 10)},
}
_WORD_WITH_HYPHENS = re.compile(r"[a-z]+(?:-[a-z]+)*")


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


@dataclass(frozen=True)
class NumberRange:
    """Which of the numbers of a text a schema takes."""

    bounds: NumberBounds
    only_integers: bool

    def holds(self, value: int | float) -> bool:
        return self.bounds.hold(value) and not (self.only_integers and isinstance(value, float))


def number_span_grammar(text: str, taken: NumberRange) -> Node | None:
    """The numbers that `text` says, as JSON writes them; None if the range has none of them."""
    found = sorted(written for written, value in numbers_said(text).items() if taken.holds(value))
    return Alternation(tuple(map(literal, found))) if found else None


def numbers_said(text: str) -> dict[str, int | float]:
    """Numbers in digits, with point or comma, and in English words up to ninety-nine, as JSON writes them.

    1 is always there, because a single thing is often said without a number.
    """
    found: dict[str, int | float] = {"1": 1}
    for word in _WORD_WITH_HYPHENS.findall(text.lower()):
        for part in (word, *word.split("-")):
            if part in _NUMBER_WORDS:
                found[str(_NUMBER_WORDS[part])] = _NUMBER_WORDS[part]
    for numeral in _NUMERAL.findall(text):
        sign, parts = "-" * numeral.startswith("-"), re.split("[.,]", numeral.lstrip("-"))
        readings = {*parts, sign + parts[0]}
        if len(parts) > 1:
            whole, places = "".join(parts[:-1]), parts[-1]
            readings |= {f"{sign}{whole}.{places}", f"{sign}{whole}.{places.rstrip('0')}".rstrip(".")}
            if all(len(part) == 3 for part in parts[1:]):
                readings.add(sign + whole + places)  # thousands
        for reading in readings:
            whole, point, places = reading.lstrip("-").partition(".")
            written = f"{'-' * reading.startswith('-')}{whole.lstrip('0') or '0'}{point}{places}"
            is_short = len(whole) + len(places) <= FLOAT_DIGITS
            if is_short and (written == "0" or float(written) != 0):  # no "-0", which bounds do not write
                found[written] = float(written) if point else int(written)
    return found


class SpliceError(Exception):
    """The schema has to be compiled with its texts: something else stands where a span may begin or end."""


SpanRequest = tuple[int, NumberRange | None]
"""The number of a text, and which of its numbers are meant; None: runs of its words."""


@dataclass(frozen=True)
class SpanTokens(JsonSyntax):
    """JSON in which special tokens stand for what is asked of texts; `x-spanOf` has the text's number."""

    token_of: dict[SpanRequest, int] = field(default_factory=dict)

    def span(self, text: str, numbers: NumberRange | None = None) -> SpecialToken:
        request = (int(text), numbers)
        return SpecialToken(self.token_of.setdefault(request, -1 - len(self.token_of)))


def without_texts(schema: Any) -> tuple[Any, list[str]]:
    """A schema with numbers in place of the texts of `x-spanOf`, and the texts."""
    texts: dict[str, int] = {}

    def replaced(part: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:  # refused where the schema is read
            raise SpliceError
        if isinstance(part, list):
            return [replaced(item, depth + 1) for item in part]
        if not isinstance(part, dict):
            return part
        found = {key: replaced(value, depth + 1) for key, value in part.items()}
        # A listed value is written as it is. (A property of this name is rare: it is compiled as a whole.)
        if any(found[key] != part[key] for key in ("const", "enum") if key in part):
            raise SpliceError
        if isinstance(text := part.get(SPAN_OF), str):
            found[SPAN_OF] = str(texts.setdefault(text, len(texts)))
        elif SPAN_OF in part:
            raise SpliceError
        return found

    return replaced(schema, 0), list(texts)


def splice(dfa: DFA, spans: Mapping[int, DFA]) -> DFA:
    """The DFA with a language in place of each of these special tokens."""
    bytes_used = np.flatnonzero(
        np.any([dfa.symbol_of_byte >= 0, *(span.symbol_of_byte >= 0 for span in spans.values())], axis=0)
    )
    tokens = [token for token in dfa.symbol_of_token if token not in spans]
    columns = np.append(dfa.symbol_of_byte[bytes_used], [dfa.symbol_of_token[token] for token in tokens])
    none = np.full((dfa.num_states, 1), -1, np.int32)
    # The last column is that of symbol -1: bytes that only the spans have.
    rows = np.append(dfa.transitions, none, axis=1)[:, columns.astype(np.int64)]
    blocks, accepts = [rows], [dfa.accepts]
    num_states = dfa.num_states
    for token, span in spans.items():
        if token not in dfa.symbol_of_token:
            continue
        empty = np.full((span.num_states, 1), -1, np.int32)
        symbols = np.append(span.symbol_of_byte[bytes_used], np.full(len(tokens), -1))
        own = np.append(span.transitions, empty, axis=1)[:, symbols]
        targets = dfa.transitions[:, dfa.symbol_of_token[token]]
        for source in np.flatnonzero(targets >= 0):
            after = rows[targets[source]]
            # State 0 of the span is the source; its other states are new.
            block = np.where(own >= 0, own + (num_states - 1), -1)
            ends = np.flatnonzero(span.accepts)
            is_mixed = (rows[source] >= 0) & (block[0] >= 0)
            if span.accepts[0] or is_mixed.any() or ((block[ends] >= 0) & (after >= 0)).any():
                raise SpliceError
            block[ends] = np.where(block[ends] >= 0, block[ends], after)
            rows[source] = np.where(block[0] >= 0, block[0], rows[source])
            blocks.append(block[1:])
            accepts.append(span.accepts[1:] & dfa.accepts[targets[source]])
            num_states += span.num_states - 1
            if num_states > MAX_STATES:
                raise SpliceError
    symbol_of_byte = np.full(256, -1, np.int32)
    symbol_of_byte[bytes_used] = np.arange(len(bytes_used))
    return DFA(
        np.concatenate(blocks).astype(np.int32),
        np.concatenate(accepts),
        symbol_of_byte,
        {token: len(bytes_used) + at for at, token in enumerate(tokens)},
    )
