"""Where given text meets a gap: words that would stand across the border are healed.

A text that is cut anywhere is cut within words of the vocabulary: "for i in ra" ends with a word that "range"
would never leave behind. So the last word before the gap and the first behind it are taken back, and the
gap's own first and last word must begin and end with their text.
"""

from __future__ import annotations

from dataclasses import dataclass

from dgemma.text.piece_table import PieceTable
from dgemma.text.tokenizer import Tokenizer

Ids = tuple[int, ...]

_LONGEST_RUN = 8  # words that are taken back at most


@dataclass(frozen=True, kw_only=True)
class Borders:
    """Tokens before and behind a gap, and what the gap must begin and end with."""

    before: Ids
    behind: Ids
    head: str = ""  # taken back from the text before: the gap begins with it
    tail: str = ""  # taken back from the text behind: the gap ends with it
    first: Ids = ()  # words that may be the gap's first; empty: any
    last: Ids = ()
    run: Ids = ()  # what was taken back of the text before, where that is several words: they may also stay

    @property
    def fewest(self) -> int:
        """The least number of words a gap can have."""
        return 1 if self.head or self.tail else 0

    def sets(self, length: int) -> dict[int, Ids] | None:
        """Which words may stand at which position of a gap of this length; None: none could."""
        if not length or not self.fewest:
            return {} if length or not self.fewest else None
        if length == 1 and self.first and self.last:
            both = tuple(sorted(set(self.first) & set(self.last)))
            return {0: both} if both else None
        found = {0: self.first} if self.first else {}
        return {**found, length - 1: self.last} if self.last else found

    def inside(self, text: str) -> str | None:
        """What a gap's text adds between the given ends; None: it does not hold them."""
        if len(text) < len(self.head) + len(self.tail):
            return None
        if not text.startswith(self.head) or not text.endswith(self.tail):
            return None
        return text[len(self.head) : len(text) - len(self.tail)]


def plain_borders(tokenizer: Tokenizer, before: str, behind: str) -> Borders:
    return Borders(before=tuple(tokenizer.encode(before)), behind=tuple(tokenizer.encode(behind)))


def healed_borders(tokenizer: Tokenizer, table: PieceTable, before: str, behind: str) -> Borders:
    """Borders with the words at them taken back, where others extend their text."""
    plain = plain_borders(tokenizer, before, behind)
    count, first = _taken_back(table, plain.before)
    tail = table.text_of(plain.behind[0]) if plain.behind else None
    last = table.ending_with(tail) if tail else ()
    heals_tail = len(last) > 1
    return Borders(
        before=plain.before[: len(plain.before) - count],
        behind=plain.behind[1:] if heals_tail else plain.behind,
        head=_text(table, plain.before[len(plain.before) - count :]),
        tail=(tail or "") if heals_tail else "",
        first=first,
        last=last if heals_tail else (),
        run=plain.before[len(plain.before) - count :] if count > 1 else (),
    )


def _taken_back(table: PieceTable, before: Ids) -> tuple[int, Ids]:
    """How many of the last words are taken back, and which ones begin with their text.

    One, if any extends it; all of the run of letters it is part of ("ret" and "ur"), if one word ("return")
    begins with the whole run.
    """
    run = 0
    while run < min(len(before), _LONGEST_RUN):
        text = table.text_of(before[len(before) - run - 1])
        if text is None or not text.lstrip(" ").replace("_", "a").isalnum():
            break
        run += 1
        if text.startswith(" "):
            break
    for count in dict.fromkeys((run, 1)):
        if not 0 < count <= len(before):
            continue
        text = _text(table, before[len(before) - count :])
        words = table.beginning_with(text) if text else ()
        if len(words) > 1 or (words and count > 1):
            return count, words
    return 0, ()


def _text(table: PieceTable, ids: Ids) -> str:
    texts = [table.text_of(id_) for id_ in ids]
    return "" if None in texts else "".join(text or "" for text in texts)
