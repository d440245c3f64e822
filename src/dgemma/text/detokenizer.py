"""Ids that arrive in portions, to text that is final: what was shown never changes."""

from __future__ import annotations

from collections.abc import Iterable

from dgemma.text.tokenizer import Tokenizer


class Detokenizer:
    """Joined over all calls, `add` and `finish` give `tokenizer.decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._held: list[int] = []  # a run of byte pieces whose end has not come yet

    def add(self, ids: Iterable[int]) -> str:
        """The text these ids settle."""
        # Any other piece means the same in any company. A run of bytes is judged as a whole, so that
        # one broken byte at its end changes all of it: it is settled only by the piece after it.
        settled: list[int] = []
        for id_ in self._tokenizer.text_ids(ids):
            self._held.append(id_)
            if id_ not in self._tokenizer.byte_ids:
                settled += self._held
                self._held = []
        return self._tokenizer.decode(settled)

    def finish(self) -> str:
        """The rest; bytes that make no character become replacement characters."""
        rest, self._held = self._held, []
        return self._tokenizer.decode(rest)
