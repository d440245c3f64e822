"""Spelling variants at edit distance one: a letter changed, added, left out or swapped with the next."""

from __future__ import annotations

import string
from collections.abc import Collection, Iterator

from dgemma.text.tokenizer import Tokenizer

_SHORTEST, _LONGEST = 3, 24


def near_words(text: str, tokenizer: Tokenizer, known: Collection[str], *, most: int) -> list[str]:
    """Spellings near `text` that look like words: known ones, and those of fewer tokens than it has.

    A vocabulary holds what is often written: a slip breaks a word into more tokens than it had.
    """
    blank = text[: len(text) - len(text.lstrip(" "))]
    word = text[len(blank) :]
    if not _SHORTEST <= len(word) <= _LONGEST or not word.isalpha():
        return []
    count = len(tokenizer.encode(text))
    ranked: list[tuple[bool, int, int, str]] = []
    for variant in sorted(set(_variants(word)) - {word}):
        ids = tokenizer.encode(blank + variant)
        is_known = variant in known
        if is_known or len(ids) < count or len(ids) == 1:
            # Of words with as many tokens, those the vocabulary learned first are written most.
            ranked.append((not is_known, len(ids), sum(ids), blank + variant))
    return [variant for *_, variant in sorted(ranked)[:most]]


def _variants(word: str) -> Iterator[str]:
    letters = string.ascii_uppercase if word.isupper() else string.ascii_lowercase
    for at in range(len(word) + 1):
        head, tail = word[:at], word[at:]
        for letter in letters:
            yield head + letter + tail
            if tail:
                yield head + letter + tail[1:]
        if tail:
            yield head + tail[1:]
        if len(tail) > 1:
            yield head + tail[1] + tail[0] + tail[2:]
