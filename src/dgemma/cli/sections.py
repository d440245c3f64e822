"""A long text in sections that a model takes one by one, each with some of the text around it.

They are cut where lines end; a line that is too long itself, before a blank if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dgemma.cli.text_file import lines_of

Count = Callable[[str], int]
"""How many tokens a text has."""
Piece = tuple[str, int]
"""A text, and how many it has."""


@dataclass(frozen=True, kw_only=True)
class Section:
    start: int  # of its first character in the whole text
    text: str
    before: str = ""
    behind: str = ""


def sections(text: str, count: Count, *, most: int, around: int) -> list[Section]:
    """Sections of at most `most` tokens, each between texts of at most `around`; joined they are `text`."""
    pieces = [piece for line in lines_of(text) for piece in _pieces(line, count, most)]
    found: list[Section] = []
    first = start = 0
    while first < len(pieces):
        last, tokens = first + 1, pieces[first][1]
        while last < len(pieces) and tokens + pieces[last][1] <= most:
            tokens += pieces[last][1]
            last += 1
        own = "".join(piece for piece, _ in pieces[first:last])
        before = [*_fitting(pieces, range(first - 1, -1, -1), around)]
        behind = "".join(_fitting(pieces, range(last, len(pieces)), around))
        found.append(Section(start=start, text=own, before="".join(before[::-1]), behind=behind))
        first, start = last, start + len(own)
    return found


def _pieces(line: str, count: Count, most: int) -> Iterator[Piece]:
    tokens = count(line)
    if len(line) < 2 or tokens <= most:
        yield line, tokens
        return
    middle = len(line) // 2
    blank = line.find(" ", middle, -1)
    blank = line.rfind(" ", 1, middle) if blank < 0 else blank
    cut = middle if blank < 0 else blank
    yield from _pieces(line[:cut], count, most)
    yield from _pieces(line[cut:], count, most)


def _fitting(pieces: Sequence[Piece], order: range, most: int) -> Iterator[str]:
    """The first ones that together have at most so many tokens."""
    for number in order:
        piece, tokens = pieces[number]
        most -= tokens
        if most < 0:
            return
        yield piece
