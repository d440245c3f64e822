"""What a chat remembers between turns: caches of what was already read, found again by their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from dgemma.model.cache import KVCache


class TurnMemory:
    """The last turn's prompt, and its prompt with the answer's canvases.

    A cache is used again only if its tokens begin the new prompt, so that an answer does not depend on
    what was remembered (to the bit in the exact way). A template that drops thoughts, or an answer that
    the tokenizer would spell in another way, changes the tokens behind the prompt: then the prompt's own
    cache still fits.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[tuple[int, ...], KVCache]] = []

    def take(self, prompt: Sequence[int]) -> KVCache | None:
        """The cache that holds most of the prompt, and forget all: it will be written to."""
        # At least one token must remain to be read: its hidden state may be asked for.
        fitting = [
            (len(tokens), cache)
            for tokens, cache in self._kept
            if len(tokens) < len(prompt) and tuple(prompt[: len(tokens)]) == tokens
        ]
        self._kept = []
        return max(fitting, key=lambda pair: pair[0])[1] if fitting else None

    def keep(self, *known: tuple[Sequence[int], KVCache]) -> None:
        """Remember these caches and the tokens in them, in place of all others; nobody reads them now."""
        assert all(cache.lengths == (len(tokens),) for tokens, cache in known)
        self._kept = [(tuple(tokens), cache) for tokens, cache in known]
