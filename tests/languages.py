"""Constraints for tests, from regular expressions."""

from __future__ import annotations

from functools import lru_cache

from dgemma.structured_output.budget import TimeBudget
from dgemma.structured_output.constraint import Constraint
from dgemma.structured_output.dfa import build_dfa
from dgemma.structured_output.regex import Alternation, Concat, Repeat, SpecialToken, parse
from dgemma.structured_output.token_dfa import TokenTrie, build_token_dfa
from dgemma.text.tokenizer import Tokenizer


@lru_cache(maxsize=4)
def trie_of(tokenizer: Tokenizer, vocab_size: int) -> TokenTrie:
    return TokenTrie.of_tokenizer(tokenizer, vocab_size)


def matching(
    pattern: str, tokenizer: Tokenizer, vocab_size: int, end_tokens: tuple[int, ...] = (1, 106)
) -> Constraint:
    """The whole answer matches, then ends."""
    ends = Repeat(Alternation(tuple(map(SpecialToken, end_tokens))), 0, None)
    node = Concat((parse(pattern), ends)) if end_tokens else parse(pattern)
    token_dfa = build_token_dfa(build_dfa(node), trie_of(tokenizer, vocab_size), TimeBudget(10.0))
    return Constraint(token_dfa=token_dfa, end_tokens=end_tokens)
