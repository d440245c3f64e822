"""Token texts by prefix and suffix: which tokens can cross the border between two texts."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property

from dgemma.text.tokenizer import Tokenizer

_LAST = "\U0010ffff"


class TokenTexts:
    """The tokens with a text of their own: no control tokens, no byte tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text_of(self, id_: int) -> str | None:
        """The text of one token, independent of its neighbours, or None."""
        return self._texts.get(id_)

    def beginning_with(self, text: str) -> tuple[int, ...]:
        """Ids of the tokens whose text starts with `text`, ascending."""
        return _between(self._by_prefix, text)

    def ending_with(self, text: str) -> tuple[int, ...]:
        """Ids of the tokens whose text ends with `text`, ascending."""
        return _between(self._by_suffix, text[::-1])

    @cached_property
    def _texts(self) -> dict[int, str]:
        tokenizer = self._tokenizer
        texts: dict[int, str] = {}
        for id_ in range(tokenizer.vocab_size):
            if id_ in tokenizer.byte_ids or not tokenizer.text_ids([id_]):
                continue
            if text := tokenizer.decode([id_]):
                texts[id_] = text
        return texts

    @cached_property
    def _by_prefix(self) -> list[tuple[str, int]]:
        return sorted((text, id_) for id_, text in self._texts.items())

    @cached_property
    def _by_suffix(self) -> list[tuple[str, int]]:
        return sorted((text[::-1], id_) for id_, text in self._texts.items())


def _between(table: list[tuple[str, int]], beginning: str) -> tuple[int, ...]:
    begin = bisect_left(table, (beginning, -1))
    end = bisect_left(table, (beginning + _LAST, -1))
    return tuple(sorted(id_ for _, id_ in table[begin:end]))
