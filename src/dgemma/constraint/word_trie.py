"""A vocabulary as bytes, in a trie whose levels are arrays: all words are followed at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dgemma.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Level:
    """The nodes as far from the root as this."""

    parent: NDArray[np.int32]  # place in the level above
    byte: NDArray[np.uint8]
    words: NDArray[np.int32]  # ids of the words that end here
    ends: NDArray[np.int32]  # at which node each of them does


@dataclass(frozen=True)
class WordTrie:
    """Words that spell something; the others (controls, and ids without a piece) are told by their id."""

    size: int  # of the vocabulary
    levels: tuple[Level, ...]
    spelled: Mapping[int, bytes]

    @classmethod
    def of(cls, words: Sequence[bytes | None]) -> WordTrie:
        """From the bytes of each id; None, or nothing at all, for one that spells nothing."""
        spelled = {id_: word for id_, word in enumerate(words) if word}
        order = sorted(spelled, key=lambda id_: spelled[id_])
        levels: list[Level] = []
        depth = 0
        place = dict.fromkeys(order, 0)  # where a word's prefix stands in the level above
        alive = order
        while alive:
            parents: list[int] = []
            letters: list[int] = []
            ends: list[tuple[int, int]] = []
            before: tuple[int, int] | None = None
            for id_ in alive:
                key = (place[id_], spelled[id_][depth])
                if key != before:  # words are sorted: those of one node are neighbours
                    parents.append(key[0])
                    letters.append(key[1])
                    before = key
                place[id_] = len(parents) - 1
                if len(spelled[id_]) == depth + 1:
                    ends.append((id_, place[id_]))
            depth += 1
            alive = [id_ for id_ in alive if len(spelled[id_]) > depth]
            levels.append(
                Level(
                    np.array(parents, np.int32),
                    np.array(letters, np.uint8),
                    np.array([id_ for id_, _ in ends], np.int32),
                    np.array([node for _, node in ends], np.int32),
                )
            )
        return cls(len(words), tuple(levels), spelled)

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer, vocab_size: int) -> WordTrie:
        """Controls and ids beyond the tokenizer's own spell nothing."""
        words: list[bytes | None] = []
        for id_ in range(vocab_size):
            if id_ in tokenizer.byte_ids:
                words.append(bytes([int((tokenizer.piece(id_) or "")[3:5], 16)]))
            elif id_ < tokenizer.vocab_size and tokenizer.text_ids([id_]):
                words.append(tokenizer.decode([id_]).encode("utf-8"))
            else:
                words.append(None)
        return cls.of(words)
