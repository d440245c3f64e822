"""What counts as plain English prose, and how it is brought into one form."""

from __future__ import annotations

import re

_ASCII = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-",
     "\u2026": "...", "\u00a0": " ", "`": "'", "\u00b4": "'"}
)  # fmt: skip
_NOT_PROSE = re.compile(
    r"[^\x20-\x7e]"  # beyond ASCII
    r"|\w+://|www\.|\S@\S|\.(?:com|org|net|html?)\b"  # addresses
    r"|\(\)|[<>{}\[\]|\\^~*_=#@$]|::|--|\w/\w+/|\.\w+\("  # markup, options, paths, code
    r"|\d[\d.,:-]{5,}"  # versions, dates, long numbers
)
_SENTENCE_END = re.compile(
    r"(?<=[.!?])(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\betc\.)(?<!\bvs\.)(?<!\b[A-Z]\.)\s+(?=[A-Z\"'(])"
)
_WORD = re.compile(r"[A-Za-z]+")
MIN_WORDS, MAX_WORDS = 4, 60  # of a sentence
MIN_LETTERS = 0.8  # of what is no space
MAX_CAPITALS = 0.4  # share of words that begin with a capital: above it is a list of names


def plain(text: str) -> str:
    """One line, with ASCII quotes and dashes."""
    text = " ".join(text.translate(_ASCII).replace("''", '"').split())
    return re.sub(r"\s+([,.;:!?)])", r"\1", text)


def sentences(text: str) -> list[str]:
    return _SENTENCE_END.split(text)


def is_sentence(text: str) -> bool:
    """Whether it reads as an English sentence."""
    words = _WORD.findall(text)
    capitals = sum(word[0].isupper() for word in words[1:])
    letters = sum(map(len, words))
    return (
        MIN_WORDS <= len(words) <= MAX_WORDS
        and bool(re.match(r"[A-Z0-9\"'(]", text))
        and bool(re.search(r"[.!?][\"')]?$", text))
        and not _NOT_PROSE.search(text)
        and capitals <= MAX_CAPITALS * len(words)
        and letters >= MIN_LETTERS * len(text.replace(" ", ""))
        and text.count("(") == text.count(")")
        and text.count('"') % 2 == 0
    )
