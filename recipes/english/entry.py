"""An entry of the corpus: sentences about something that has a name."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

SPLITS = ("train", "held_out")
HELD_OUT_ONE_IN = 50
HELD_OUT_TOPICS_ONE_IN = 10


@dataclass(frozen=True)
class Entry:
    """text: whole sentences. chats: questions and answers about it."""

    source: str
    name: str
    text: str
    question: str = ""  # one that the text answers; empty if none was found
    chats: tuple[tuple[str, str], ...] = ()
    is_made: bool = False  # by a generator, of sentences that recur; it is held out by its topic

    @property
    def split(self) -> str:
        if self.is_made:
            return SPLITS[is_held_out(self.name.partition(".")[0], one_in=HELD_OUT_TOPICS_ONE_IN)]
        return SPLITS[is_held_out(f"{self.source}/{self.name}", one_in=HELD_OUT_ONE_IN)]


def is_held_out(name: str, *, one_in: int) -> bool:
    return int(sha256(name.encode()).hexdigest()[:8], 16) % one_in == 0
