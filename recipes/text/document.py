"""A document of the corpus: what it was, what is left of it, and on which side of the split it stands."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

SPLITS = ("train", "held_out")
HELD_OUT_ONE_IN = 50


@dataclass(frozen=True)
class Document:
    source: str
    name: str
    raw: str
    text: str = ""

    @property
    def split(self) -> str:
        number = int(sha256(f"{self.source}/{self.name}".encode()).hexdigest()[:8], 16)
        return SPLITS[number % HELD_OUT_ONE_IN == 0]
