"""Random texts of a DFA's language."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from dgemma.structured_output.dfa import DFA

_FAR = 1 << 30


class Sampler:
    """Random walks through a DFA; from some length on it takes the shortest path to an accepting state."""

    def __init__(self, dfa: DFA, seed: int = 0) -> None:
        self.dfa = dfa
        self._draw = random.Random(seed)
        self._left = _to_the_end(dfa)
        self._bytes: dict[int, list[int]] = {}
        for byte, symbol in enumerate(dfa.symbol_of_byte.tolist()):
            if symbol >= 0:
                self._bytes.setdefault(symbol, []).append(byte)
        self._tokens = {symbol: token for token, symbol in dfa.symbol_of_token.items()}

    def walk(self, length: int) -> list[int]:
        """Bytes, and special tokens as negative numbers: -1 - id."""
        state, found = 0, []
        transitions, accepts = self.dfa.transitions, self.dfa.accepts
        while True:
            may_stop = bool(accepts[state])
            targets = transitions[state]
            symbols = np.flatnonzero(targets >= 0).tolist()
            if may_stop and (not symbols or len(found) > length or self._draw.random() < 0.2):
                return found
            if len(found) > length:
                nearest = min(self._left[targets[symbol]] for symbol in symbols)
                symbols = [symbol for symbol in symbols if self._left[targets[symbol]] == nearest]
            symbol = self._draw.choice(symbols)
            state = int(targets[symbol])
            if symbol in self._tokens:
                found.append(-1 - self._tokens[symbol])
            else:
                found.append(self._draw.choice(self._bytes[symbol]))

    def texts(self, count: int, length: int = 120) -> Iterator[str]:
        for number in range(count):
            yield bytes(self.walk(number * length // count)).decode("utf-8")


def _to_the_end(dfa: DFA) -> list[int]:
    """The fewest symbols from each state to an accepting one."""
    left = np.where(dfa.accepts, 0, _FAR)
    while True:
        reached = np.where(dfa.transitions >= 0, np.append(left, _FAR)[dfa.transitions], _FAR)
        shorter = np.minimum(left, reached.min(1, initial=_FAR) + 1)
        if np.array_equal(shorter, left):
            return [int(x) for x in left]
        left = shorter
