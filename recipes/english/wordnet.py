"""What WordNet says about words, as whole sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from recipes.english.entry import Entry
from recipes.english.prose import is_sentence, plain

SOURCE = "wordnet"
ROOT = Path("/usr/share/wordnet")
_LINE = re.compile(r"\d{8} \d\d ([nvasr]) [0-9a-f]{2} (\S+) .*?\| (.*)")
# Slurs and obscenities are marked as such; taxonomy is names of names.
_LEFT_OUT = re.compile(
    r"slur|offensive|disparaging|derogat|obscen|vulgar|sexual|genital|coitus|prostitut"
    r"|\bgenus\b|\bfamily [A-Z]"
)


def wordnet_entries(root: Path = ROOT) -> Iterator[Entry]:
    seen: set[str] = set()
    for part in ("noun", "verb", "adj", "adv"):
        for number, line in enumerate((root / f"data.{part}").read_text("utf-8").splitlines()):
            if found := _LINE.match(line):
                kind, word, gloss = found[1], re.sub(r"\(\w+\)$", "", found[2]).replace("_", " "), found[3]
                if word[0].isupper() or _LEFT_OUT.search(gloss):
                    continue
                if (text := defined(word, kind, gloss)) and text not in seen:
                    seen.add(text)
                    yield Entry(SOURCE, f"{word}.{kind}.{number}", text, asked(word, kind))


def asked(word: str, kind: str) -> str:
    if kind == "n":
        return f"What is {article(word)} {word}?"
    return f"What does {word} mean?"


def article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def defined(word: str, kind: str, gloss: str) -> str:
    """The definition as a sentence about the word, then the examples that are sentences."""
    examples = re.findall(r'"([^"]+)"', gloss)
    meaning = plain(re.sub(r"\s*[;,]?\s*\"[^\"]*\".*", "", gloss))
    meaning = re.sub(r"^\([^()]*\)\s*", "", meaning).rstrip(" ;:,.")
    if not meaning or not re.match(r"[a-z(]|[A-Z][a-z]", meaning):
        return ""
    if kind == "n":
        if re.match(r"(?:an?|the|any|one|some|that|something|someone|a kind|type) ", meaning):
            sentence = f"{article(word).title()} {word} is {meaning}."
        else:
            begun = word[0].upper() + word[1:]
            sentence = (
                f"{begun} is {meaning}." if re.match(r"\w+ing\b", meaning) else f"{begun} means {meaning}."
            )
    elif kind == "v":
        sentence = f"To {word} is to {meaning}."
    else:
        sentence = f"{word[0].upper() + word[1:]} means {meaning}."
    if not is_sentence(sentence):
        return ""
    kept = [example for text in examples if is_sentence(example := finished(text))]
    return " ".join([sentence, *kept[:2]])


def finished(text: str) -> str:
    text = plain(text).strip(" ;")
    if not text:
        return ""
    return text[0].upper() + text[1:] + ("" if text[-1] in ".!?" else ".")
