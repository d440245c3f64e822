"""Random texts of a machine's language: steps among letters that can still end in time."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from dgemma.constraint.automaton import Automaton

_FAR = 1 << 30


class Sampler:
    """Walks a machine at random; from some length on it takes the shortest way out."""

    def __init__(self, machine: Automaton, seed: int = 0) -> None:
        self.machine = machine
        self._draw = random.Random(seed)
        self._left = _to_the_end(machine)
        self._bytes: dict[int, list[int]] = {}
        for byte, letter in enumerate(machine.letter_of_byte.tolist()):
            if letter >= 0:
                self._bytes.setdefault(letter, []).append(byte)
        self._tokens = {letter: token for token, letter in machine.letter_of_token.items()}

    def walk(self, length: int) -> list[int]:
        """Bytes, and special tokens as negative numbers: -1 - id."""
        state, found = 0, []
        table, accepts = self.machine.table, self.machine.accepts
        while True:
            may_stop = bool(accepts[state])
            targets = table[state]
            letters = np.flatnonzero(targets >= 0).tolist()
            if may_stop and (not letters or len(found) > length or self._draw.random() < 0.2):
                return found
            if len(found) > length:
                nearest = min(self._left[targets[letter]] for letter in letters)
                letters = [letter for letter in letters if self._left[targets[letter]] == nearest]
            letter = self._draw.choice(letters)
            state = int(targets[letter])
            if letter in self._tokens:
                found.append(-1 - self._tokens[letter])
            else:
                found.append(self._draw.choice(self._bytes[letter]))

    def texts(self, count: int, length: int = 120) -> Iterator[str]:
        for number in range(count):
            yield bytes(self.walk(number * length // count)).decode("utf-8")


def _to_the_end(machine: Automaton) -> list[int]:
    """The fewest letters from each state to one that accepts."""
    left = np.where(machine.accepts, 0, _FAR)
    while True:
        reached = np.where(machine.table >= 0, np.append(left, _FAR)[machine.table], _FAR)
        shorter = np.minimum(left, reached.min(1, initial=_FAR) + 1)
        if np.array_equal(shorter, left):
            return [int(x) for x in left]
        left = shorter
