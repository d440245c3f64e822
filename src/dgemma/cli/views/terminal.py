"""Text on a terminal: escape sequences, widths and wrapping, styled text, and text made safe to print."""

from __future__ import annotations

import os
import signal
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TextIO

# Escape sequences that all terminals of the last thirty years support; the first two are ignored elsewhere.
BEGIN_UPDATE, END_UPDATE = "\x1b[?2026h", "\x1b[?2026l"  # show a repaint at once, not half of it
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
NO_WRAP, WRAP = "\x1b[?7l", "\x1b[?7h"
SAVE_CURSOR, RESTORE_CURSOR = "\x1b7", "\x1b8"
ERASE_ROW, ERASE_BELOW = "\x1b[K", "\x1b[J"
CURSOR_RIGHT, SCROLL_DOWN, RESET_STYLE, DIM = "\x1b[C", "\x1bD", "\x1b[0m", "\x1b[2m"

_PICTURES: dict[int, str | None] = {
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"},
    ord("\r"): None,  # a line's end is \n; shown, \r would be noise in all text from Windows
    0x7F: "\u2421",
    **dict.fromkeys(range(0x80, 0xA0), "\ufffd"),
}
_ZWJ, _EMOJI_STYLE = "\u200d", "\ufe0f"
_TAB_CELLS = 8

Row = list[tuple[str, str]]
"""(what is drawn in one go, its style) from left to right."""


Role = Literal["", "new", "old", "place", "head"]
StyledText = tuple[str, Role]

_ROLE_COLOURS = {"new": "\x1b[32m", "old": "\x1b[31m", "place": "\x1b[36m", "head": "\x1b[1m"}
_ROLE_NO_COLOURS = {"new": "\x1b[1m", "old": "\x1b[2m", "place": "", "head": "\x1b[1m"}


def print_styled(parts: Sequence[StyledText]) -> None:
    """Print the parts in order: coloured and made safe on a terminal, byte for byte in a pipe.

    A terminal gets a newline at the end if there is none.
    """
    out = sys.stdout
    text = "".join(part for part, _ in parts)
    if not out.isatty():
        out.flush()
        out.buffer.write(text.encode("utf-8", "surrogateescape"))  # in the names of files
        out.buffer.flush()
        return
    styles = _styles()
    encoding = out.encoding or "ascii"
    for part, role in parts:
        style = styles.get(role, "")
        # Line by line: a style that runs over a line's end colours the rest of the row.
        for line in printable(part, encoding).splitlines(keepends=True):
            body = line.rstrip("\n")
            out.write(f"{style}{body}{RESET_STYLE}{line[len(body) :]}" if style and body else line)
    if text and not text.endswith("\n"):
        out.write("\n")
    out.flush()


def supports_escapes() -> bool:
    """Whether the environment names a terminal that interprets escape sequences."""
    terminal = os.environ.get("TERM", "")
    # Windows sets no TERM; Windows Terminal, which interprets escape sequences, sets WT_SESSION.
    return terminal != "dumb" and bool(terminal or os.environ.get("WT_SESSION"))


def _styles() -> dict[str, str]:
    if not supports_escapes():
        return {}
    return _ROLE_NO_COLOURS if os.environ.get("NO_COLOR") else _ROLE_COLOURS


def printable(text: str, encoding: str) -> str:
    """`text` with no control characters but \\n and \\t, or that it cannot be sent."""
    return encodable(encodable(text, encoding).translate(_PICTURES), encoding)


def lay_out(segments: Iterable[tuple[str, str]], width: int, *, whole_words: bool = False) -> list[Row]:
    """(text, style) segments cut into rows as a terminal of `width` cells wraps them.

    whole_words: cut at spaces, which are left out there; a word that is longer than a row is broken.
    """
    rows: list[Row] = [[]]
    column = 0
    for cluster, style in clusters(segments):
        if cluster == "\n":
            rows.append([])
            column = 0
            continue
        cells = _cluster_cells(cluster)
        if cluster == "\t":
            cells = max(1, min(_TAB_CELLS - column % _TAB_CELLS, width - column))
        if column and column + cells > width:
            is_space = cluster == " "
            rows.append(_cut_last_word(rows[-1]) if whole_words and not is_space else [])
            column = sum(_cluster_cells(part) for part, _ in rows[-1])
            if whole_words and is_space:
                continue
        rows[-1].append((" " * cells if cluster == "\t" else cluster, style))
        column += cells
    return rows


