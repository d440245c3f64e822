"""A constraint on one answer: its token DFA, and the states from which the text can still be completed."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dgemma.structured_output.dfa import longest_text
from dgemma.structured_output.response_format import ResponseFormat
from dgemma.structured_output.token_dfa import Ints, TokenDFA

Bools = NDArray[np.bool_]
TokenChoices = Mapping[int, tuple[int, ...]]
"""Pinned positions of the answer: the tokens allowed at each."""
_ANY_TOKEN = range(1 << 31)
_MAX_SEARCHED = 4_000_000  # entries of a transition table


@dataclass(frozen=True, kw_only=True)
class ConstraintSource:
    """What a constraint was compiled from, so that it can be compiled again."""

    response_format: ResponseFormat
    allow_thought: bool = False
    around: tuple[str, str] | None = None  # of an infill: the texts before and after the gap


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """The token DFA accepts the whole answer, or positions `begin` to `end` of it."""

    token_dfa: TokenDFA
    # Tokens that may follow a complete text; the DFA has transitions on them.
    end_tokens: tuple[int, ...] = ()
    begin: int = 0  # first constrained position of the answer
    end: int | None = None  # one past the last; None: the text ends with an end token
    # At max_tokens, an answer that ends with one of these is not truncated.
    complete_after: Container[int] = _ANY_TOKEN
    source: ConstraintSource | None = None

    @cached_property
    def most_tokens(self) -> Ints | None:
        """The most tokens of a text from each state, without its end token; -1: there is no limit.

        None: the table is too large to look for it.
        """
        transitions = self.token_dfa.transitions
        if transitions.size > _MAX_SEARCHED:
            return None
        text = transitions.copy()
        text[np.unique(self.token_dfa.class_of_token[list(self.end_tokens)])] = -1
        return longest_text(np.ascontiguousarray(text.T)) - 1

    def stop(self, max_tokens: int) -> int:
        return max_tokens if self.end is None else self.end

    def completable_states(self, position: int, max_tokens: int, choices: TokenChoices) -> Bools:
        """The DFA states before `position` from which the text can be completed in time [states].

        choices: the pinned positions from `position` on.
        """
        dfa, stop = self.token_dfa, self.stop(max_tokens)
        if self.end is None:  # end tokens fill the positions after a complete text
            since = max([position, *(at + 1 for at in choices if at < stop)])
            can: Bools = dfa.distance <= stop - since
        else:
            since, can = stop, dfa.accepts
        for at in range(since - 1, position - 1, -1):
            tokens = choices.get(at)
            classes = slice(None) if tokens is None else np.unique(dfa.class_of_token[list(tokens)])
            can = np.asarray(np.append(can, False)[dfa.transitions[classes]].any(0))
        return can
