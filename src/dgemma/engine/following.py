"""An answer on its way through a language: its state, and what the next canvas or token may hold."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from dgemma.constraint.constraint import Constraint
from dgemma.constraint.token_automaton import TokenAutomaton
from dgemma.diffusion.language import Language, Strings, language_of
from dgemma.errors import InputError
from dgemma.given import Given
from dgemma.params import GenerationParams

# Languages kept as a device reads them: with 262,144 words some 7 MB each, and made in a moment.
_KEPT = 32


class Following:
    """State of one answer. Positions are those of the answer."""

    def __init__(self, constraint: Constraint, max_tokens: int, given: Given | None) -> None:
        self.constraint = constraint
        self.state = 0
        self._max_tokens = max_tokens
        self._choices = {} if given is None else given.choices

    def advance(self, begin: int, tokens: list[int]) -> None:
        """Tokens from position `begin` on are final."""
        stop = self.constraint.stop(self._max_tokens)
        own = tokens[max(0, self.constraint.begin - begin) : max(0, stop - begin)]
        self.state = self.constraint.automaton.run(own, self.state)
        assert self.state >= 0, "a text of the language was left"

    def strings(self, begin: int, canvas_len: int, device: torch.device) -> Strings:
        """What a canvas from position `begin` on may hold."""
        constraint = self.constraint
        stop = min(begin + canvas_len, constraint.stop(self._max_tokens))
        span = slice(max(0, constraint.begin - begin), max(0, stop - begin))
        last = constraint.allows(stop, self._max_tokens, self._choices)
        return Strings(_language(constraint.automaton, device), self.state, last, span)

    def allowed_words(self, position: int) -> NDArray[np.bool_]:
        """Whether each word may stand at `position` [vocabulary]."""
        machine = self.constraint.automaton
        to = machine.maps[:, self.state]
        can = self.constraint.allows(position + 1, self._max_tokens, self._choices)
        return np.append(can, False)[to][machine.class_of_word]


def check_constraint(
    constraint: Constraint,
    params: GenerationParams,
    vocab_size: int,
    max_tokens: int,
    given: Given | None,
) -> None:
    """Refuse what no answer could satisfy, before anything runs."""
    machine = constraint.automaton
    if len(machine.class_of_word) != vocab_size:
        raise InputError(
            f"the constraint knows {len(machine.class_of_word)} words; this model has {vocab_size}. "
            "Compile it for this model."
        )
    if constraint.end is None and (params.ignore_end or not {*constraint.end_tokens} & {*params.end_tokens}):
        raise InputError("a constraint needs an end token behind the text; do not ignore it (ignore_end).")
    stop = constraint.stop(max_tokens)
    if not 0 <= constraint.begin <= stop <= max_tokens:
        raise InputError(
            f"the constraint is about positions {constraint.begin} to {stop} of {max_tokens} tokens."
        )
    fixed = {} if given is None else given.fixed
    if any(at not in fixed for at in (*range(constraint.begin), *range(stop, max_tokens))):
        raise InputError("outside of the part that a constraint is about, every position must be fixed.")
    choices = {} if given is None else given.choices
    if constraint.allows(constraint.begin, max_tokens, choices)[0]:
        return
    if not constraint.allows(constraint.begin, max_tokens, {})[0]:
        if constraint.end is not None:
            raise InputError(f"no text of exactly {stop - constraint.begin} tokens satisfies the constraint.")
        raise InputError(
            f"max_tokens is {max_tokens}; the shortest text that satisfies the constraint has "
            f"{int(machine.distance[0])} tokens. Raise it."
        )
    raise InputError("no text satisfies both the constraint and what is pinned.")


@lru_cache(maxsize=_KEPT)
def _language(automaton: TokenAutomaton, device: torch.device) -> Language:
    return language_of(automaton.class_of_word, automaton.maps, device)