def _cut_last_word(row: Row) -> Row:
    """Take the letters after its last space off a row; none, if all of it is one word."""
    begin = next((at for at in range(len(row), 0, -1) if row[at - 1][0].isspace()), 0)
    if not begin:
        return []
    word = row[begin:]
    del row[begin:]
    return word


def clusters(segments: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The characters of one glyph stay together, in the style of its first character."""
    cluster, first_style = "", ""
    for text, style in segments:
        for char in text:
            if cluster and _joins(cluster, char):
                cluster += char
                continue
            if cluster:
                yield cluster, first_style
            cluster, first_style = char, style
    if cluster:
        yield cluster, first_style


def _joins(cluster: str, char: str) -> bool:
    if char in "\n\t" or cluster in "\n\t":
        return False
    if _cells(char) == 0 or cluster[-1] == _ZWJ:
        return True
    skin_tone = "\U0001f3fb" <= char <= "\U0001f3ff"
    return skin_tone or (_is_flag_half(char) and len(cluster) == 1 and _is_flag_half(cluster))


def _is_flag_half(char: str) -> bool:
    return "\U0001f1e6" <= char <= "\U0001f1ff"


def _cluster_cells(cluster: str) -> int:
    """The most cells a terminal may give it: some draw a family of emoji as one, some side by side."""
    cells = sum(map(_cells, cluster))
    return max(2, cells) if _EMOJI_STYLE in cluster else cells


def _cells(char: str) -> int:
    if char < "\x7f":
        return 1
    if "\u1160" <= char <= "\u11ff" or (unicodedata.category(char) in ("Mn", "Me", "Cf") and char != "\xad"):
        return 0
    emoji_to_come = "\U0001f000" <= char <= "\U0001faff" and unicodedata.category(char) == "Cn"
    return 2 if emoji_to_come or unicodedata.east_asian_width(char) in "WF" else 1


def has_certain_width(cluster: str) -> bool:
    """Do all terminals give it the cells that we count? Letters and plain signs, Latin accents included."""
    base, marks = cluster[0], cluster[1:]
    category = unicodedata.category(base)
    known = base < "\x7f" or category[0] in "LNP" or category in ("Zs", "Sc", "Sm")
    return known and _cells(base) > 0 and all("\u0300" <= mark <= "\u036f" for mark in marks)


def wrapping_clusters(rows: list[Row], index: int) -> list[str]:
    """What decides where the terminal wraps row `index`: its clusters and the first one after it."""
    return [cluster for cluster, _ in [*rows[index], rows[index + 1][0]]]


def without_tabs(text: str, width: int) -> str:
    return "".join(cluster for row in lay_out([(text, "")], width) for cluster, _ in row)


def drawn_row(row: Row) -> str:
    drawn, current = [], ""
    for cluster, style in row:
        if style != current:
            drawn.append((RESET_STYLE if current else "") + style)
            current = style
        drawn.append(cluster)
    return "".join(drawn) + (RESET_STYLE if current else "")


def styled(text: str, style: str) -> str:
    return f"{style}{text}{RESET_STYLE}" if style and text else text


def encodable(text: str, encoding: str) -> str:
    return text.encode(encoding, "replace").decode(encoding)


def window_size(out: TextIO) -> tuple[int, int]:
    try:
        width, height = os.get_terminal_size(out.fileno())
    except OSError:
        width, height = 0, 0
    return (width or 80), (height or 24)  # a serial line reports 0


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until a repaint is whole: half an escape sequence, or a line twice, would stay."""
    normal = signal.getsignal(signal.SIGINT)
    if normal is not signal.default_int_handler:
        yield
        return
    came: list[bool] = []
    try:
        signal.signal(signal.SIGINT, lambda *_: came.append(True))
    except ValueError:  # not the main thread, which alone gets Ctrl-C
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, normal)
    if came:
        raise KeyboardInterrupt


def switch_off_echo() -> Callable[[], None]:
    """Keys typed during an answer wait for the next prompt; echoed, they would move our cursor."""
    try:
        import termios
    except ImportError:  # Windows
        return lambda: None
    try:
        keyboard = sys.stdin.fileno()
        before = termios.tcgetattr(keyboard)
        in_front = os.tcgetpgrp(keyboard) == os.getpgrp()
    except (OSError, ValueError, termios.error):  # no terminal
        return lambda: None
    if not in_front:  # in the background, setting it would stop us
        return lambda: None
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(keyboard, termios.TCSADRAIN, silent)
    return lambda: termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
