"""Held-out texts (`python -m recipes.english.make_corpus`), and passages of them drawn by a seed.

Two sets: `new_scenes`, of topics that training has, and `held_out`, scenes of other topics and definitions of
other words.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dgemma.text.tokenizer import Tokenizer

CORPUS = Path("data/english/new_scenes.jsonl")
REMEDY = "make the corpus with: apt install wordnet-base; python -m recipes.english.make_corpus"
LEAST = 6  # tokens before and after a passage


@dataclass(frozen=True)
class Passage:
    """Neighbouring tokens of a text."""

    before: tuple[int, ...]
    inside: tuple[int, ...]
    after: tuple[int, ...]


def texts(corpus: Path = CORPUS) -> list[str]:
    """All of a set. It is not in the repository: exit if it is not there."""
    if not corpus.is_file():
        raise SystemExit(f"there is no {corpus}; {REMEDY}")
    return [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines()]


def passages(
    tokenizer: Tokenizer, lengths: list[int], *, before: int, after: int, seed: int, corpus: Path = CORPUS
) -> Iterator[Passage]:
    """One for each length, at a place drawn among all texts that are long enough.

    At most `before` and `after` tokens stand around it, and at least a few.
    """
    rng = random.Random(seed)
    found = texts(corpus)
    encoded: dict[int, list[int]] = {}
    least_before = min(before, LEAST)
    for length in lengths:
        while True:
            number = rng.randrange(len(found))
            tokens = encoded.setdefault(number, tokenizer.encode(found[number]))
            room = len(tokens) - least_before - length - min(after, LEAST)
            if room > 0:
                break
        at = least_before + rng.randrange(room)
        yield Passage(
            tuple(tokens[max(0, at - before) : at]),
            tuple(tokens[at : at + length]),
            tuple(tokens[at + length : at + length + after]),
        )
