"""Two texts as a unified diff that `patch -p1` and `git apply` take; coloured on a terminal."""

from __future__ import annotations

import difflib
import json

from dgemma.cli.paint import Piece, Role
from dgemma.cli.text_file import lines_of

_ROLES: dict[str, Role] = {"+": "new", "-": "old", "@": "place"}


def diff_pieces(old: str, new: str, name: str) -> list[Piece]:
    """Nothing, where the texts are the same."""
    diff = difflib.unified_diff(lines_of(old), lines_of(new))
    if next(diff, None) is None:
        return []
    next(diff)
    pieces: list[Piece] = [(f"--- {_shown('a', name)}\n", "head"), (f"+++ {_shown('b', name)}\n", "head")]
    for line in diff:
        whole = line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        pieces.append((whole, _ROLES.get(line[0], "")))
    return pieces


def _shown(side: str, name: str) -> str:
    name = f"{side}/{name.lstrip('/')}"
    if any(not char.isprintable() or char in '"\\' for char in name):
        return json.dumps(name, ensure_ascii=False)
    return f"{name}\t" if " " in name else name  # or patch would end it there
