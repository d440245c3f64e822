"""A token of the token DFA leads where its bytes lead in the byte DFA."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from dgemma.checkpoint.bundled import bundled_path
from dgemma.structured_output.budget import TimeBudget
from dgemma.structured_output.dfa import build_dfa
from dgemma.structured_output.regex import Concat, SpecialToken, literal, parse
from dgemma.structured_output.token_dfa import FORBIDDEN, TokenDFA, TokenTrie, build_token_dfa
from dgemma.text.tokenizer import Tokenizer

TAGS = r'\[("[a-z]{1,9}"(, "[a-z]{1,9}"){0,4})?\]'
OBJECT = r'\{"name": "[^"\\\x00-\x1f]{0,40}", "age": (0|[1-9]\d{0,2}), "tags": ' + TAGS + r"\}"


@pytest.fixture(scope="module")
def trie() -> TokenTrie:
    tokenizer = Tokenizer.from_directory(bundled_path("text"))
    return TokenTrie.of_tokenizer(tokenizer, tokenizer.vocab_size + 3)


def of(pattern: str, trie: TokenTrie) -> TokenDFA:
    return build_token_dfa(build_dfa(parse(pattern)), trie, TimeBudget(30))


@pytest.mark.parametrize("pattern", ["a*b", r"-?(0|[1-9]\d*)(\.\d+)?", OBJECT, "[é-ü]*", ".*"])
def test_a_token_leads_where_its_bytes_lead(pattern: str, trie: TokenTrie) -> None:
    plain, token_dfa = build_dfa(parse(pattern)), of(pattern, trie)
    draw = random.Random(0)
    for id_ in [*draw.sample(sorted(trie.text_bytes), 1500)]:
        for state in draw.sample(range(plain.num_states), min(5, plain.num_states)):
            assert token_dfa.run([id_], state) == plain.run(trie.text_bytes[id_], state)


def test_classes_have_different_transitions(trie: TokenTrie) -> None:
    token_dfa = of(OBJECT, trie)
    assert len({row.tobytes() for row in token_dfa.transitions}) == token_dfa.num_classes
    assert (token_dfa.transitions[FORBIDDEN] == -1).all()
    assert token_dfa.num_classes < 150


def test_tokens_without_text_are_forbidden(trie: TokenTrie) -> None:
    token_dfa = of(".*", trie)
    for id_ in range(trie.size):
        has_text = any(token_dfa.run([id_], state) >= 0 for state in range(token_dfa.num_states))
        assert (token_dfa.class_of_token[id_] != FORBIDDEN) == has_text
        assert id_ in trie.text_bytes or not has_text


def test_a_token_that_only_looks_like_a_byte_is_text(tmp_path: Path) -> None:
    raw = json.loads((bundled_path("text") / "tokenizer.json").read_text())
    size = Tokenizer.from_directory(bundled_path("text")).vocab_size
    raw["model"]["vocab"]["<0xzz>"] = size
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    found = TokenTrie.of_tokenizer(Tokenizer.from_directory(tmp_path), size + 1)
    assert found.text_bytes[size] == b"<0xzz>"
    byte = raw["model"]["vocab"]["<0xE2>"]
    assert found.text_bytes[byte] == b"\xe2"


def test_a_special_token_has_its_own_transition(trie: TokenTrie) -> None:
    node = Concat((literal("a"), SpecialToken(1), literal("b")))
    token_dfa = build_token_dfa(build_dfa(node), trie, TimeBudget(30))
    a, b = (next(id_ for id_, data in trie.text_bytes.items() if data == text) for text in (b"a", b"b"))
    assert token_dfa.accepts[token_dfa.run([a, 1, b])]
    assert token_dfa.run([a, b]) == -1


def test_distance_is_the_fewest_tokens_to_the_end(trie: TokenTrie) -> None:
    token_dfa = of("(ab)*c", trie)
    for state in range(token_dfa.num_states):
        left = int(token_dfa.distance[state])
        assert (left == 0) == bool(token_dfa.accepts[state])
        steps = [int(token_dfa.distance[to]) for to in token_dfa.transitions[:, state] if to >= 0]
        if left:
            assert min(steps) == left - 1


def test_a_trie_holds_every_token_once() -> None:
    tokens = [b"a", b"ab", b"abc", None, b"b", b"ab", b""]
    trie = TokenTrie.of(tokens)
    ends = np.concatenate([level.tokens for level in trie.levels])
    assert sorted(ends.tolist()) == [0, 1, 2, 4, 5]
    assert [len(level.parent) for level in trie.levels] == [2, 1, 1]
