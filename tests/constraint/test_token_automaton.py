"""Words of a vocabulary do to a language's states what their bytes do."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dgemma.checkpoint.bundled import bundled_path
from dgemma.constraint.automaton import Clock, build
from dgemma.constraint.pattern import Control, Sequence, literal, parse
from dgemma.constraint.token_automaton import FORBIDDEN, TokenAutomaton, meet
from dgemma.constraint.word_trie import WordTrie
from dgemma.text.tokenizer import Tokenizer

TAGS = r'\[("[a-z]{1,9}"(, "[a-z]{1,9}"){0,4})?\]'
OBJECT = r'\{"name": "[^"\\\x00-\x1f]{0,40}", "age": (0|[1-9]\d{0,2}), "tags": ' + TAGS + r"\}"


@pytest.fixture(scope="module")
def trie() -> WordTrie:
    tokenizer = Tokenizer.from_directory(bundled_path("text"))
    return WordTrie.of_tokenizer(tokenizer, tokenizer.vocab_size + 3)


def of(pattern: str, trie: WordTrie) -> TokenAutomaton:
    return meet(build(parse(pattern)), trie, Clock(30))


@pytest.mark.parametrize("pattern", ["a*b", r"-?(0|[1-9]\d*)(\.\d+)?", OBJECT, "[é-ü]*", ".*"])
def test_a_word_leads_where_its_bytes_lead(pattern: str, trie: WordTrie) -> None:
    plain, words = build(parse(pattern)), of(pattern, trie)
    draw = random.Random(0)
    for id_ in [*draw.sample(sorted(trie.spelled), 1500)]:
        for state in draw.sample(range(plain.num_states), min(5, plain.num_states)):
            assert words.run([id_], state) == plain.run(trie.spelled[id_], state)


def test_words_of_a_class_act_alike_and_classes_differ(trie: WordTrie) -> None:
    words = of(OBJECT, trie)
    assert len({row.tobytes() for row in words.maps}) == words.num_classes
    assert (words.maps[FORBIDDEN] == -1).all()
    assert words.num_classes < 150


def test_what_spells_nothing_is_forbidden(trie: WordTrie) -> None:
    words = of(".*", trie)
    for id_ in range(trie.size):
        spells = any(words.run([id_], state) >= 0 for state in range(words.num_states))
        assert (words.class_of_word[id_] != FORBIDDEN) == spells
        assert id_ in trie.spelled or not spells


def test_a_special_token_stands_where_it_is_asked_for(trie: WordTrie) -> None:
    node = Sequence((literal("a"), Control(1), literal("b")))
    words = meet(build(node), trie, Clock(30))
    a, b = (next(id_ for id_, word in trie.spelled.items() if word == text) for text in (b"a", b"b"))
    assert words.accepts[words.run([a, 1, b])]
    assert words.run([a, b]) == -1


def test_distance_is_the_fewest_words_to_the_end(trie: WordTrie) -> None:
    words = of("(ab)*c", trie)
    for state in range(words.num_states):
        left = int(words.distance[state])
        assert (left == 0) == bool(words.accepts[state])
        steps = [int(words.distance[to]) for to in words.maps[:, state] if to >= 0]
        if left:
            assert min(steps) == left - 1


def test_a_trie_holds_every_word_once() -> None:
    words = [b"a", b"ab", b"abc", None, b"b", b"ab", b""]
    trie = WordTrie.of(words)
    ends = np.concatenate([level.words for level in trie.levels])
    assert sorted(ends.tolist()) == [0, 1, 2, 4, 5]
    assert [len(level.parent) for level in trie.levels] == [2, 1, 1]
