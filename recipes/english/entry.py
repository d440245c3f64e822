"""An entry of the corpus: sentences about something that has a name."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

SPLITS = ("train", "held_out")
HELD_OUT_ONE_IN = 50


@dataclass(frozen=True)
class Entry:
    """text: whole sentences. question: one that the text answers; empty if none was found."""

    source: str
    name: str
    text: str
    question: str = ""

    @property
    def split(self) -> str:
        number = int(sha256(f"{self.source}/{self.name}".encode()).hexdigest()[:8], 16)
        return SPLITS[number % HELD_OUT_ONE_IN == 0]
