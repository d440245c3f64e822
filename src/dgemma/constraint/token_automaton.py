"""What each word of a vocabulary does to a language's states: classes of words that act alike.

A word is a map from states to states. Words are followed through the trie all at once; the map of a node is
that of its parent followed by one letter, and maps are kept once each. An ordinary vocabulary has few
different ones, however many words and states there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dgemma.constraint.automaton import Automaton, Clock
from dgemma.constraint.word_trie import WordTrie
from dgemma.errors import InputError

Ints = NDArray[np.int32]

FORBIDDEN = 0  # the class of words that no state takes
_MAX_NUMBERS = 120_000_000  # of all maps together: 480 MB
_FAR = np.int32(1 << 30)


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """Begins in state 0. Class 0 holds the words that never fit."""

    class_of_word: Ints  # [vocabulary]
    maps: Ints  # [classes, states]: the next state, -1 for none
    accepts: NDArray[np.bool_]  # [states]
    distance: Ints  # [states]: the fewest words to a state that accepts

    @property
    def num_states(self) -> int:
        return len(self.accepts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.class_of_word, self.maps, self.accepts, self.distance))

    @property
    def num_classes(self) -> int:
        return len(self.maps)

    def run(self, tokens: list[int], state: int = 0) -> int:
        """The state behind some words, -1 for none."""
        for token in tokens:
            if state < 0:
                return -1
            state = int(self.maps[self.class_of_word[token], state])
        return state


def meet(automaton: Automaton, trie: WordTrie, clock: Clock) -> TokenAutomaton:
    """The same language, read in words of a vocabulary."""
    maps = _Maps(automaton, clock)
    class_of_word: Ints = np.zeros(trie.size, np.int32)
    above = np.array([maps.add(np.arange(automaton.num_states, dtype=np.int32))], np.int32)
    for level in trie.levels:
        letters = automaton.letter_of_byte[level.byte]
        above = maps.step(above[level.parent], letters)
        class_of_word[level.words] = above[level.ends]
    for token, letter in automaton.letter_of_token.items():
        if token < trie.size:
            class_of_word[token] = maps.add(automaton.table[:, letter])
    used, inverse = np.unique(np.append(class_of_word, FORBIDDEN), return_inverse=True)
    table = np.stack([maps.rows[number] for number in used])
    return TokenAutomaton(
        inverse[:-1].astype(np.int32), table, automaton.accepts, _distances(table, automaton.accepts)
    )


class _Maps:
    """Maps of states, each kept once; number 0 is the one that leads nowhere."""

    def __init__(self, automaton: Automaton, clock: Clock) -> None:
        self.table = automaton.table
        self.clock = clock
        self.rows: list[Ints] = []
        self._numbers: dict[bytes, int] = {}
        self._followed: dict[int, int] = {}  # map and letter -> map
        self.add(np.full(automaton.num_states, -1, np.int32))

    def add(self, row: Ints) -> int:
        key = row.tobytes()
        if key not in self._numbers:
            if (len(self.rows) + 1) * len(row) > _MAX_NUMBERS:
                raise InputError("the constraint tells too many words of the vocabulary apart; simplify it.")
            self._numbers[key] = len(self.rows)
            self.rows.append(row)
        return self._numbers[key]

    def step(self, numbers: Ints, letters: Ints) -> Ints:
        """Each map followed by a letter."""
        self.clock.check()
        width = self.table.shape[1]
        dead = (letters < 0) | (numbers == 0)
        keys = np.where(dead, -1, numbers.astype(np.int64) * max(1, width) + letters)
        distinct, inverse = np.unique(keys, return_inverse=True)
        found = np.zeros(len(distinct), np.int32)
        for at, key in enumerate(distinct.tolist()):
            if key < 0:
                continue
            if key not in self._followed:
                number, letter = divmod(key, width)
                row = self.rows[number]
                next_row = np.where(row >= 0, self.table[row, letter], np.int32(-1))
                self._followed[key] = self.add(next_row)
                if len(self._followed) % 256 == 0:
                    self.clock.check()
            found[at] = self._followed[key]
        return found[inverse]


def _distances(maps: Ints, accepts: NDArray[np.bool_]) -> Ints:
    """The fewest words from each state to one that accepts; far where there is no way."""
    classes, sources = np.nonzero(maps >= 0)
    targets = maps[classes, sources]
    order = np.argsort(targets, kind="stable")
    sources, bounds = sources[order], np.searchsorted(targets[order], np.arange(len(accepts) + 1))
    distance = np.where(accepts, np.int32(0), _FAR)
    reached, words = np.flatnonzero(accepts).tolist(), 0
    while reached:
        words += 1
        before = np.unique(np.concatenate([sources[bounds[at] : bounds[at + 1]] for at in reached]))
        reached = before[distance[before] == _FAR].tolist()
        distance[reached] = words
    return distance.astype(np.int32)
