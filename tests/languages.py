"""Constraints for tests, from regular expressions."""

from __future__ import annotations

from functools import lru_cache

from dgemma.constraint.automaton import build
from dgemma.constraint.clock import Clock
from dgemma.constraint.constraint import Constraint
from dgemma.constraint.pattern import Control, Either, Repeat, Sequence, parse
from dgemma.constraint.token_automaton import meet
from dgemma.constraint.word_trie import WordTrie
from dgemma.text.tokenizer import Tokenizer


@lru_cache(maxsize=4)
def trie_of(tokenizer: Tokenizer, vocab_size: int) -> WordTrie:
    return WordTrie.of_tokenizer(tokenizer, vocab_size)


def matching(
    pattern: str, tokenizer: Tokenizer, vocab_size: int, end_tokens: tuple[int, ...] = (1, 106)
) -> Constraint:
    """The whole answer matches, then ends."""
    ends = Repeat(Either(tuple(map(Control, end_tokens))), 0, None)
    node = Sequence((parse(pattern), ends)) if end_tokens else parse(pattern)
    automaton = meet(build(node), trie_of(tokenizer, vocab_size), Clock(10.0))
    return Constraint(automaton=automaton, end_tokens=end_tokens)
