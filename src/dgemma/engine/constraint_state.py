"""The DFA state of a constrained answer, and what the next canvas or token may hold."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from dgemma.engine.request import PinnedTokens
from dgemma.sampling.constrained import CanvasConstraint, VocabDFA, vocab_dfa
from dgemma.structured_output.constraint import Constraint
from dgemma.structured_output.token_dfa import TokenDFA

# DFAs cached on a device: with 262,144 tokens some 7 MB each, and fast to rebuild.
_MAX_CACHED = 32


class ConstraintState:
    """State of one answer. Positions are those of the answer."""

    def __init__(self, constraint: Constraint, max_tokens: int, pinned: PinnedTokens | None) -> None:
        self.constraint = constraint
        self.state = 0
        self._max_tokens = max_tokens
        self._choices = {} if pinned is None else pinned.choices

    @property
    def most_tokens(self) -> int | None:
        """The most tokens that may still come, without an end token; None: there is no limit."""
        most = self.constraint.most_tokens
        if self.constraint.end is not None or most is None or most[self.state] < 0:
            return None
        return int(most[self.state])

    def advance(self, begin: int, tokens: list[int]) -> None:
        """Tokens from position `begin` on are final."""
        stop = self.constraint.stop(self._max_tokens)
        own = tokens[max(0, self.constraint.begin - begin) : max(0, stop - begin)]
        self.state = self.constraint.token_dfa.run(own, self.state)
        assert self.state >= 0, "a committed token left the DFA"

    def canvas_constraint(self, begin: int, canvas_len: int, device: torch.device) -> CanvasConstraint:
        """What a canvas from position `begin` on may hold."""
        constraint = self.constraint
        stop = min(begin + canvas_len, constraint.stop(self._max_tokens))
        span = slice(max(0, constraint.begin - begin), max(0, stop - begin))
        last = constraint.completable_states(stop, self._max_tokens, self._choices)
        return CanvasConstraint(_vocab_dfa(constraint.token_dfa, device), self.state, last, span)

    def states_along(self, begin: int, tokens: list[int]) -> list[int]:
        """The state before each token of a draft from position `begin` on, and after all that are allowed."""
        dfa, states = self.constraint.token_dfa, [self.state]
        for position, token in enumerate(tokens, begin):
            if not self.allowed_tokens(position, states[-1])[token]:
                break
            states.append(dfa.run([token], states[-1]))
        return states

    def allowed_tokens(self, position: int, state: int) -> NDArray[np.bool_]:
        """Whether each token is allowed at `position` in this state [vocabulary]."""
        dfa = self.constraint.token_dfa
        to = dfa.transitions[:, state]
        can = self.constraint.completable_states(position + 1, self._max_tokens, self._choices)
        return np.append(can, False)[to][dfa.class_of_token]


@lru_cache(maxsize=_MAX_CACHED)
def _vocab_dfa(token_dfa: TokenDFA, device: torch.device) -> VocabDFA:
    return vocab_dfa(token_dfa.class_of_token, token_dfa.transitions, device)
