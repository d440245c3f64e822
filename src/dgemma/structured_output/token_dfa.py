"""The token DFA: what each token of a vocabulary does to the states of a byte DFA.

A token acts on the states as a function, given by its bytes. Tokens with the same function form a class, so
that the table is [classes, states], not [vocabulary, states]; an ordinary vocabulary and schema have some
hundred classes. All tokens are followed at once through a trie: the function of a trie node is that of its
parent followed by one symbol, and equal functions are stored once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dgemma.errors import InputError
from dgemma.structured_output.budget import TimeBudget
from dgemma.structured_output.dfa import DFA
from dgemma.text.tokenizer import Tokenizer

Ints = NDArray[np.int32]

FORBIDDEN = 0  # the class of tokens that no state has a transition on
_MAX_ENTRIES = 40_000_000  # of the transition table: 160 MB
_UNREACHABLE = np.int32(1 << 30)


@dataclass(frozen=True, eq=False)
class TokenDFA:
    """State 0 is the start state. Class 0 holds the tokens that never fit."""

    class_of_token: Ints  # [vocabulary]
    transitions: Ints  # [classes, states]: the next state, -1 for none
    accepts: NDArray[np.bool_]  # [states]
    distance: Ints  # [states]: the fewest tokens to an accepting state

    @property
    def num_states(self) -> int:
        return len(self.accepts)

    @property
    def nbytes(self) -> int:
        arrays = (self.class_of_token, self.transitions, self.accepts, self.distance)
        return sum(array.nbytes for array in arrays)

    @property
    def num_classes(self) -> int:
        return len(self.transitions)

    def run(self, tokens: list[int], state: int = 0) -> int:
        """The state after some tokens, -1 for none."""
        for token in tokens:
            if state < 0:
                return -1
            state = int(self.transitions[self.class_of_token[token], state])
        return state


def build_token_dfa(dfa: DFA, trie: TokenTrie, budget: TimeBudget) -> TokenDFA:
    """The language of a byte DFA, read in tokens of a vocabulary."""
    functions = _StateFunctions(dfa, budget)
    class_of_token: Ints = np.zeros(trie.size, np.int32)
    above = np.array([functions.add(np.arange(dfa.num_states, dtype=np.int32))], np.int32)
    for level in trie.levels:
        above = functions.then(above[level.parent], dfa.symbol_of_byte[level.byte])
        class_of_token[level.tokens] = above[level.ends]
    for token, symbol in dfa.symbol_of_token.items():
        if token < trie.size:
            class_of_token[token] = functions.add(dfa.transitions[:, symbol])
    used, inverse = np.unique(np.append(class_of_token, FORBIDDEN), return_inverse=True)
    transitions = np.stack([functions.rows[number] for number in used])
    distance = _distances(transitions, dfa.accepts)
    return TokenDFA(inverse[:-1].astype(np.int32), transitions, dfa.accepts, distance)


class _StateFunctions:
    """Functions from states to states, each stored once; number 0 maps every state to -1."""

    def __init__(self, dfa: DFA, budget: TimeBudget) -> None:
        self.rows: list[Ints] = []
        self._transitions = dfa.transitions
        self._budget = budget
        self._numbers: dict[bytes, int] = {}
        self._compositions: dict[int, int] = {}  # function and symbol -> function
        self.add(np.full(dfa.num_states, -1, np.int32))

    def add(self, row: Ints) -> int:
        key = hashlib.blake2b(row.tobytes(), digest_size=16).digest()
        if key not in self._numbers:
            if (len(self.rows) + 1) * len(row) > _MAX_ENTRIES:
                raise InputError("the constraint has too many classes of tokens; simplify it.")
            self._numbers[key] = len(self.rows)
            self.rows.append(row)
        return self._numbers[key]

    def then(self, numbers: Ints, symbols: Ints) -> Ints:
        """Each function followed by the transition on a symbol."""
        self._budget.check()
        width = self._transitions.shape[1]
        dead = (symbols < 0) | (numbers == 0)
        keys = np.where(dead, -1, numbers.astype(np.int64) * max(1, width) + symbols)
        distinct, inverse = np.unique(keys, return_inverse=True)
        found = np.zeros(len(distinct), np.int32)
        for at, key in enumerate(distinct.tolist()):
            if key < 0:
                continue
            if key not in self._compositions:
                number, symbol = divmod(key, width)
                row = self.rows[number]
                next_row = np.where(row >= 0, self._transitions[row, symbol], np.int32(-1))
                self._compositions[key] = self.add(next_row)
                if len(self._compositions) % 256 == 0:
                    self._budget.check()
            found[at] = self._compositions[key]
        return found[inverse]


def _distances(transitions: Ints, accepts: NDArray[np.bool_]) -> Ints:
    """The fewest tokens from each state to an accepting one: breadth-first search from the latter."""
    classes, sources = np.nonzero(transitions >= 0)
    targets = transitions[classes, sources]
    order = np.argsort(targets, kind="stable")
    sources, bounds = sources[order], np.searchsorted(targets[order], np.arange(len(accepts) + 1))
    distance = np.where(accepts, np.int32(0), _UNREACHABLE)
    reached, num_tokens = np.flatnonzero(accepts).tolist(), 0
    while reached:
        num_tokens += 1
        before = np.unique(np.concatenate([sources[bounds[at] : bounds[at + 1]] for at in reached]))
        reached = before[distance[before] == _UNREACHABLE].tolist()
        distance[reached] = num_tokens
    return distance.astype(np.int32)


@dataclass(frozen=True)
class TrieLevel:
    """The trie nodes at one depth."""

    parent: Ints  # [nodes]: index in the level above
    byte: NDArray[np.uint8]  # [nodes]
    tokens: Ints  # ids of the tokens that end at this level
    ends: Ints  # the node at which each of them ends


@dataclass(frozen=True)
class TokenTrie:
    """The bytes of a vocabulary's tokens as a trie, one array set per level.

    Tokens without text (controls, ids without an entry) are not in it.
    """

    size: int  # of the vocabulary
    levels: tuple[TrieLevel, ...]
    text_bytes: Mapping[int, bytes]

    @classmethod
    def of(cls, tokens: Sequence[bytes | None]) -> TokenTrie:
        """From the bytes of each id; None or empty for an id without text."""
        text_bytes = {id_: data for id_, data in enumerate(tokens) if data}
        order = sorted(text_bytes, key=lambda id_: text_bytes[id_])
        levels: list[TrieLevel] = []
        depth = 0
        place = dict.fromkeys(order, 0)  # the node of a token's prefix in the level above
        alive = order
        while alive:
            parents: list[int] = []
            node_bytes: list[int] = []
            ends: list[tuple[int, int]] = []
            before: tuple[int, int] | None = None
            for id_ in alive:
                key = (place[id_], text_bytes[id_][depth])
                if key != before:  # tokens are sorted: those of one node are neighbours
                    parents.append(key[0])
                    node_bytes.append(key[1])
                    before = key
                place[id_] = len(parents) - 1
                if len(text_bytes[id_]) == depth + 1:
                    ends.append((id_, place[id_]))
            depth += 1
            alive = [id_ for id_ in alive if len(text_bytes[id_]) > depth]
            levels.append(
                TrieLevel(
                    np.array(parents, np.int32),
                    np.array(node_bytes, np.uint8),
                    np.array([id_ for id_, _ in ends], np.int32),
                    np.array([node for _, node in ends], np.int32),
                )
            )
        return cls(len(tokens), tuple(levels), text_bytes)

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer, vocab_size: int) -> TokenTrie:
        """Controls, and ids beyond the tokenizer's own, have no text."""
        return cls.of([tokenizer.bytes_of(id_) for id_ in range(vocab_size)])
