"""A language that an answer keeps to, and from which states it can still be completed."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dgemma.constraint.token_automaton import TokenAutomaton

Bools = NDArray[np.bool_]
Choices = Mapping[int, tuple[int, ...]]
"""By position of the answer: the words one of which stands there."""
_ANY_WORD = range(1 << 31)


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """The answer as a whole, or a part of it whose ends are known, is a text of the language."""

    automaton: TokenAutomaton
    end_tokens: tuple[int, ...] = ()  # what may follow a whole text: part of the machine
    begin: int = 0  # first position of the answer that is of the language
    end: int | None = None  # where it ends exactly; None: where the text is whole, at an end token
    whole_after: Container[int] = _ANY_WORD  # behind these a text without tokens left is not cut off

    def stop(self, max_tokens: int) -> int:
        return max_tokens if self.end is None else self.end

    def allows(self, position: int, max_tokens: int, choices: Choices) -> Bools:
        """Before `position`: the states from which the text becomes whole in time [states].

        choices: what is given of positions from there on.
        """
        machine, stop = self.automaton, self.stop(max_tokens)
        if self.end is None:  # behind a whole text the end tokens go on
            since = max([position, *(at + 1 for at in choices if at < stop)])
            can: Bools = machine.distance <= stop - since
        else:
            since, can = stop, machine.accepts
        for at in range(since - 1, position - 1, -1):
            words = choices.get(at)
            classes = slice(None) if words is None else np.unique(machine.class_of_word[list(words)])
            can = np.asarray(np.append(can, False)[machine.maps[classes]].any(0))
        return can
