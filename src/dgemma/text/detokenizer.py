"""Incremental detokenization: chunks of token ids to text that is final."""

from __future__ import annotations

from collections.abc import Iterable

from dgemma.text.tokenizer import Tokenizer


class Detokenizer:
    """Joined over all calls, `add` and `finish` give `tokenizer.decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._held: list[int] = []  # a run of byte tokens that may continue

    def add(self, ids: Iterable[int]) -> str:
        """The text that these ids make final."""
        # The text of other tokens does not depend on their neighbours. A run of byte tokens is decoded as a
        # whole: one invalid byte at its end changes all of it, so it is final only with the token after it.
        final: list[int] = []
        for id_ in self._tokenizer.text_ids(ids):
            self._held.append(id_)
            if id_ not in self._tokenizer.byte_ids:
                final += self._held
                self._held = []
        return self._tokenizer.decode(final)

    def finish(self) -> str:
        """The rest; invalid bytes become replacement characters."""
        rest, self._held = self._held, []
        return self._tokenizer.decode(rest)
