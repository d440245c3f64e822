"""A model of labels whose every probability is known, and what is read of it by brute force."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

from dgemma.engine.request import EngineRequest
from dgemma.tasks.context import Ids, TaskContext
from tasks.scripted import Scripted, encode

NEWLINE = encode("\n")[0]


class Lines(Scripted):
    """The share of a word depends on the line before it, as far as it is fixed: drawn once, by the line."""

    def __init__(self, task: TaskContext, *, seed: int = 0, least: float = 0.05) -> None:
        super().__init__(task)
        self.seed = seed
        self.least = least

    def weight(self, line: Ids, word: int) -> float:
        return self.least + random.Random(f"{self.seed} {line} {word}").random()

    def reads(self, request: EngineRequest, at: int) -> Mapping[int, float]:
        given = request.pinned
        assert given is not None
        line: list[int] = []
        place = at - 1
        while place in given.fixed and given.fixed[place] != NEWLINE:
            line.insert(0, given.fixed[place])
            place -= 1
        return {word: self.weight(tuple(line), word) for word in given.among.get(at, (NEWLINE,))}

    def shares(self, opening: Ids, labels: Sequence[Ids], follower: int) -> tuple[float, ...]:
        """By brute force: each label word by word, among the words that any label goes on with."""
        whole = [(*label, follower) for label in labels]
        found: list[float] = []
        for label in whole:
            share = 1.0
            for at, word in enumerate(label):
                words = _next_words(whole, label[:at])
                total = sum(self.weight((*opening, *label[:at]), other) for other in words)
                share *= self.weight((*opening, *label[:at]), word) / total if len(words) > 1 else 1.0
            found.append(share)
        return tuple(found)


def _next_words(labels: Iterable[Ids], beginning: Ids) -> set[int]:
    return {one[len(beginning)] for one in labels if one[: len(beginning)] == beginning}
