"""Token healing: tokens that span the border between a text and a gap.

A text that is cut at any character is cut inside tokens of the vocabulary: "for i in ra" ends with a token
that the tokenization of "range" does not have. So the last token before the gap and the first after it are
removed, and the gap's own first and last token must begin and end with their text.
"""

from __future__ import annotations

from dataclasses import dataclass

from dgemma.text.token_texts import TokenTexts
from dgemma.text.tokenizer import Tokenizer

Ids = tuple[int, ...]

_LONGEST_RUN = 8  # maximum number of tokens removed


@dataclass(frozen=True, kw_only=True)
class Borders:
    """Tokens before and after a gap, and what the gap must begin and end with."""

    before: Ids
    after: Ids
    head: str = ""  # removed from the text before: the gap begins with it
    tail: str = ""  # removed from the text after: the gap ends with it
    first: Ids = ()  # tokens that may be the gap's first; empty: any
    last: Ids = ()
    head_tokens: Ids = ()  # what was removed, as it was
    tail_tokens: Ids = ()

    @property
    def run(self) -> Ids:
        """Removed from the text before, if several tokens: they may also stay."""
        return self.head_tokens if len(self.head_tokens) > 1 else ()

    @property
    def fewest(self) -> int:
        """The least number of tokens a gap can have."""
        return 1 if self.head or self.tail else 0

    def sets(self, length: int) -> dict[int, Ids] | None:
        """Allowed tokens by position of a gap of this length; None: no tokens fit."""
        if not length or not self.fewest:
            return {} if length or not self.fewest else None
        if length == 1 and self.first and self.last:
            both = tuple(sorted(set(self.first) & set(self.last)))
            return {0: both} if both else None
        found = {0: self.first} if self.first else {}
        return {**found, length - 1: self.last} if self.last else found

    def inside(self, text: str) -> str | None:
        """What a gap's text adds between prefix and suffix; None: it does not contain the removed text."""
        if len(text) < len(self.head) + len(self.tail):
            return None
        if not text.startswith(self.head) or not text.endswith(self.tail):
            return None
        return text[len(self.head) : len(text) - len(self.tail)]


def plain_borders(tokenizer: Tokenizer, before: str, after: str) -> Borders:
    return Borders(before=tuple(tokenizer.encode(before)), after=tuple(tokenizer.encode(after)))


def healed_borders(tokenizer: Tokenizer, table: TokenTexts, before: str, after: str) -> Borders:
    """Borders without the tokens at them, where other tokens extend their text."""
    plain = plain_borders(tokenizer, before, after)
    count, first = _taken_back(table, plain.before)
    tail = table.text_of(plain.after[0]) if plain.after else None
    last = table.ending_with(tail) if tail else ()
    heals_tail = len(last) > 1
    return Borders(
        before=plain.before[: len(plain.before) - count],
        after=plain.after[1:] if heals_tail else plain.after,
        head=_text(table, plain.before[len(plain.before) - count :]),
        tail=(tail or "") if heals_tail else "",
        first=first,
        last=last if heals_tail else (),
        head_tokens=plain.before[len(plain.before) - count :],
        tail_tokens=plain.after[:1] if heals_tail else (),
    )


def _taken_back(table: TokenTexts, before: Ids) -> tuple[int, Ids]:
    """How many of the last tokens are removed, and which tokens begin with their text.

    One, if any extends it; all of the run of letters it is part of ("ret" and "ur"), if one token ("return")
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
        tokens = table.beginning_with(text) if text else ()
        if len(tokens) > 1 or (tokens and count > 1):
            return count, tokens
    return 0, ()


def _text(table: TokenTexts, ids: Ids) -> str:
    texts = [table.text_of(id_) for id_ in ids]
    return "" if None in texts else "".join(text or "" for text in texts)
