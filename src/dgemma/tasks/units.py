"""A text in units that are changed as wholes: words, with the blank before them; else single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """Tokens `start` to `stop` of a text."""

    start: int
    stop: int
    text: str

    @property
    def is_word(self) -> bool:
        return is_word(self.text)


def is_word(text: str) -> bool:
    return text.lstrip(" ").replace("_", "a").isalnum()


def units_of(token_texts: Sequence[str]) -> list[Unit]:
    """From the text of each token. One without a text of its own belongs to the unit of the next that has."""
    units: list[Unit] = []
    start, held = 0, ""
    for at, token_text in enumerate(token_texts):
        held += token_text
        if not token_text and at + 1 < len(token_texts):
            continue
        joins = units and start == units[-1].stop and units[-1].is_word and is_word(held) and held[:1] != " "
        if joins:
            last = units.pop()
            units.append(Unit(last.start, at + 1, last.text + held))
        else:
            units.append(Unit(start, at + 1, held))
        start, held = at + 1, ""
    return units


def distance(one: str, other: str, most: int = 1 << 30) -> int:
    """Characters to be changed, added, left out or swapped with a neighbour; above `most`: most + 1."""
    if abs(len(one) - len(other)) > most:
        return most + 1
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, start=1):
        older, before, row = before, row, [i]
        for j, b in enumerate(other, start=1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                cost = min(cost, older[j - 2] + 1)
            row.append(cost)
        if min(row) > most:
            return most + 1
    return min(row[-1], most + 1)
