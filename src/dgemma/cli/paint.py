"""Pieces of text on stdout: coloured on a terminal, which never obeys them; in a pipe their very bytes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Literal

from dgemma.cli.live_view import printable

Role = Literal["", "new", "old", "place", "head"]
Piece = tuple[str, Role]

_RESET = "\x1b[0m"
_COLOURS = {"new": "\x1b[32m", "old": "\x1b[31m", "place": "\x1b[36m", "head": "\x1b[1m"}
_NO_COLOURS = {"new": "\x1b[1m", "old": "\x1b[2m", "place": "", "head": "\x1b[1m"}


def show(pieces: Sequence[Piece]) -> None:
    """Print them one behind the other. A terminal gets a newline at the end, if there is none."""
    out = sys.stdout
    text = "".join(piece for piece, _ in pieces)
    if not out.isatty():
        out.flush()
        out.buffer.write(text.encode("utf-8", "surrogateescape"))  # in the names of files
        out.buffer.flush()
        return
    styles = _styles()
    encoding = out.encoding or "ascii"
    for piece, role in pieces:
        style = styles.get(role, "")
        # Line by line: a style that runs over a line's end colours the rest of the row.
        for line in printable(piece, encoding).splitlines(keepends=True):
            body = line.rstrip("\n")
            out.write(f"{style}{body}{_RESET}{line[len(body) :]}" if style and body else line)
    if text and not text.endswith("\n"):
        out.write("\n")
    out.flush()


def _styles() -> dict[str, str]:
    terminal = os.environ.get("TERM", "")
    if terminal == "dumb" or not (terminal or os.environ.get("WT_SESSION")):
        return {}
    return _NO_COLOURS if os.environ.get("NO_COLOR") else _COLOURS
