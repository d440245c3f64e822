"""Passages of held-out texts, drawn by a seed: documents (`python -m recipes.text.make_corpus`), or entries
(`python -m recipes.english.make_corpus`)."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from dgemma.text.tokenizer import Tokenizer

CORPUS = Path("data/text/held_out")
REMEDY = (
    "make the corpus with: apt install python3-doc linux-doc cmake-data; python -m recipes.text.make_corpus"
)
LEAST_OF_ENTRY = 6  # tokens of an entry before and after a passage
SOURCES = {"cmake-docs": "CMake", "kernel-docs": "the Linux kernel", "python-docs": "Python"}


@dataclass(frozen=True)
class Passage:
    """Neighbouring tokens of a document."""

    source: str  # the corpus it is of
    before: tuple[int, ...]
    inside: tuple[int, ...]
    after: tuple[int, ...]


def documents(corpus: Path = CORPUS, *, sources: Collection[str] = ()) -> dict[str, list[str]]:
    """Texts by source. The corpus is not in the repository: exit if it lacks one of `sources`, or all.

    corpus: a directory of documents, or a file of entries.
    """
    found: dict[str, list[str]] = {}
    if corpus.suffix == ".jsonl" and corpus.is_file():
        for entry in map(json.loads, corpus.read_text(encoding="utf-8").splitlines()):
            found.setdefault(entry["source"], []).append(entry["text"])
    for file in sorted(corpus.rglob("*")):
        if file.is_file():
            found.setdefault(file.relative_to(corpus).parts[0], []).append(file.read_text(encoding="utf-8"))
    lacking = sorted(set(sources) - found.keys()) if found else ["documents"]
    if lacking:
        raise SystemExit(f"{corpus} has no {' and no '.join(lacking)}; {REMEDY}")
    return found


def passages(
    tokenizer: Tokenizer, lengths: list[int], *, before: int, after: int, seed: int, corpus: Path = CORPUS
) -> Iterator[Passage]:
    """One for each length, at a place drawn among all texts that are long enough.

    An entry is a short text, of which a passage has all: at most `before` and `after` tokens, but a few.
    """
    rng = random.Random(seed)
    least_before, least_after = before, after
    if corpus.suffix == ".jsonl":
        least_before, least_after = min(before, LEAST_OF_ENTRY), min(after, LEAST_OF_ENTRY)
    texts = [(source, text) for source, own in documents(corpus).items() for text in own]
    encoded: dict[int, list[int]] = {}
    for length in lengths:
        while True:
            number = rng.randrange(len(texts))
            tokens = encoded.setdefault(number, tokenizer.encode(texts[number][1]))
            room = len(tokens) - least_before - length - least_after
            if room > 0:
                break
        at = least_before + rng.randrange(room)
        yield Passage(
            texts[number][0],
            tuple(tokens[max(0, at - before) : at]),
            tuple(tokens[at : at + length]),
            tuple(tokens[at + length : at + length + after]),
        )
