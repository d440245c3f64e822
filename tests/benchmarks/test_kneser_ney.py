"""The n-gram baseline is a probability distribution, and equals Kneser-Ney written down plainly."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from benchmarks.kneser_ney import KneserNey


def plain(text: list[int], words: int, order: int, history: tuple[int, ...], word: int) -> float:
    """The definition, with dictionaries and recursion."""
    grams = Counter(tuple(text[i : i + order]) for i in range(len(text) - order + 1))
    counts: list[Counter[tuple[int, ...]]] = [grams]
    for _ in range(order - 1):
        counts.insert(0, Counter(gram[1:] for gram in counts[0]))

    def probability(size: int) -> float:
        if size == 0:
            return 1 / words
        table = counts[size - 1]
        before = history[len(history) - size + 1 :] if size > 1 else ()
        behind = {gram[-1]: count for gram, count in table.items() if gram[:-1] == before}
        once, twice = (sum(count == n for count in table.values()) for n in (1, 2))
        discount = once / (once + 2 * twice) if once else 0.5
        if not behind:
            return probability(size - 1)
        total = sum(behind.values())
        kept = max(behind.get(word, 0) - discount, 0)
        return (kept + discount * len(behind) * probability(size - 1)) / total

    return probability(order)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_it_equals_the_definition_and_sums_to_one(order: int) -> None:
    words = 7
    generator = np.random.default_rng(order)
    text = generator.choice(words - 1, size=400, p=[0.4, 0.2, 0.2, 0.1, 0.05, 0.05])  # one is never seen
    model = KneserNey(text, words, order)
    for history in ([0, 1, 2, 0], [5, 5, 5, 5], [6, 6, 6, 6], [0, 0, 6, 1]):
        total = 0.0
        for word in range(words):
            tail = [*history[len(history) - order + 1 :], word] if order > 1 else [word]
            found = float(np.exp(model.log_probs(np.array(tail))[-1]))
            assert found == pytest.approx(plain(text.tolist(), words, order, tuple(history), word))
            total += found
        assert total == pytest.approx(1)


def test_a_pattern_is_learned() -> None:
    text = np.array([0, 1, 2, 3] * 200)
    assert np.exp(KneserNey(text, 10, 3).log_probs(text[:50])).min() > 0.9


def test_orders_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="63 bits"):
        KneserNey(np.zeros(10, np.int64), 8192, 5)
