"""A model's text where it must not act: control, format and bidirectional characters become visible signs."""

from __future__ import annotations

import unicodedata

MAX_CHARS = 60  # of one token as it is shown

_SIGNS = {"\n": "\u21b5", "\t": "\u21e5", "\r": "\u240d"}
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
_MAX_MARKS = 2  # combining marks on one character; more would cover neighbours


def visible(text: str, most: int = MAX_CHARS) -> str:
    """The text in one line, every character of it to be seen; a long one is cut."""
    found: list[str] = []
    marks = 0
    for char in text:
        category = unicodedata.category(char)
        marks = marks + 1 if category.startswith("M") else 0
        if marks > _MAX_MARKS:
            continue
        if len(found) >= most:
            found.append("\u2026")
            break
        if char in _SIGNS:
            found.append(_SIGNS[char])
        elif category in _HIDDEN:
            code = ord(char)
            found.append(chr(0x2400 + code) if code < 32 else "\ufffd")
        elif category == "Zs":
            found.append(" ")
        else:
            found.append(char)
    return "".join(found)


def num_columns(text: str) -> int:
    """Columns that the text takes in a monospaced font."""
    return sum(
        0
        if unicodedata.category(char).startswith("M")
        else 1 + (unicodedata.east_asian_width(char) in ("W", "F"))
        for char in text
    )
