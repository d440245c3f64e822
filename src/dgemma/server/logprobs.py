"""Log-probabilities in the two forms that clients know: of a chat, and of a completion."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence

from dgemma.server.replies import CompletionLogprobs, TokenLogprob, TopLogprob
from dgemma.server.text import TextService

# Per token of an answer: (word, log-probability) of the likeliest words, best first.
Likeliest = Sequence[Sequence[tuple[int, float]]]
# What OpenAI's form says of a word that is too unlikely to be listed.
UNLISTED = -9999.0


def chat_logprobs(
    text: TextService, tokens: Sequence[int], likeliest: Likeliest, listed: int
) -> list[TokenLogprob]:
    """One entry per token that was written, controls included: those have a name and no bytes."""

    def top(token: int, value: float) -> TopLogprob:
        piece = text.piece(token)
        raw = None if piece.raw is None else list(piece.raw)
        return TopLogprob(token=piece.text, logprob=_finite(value), bytes=raw)

    entries = []
    for token, words in zip(tokens, likeliest, strict=False):
        own = top(token, dict(words).get(token, UNLISTED))
        entries.append(
            TokenLogprob(
                token=own.token,
                logprob=own.logprob,
                bytes=own.bytes,
                top_logprobs=[top(*word) for word in words[:listed]],
            )
        )
    return entries


class CompletionLogprobWriter:
    """Remembers where in the text the last token ended."""

    def __init__(self, text: TextService, listed: int) -> None:
        self._text = text
        self._listed = listed
        self._offset = 0
        # A character may take several tokens: it counts when its last byte is there.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: Sequence[int], likeliest: Likeliest) -> CompletionLogprobs:
        found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token, words in zip(tokens, likeliest, strict=False):
            found.tokens.append(self._name(token))
            found.token_logprobs.append(_finite(dict(words).get(token, UNLISTED)))
            found.top_logprobs.append({self._name(word): _finite(v) for word, v in words[: self._listed]})
            found.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(self._text.piece(token).raw or b""))
        return found

    def _name(self, token: int) -> str:
        """A token's text; part of a character by its bytes, so that no two become one key."""
        piece = self._text.piece(token)
        if piece.raw is None or piece.text.encode() == piece.raw:
            return piece.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece.raw)


def _finite(value: float) -> float:
    """A word that top_k or top_p cut away has probability 0, whose logarithm is no number of JSON's."""
    return max(value, UNLISTED) if math.isfinite(value) else UNLISTED
