"""An answer while it is written: on a terminal the canvas settling, in a pipe the plain text alone.

Final text leaves in the normal flow, so that scrollback and copying work. Below it stands the live
region: the unfinished last line, the running canvas coloured by confidence, one status line. At rest the
hidden cursor stands on the region's first cell. A terminal that is resized moves the cursor along with
the text, so all that a repaint has to erase is behind the cursor, whatever the new size. The region is
drawn with automatic wrapping switched off: a character of another width than we think cannot break a row.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self, TextIO

from dgemma.events import Commit, Draft, Event, Finish

REPAINTS_PER_SECOND = 15
SETTLED_NATS = 0.1  # at most so unsure, a token of a draft counts as settled

# Escape sequences that all terminals of the last thirty years know; the first two are ignored elsewhere.
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"  # show a repaint at once, not half of it
_HIDE, _SHOW = "\x1b[?25l", "\x1b[?25h"
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
_SAVE, _RESTORE = "\x1b7", "\x1b8"
_ERASE_ROW, _ERASE_BELOW = "\x1b[K", "\x1b[J"
_RIGHT, _SCROLL_DOWN, _RESET, _DIM = "\x1b[C", "\x1bD", "\x1b[0m", "\x1b[2m"

# Style of a draft's token by its entropy in nats; ln 2 is a toss-up between two words.
_COLOURS = ((SETTLED_NATS, ""), (0.7, "\x1b[32m"), (2.0, "\x1b[33m"))
_NO_COLOURS = ((SETTLED_NATS, "\x1b[1m"), (2.0, ""))

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


def open_view(pieces: Callable[[Sequence[int]], list[str]], max_steps: int) -> LiveView | PlainView:
    """The view that stdout can show."""
    terminal = os.environ.get("TERM", "")
    # Windows sets no TERM; of its terminals, the one that obeys escape sequences says who it is.
    able = terminal != "dumb" and bool(terminal or os.environ.get("WT_SESSION"))
    if able and sys.stdout.isatty():
        return LiveView(sys.stdout, pieces, max_steps, colour=not os.environ.get("NO_COLOR"))
    return PlainView(sys.stdout)


class PlainView:
    """Final text as it comes, and a newline at the end."""

    live = False

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._open = False
        self._empty = True

    def __enter__(self) -> Self:
        return self

    def show(self, event: Event) -> None:
        if isinstance(event, Commit) and event.text:
            self._empty = False
            self._open = not event.text.endswith("\n")
            encoding = self._out.encoding or "utf-8"
            # In a pipe the text is as the model wrote it; a terminal must not obey it.
            safe = printable(event.text, encoding) if self._out.isatty() else _encodable(event.text, encoding)
            self._out.write(safe)
            self._out.flush()
        elif isinstance(event, Finish):
            self._open |= self._empty

    def __exit__(self, *_: object) -> None:
        if self._open:
            self._out.write("\n")
            self._out.flush()


class LiveView:
    """The running canvas on a terminal. After it, the screen holds what PlainView would have printed."""

    live = True

    def __init__(
        self,
        out: TextIO,
        pieces: Callable[[Sequence[int]], list[str]],
        max_steps: int,
        *,
        colour: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = out
        self._encoding = out.encoding or "ascii"
        self._pieces = pieces
        self._max_steps = max_steps
        self._styles = _COLOURS if colour else _NO_COLOURS
        self._clock = clock
        self._started = clock()
        self._last_paint = float("-inf")
        self._lines: list[tuple[str, str]] = []  # finished, not yet printed: (text, style)
        self._line, self._line_style = "", ""  # the unfinished one
        self._draft: Draft | None = None
        self._num_final = 0
        self._empty = True  # no text of the answer yet
        self._finished = False
        self._continued = False  # rows of the unfinished line have been printed
        self._loose = False  # ... and then the window's width changed: in which column are we?
        self._width = 0

    def __enter__(self) -> Self:
        with _uninterrupted():
            self._restore_echo = _switch_off_echo()
            self._out.write(_HIDE)
            self._paint()
        return self

    def show(self, event: Event) -> None:
        with _uninterrupted():
            if isinstance(event, Draft):
                self._draft = event
            elif isinstance(event, Commit):
                self._draft = None
                self._num_final += len(event.tokens)
                self._empty &= not event.text
                self._add(event.thought, _DIM)
                self._add(event.text, "")
            else:
                self._finished = True
            if self._lines or self._clock() - self._last_paint >= 1 / REPAINTS_PER_SECOND:
                self._paint()

    def __exit__(self, *_: object) -> None:
        with _uninterrupted():
            if self._line or (self._finished and self._empty):
                self._end_line()
            self._draft = None
            self._paint(with_region=False)
            self._out.write(_SHOW)
            self._out.flush()
            self._restore_echo()

    def _add(self, text: str, style: str) -> None:
        """Final text. A thought and an answer never share a line."""
        text = printable(text, self._encoding)
        if text and style != self._line_style:
            if self._line:
                self._end_line()
            self._line_style = style
        *whole, rest = text.split("\n")
        for part in whole:
            self._line += part
            self._end_line()
        self._line += rest

    def _end_line(self) -> None:
        self._lines.append((self._line, self._line_style))
        self._line = ""

    def _paint(self, *, with_region: bool = True) -> None:
        """Erase the region, print what is final in the flow, draw the region anew: in one write."""
        self._last_paint = self._clock()
        width, height = _window(self._out)
        self._loose |= self._continued and width != self._width
        self._width = width
        frame = [_BEGIN, self._erased()]
        for text, style in self._lines:
            # A tab that reaches the right edge would overwrite: there, spaces.
            fits = "\t" not in text or (not self._loose and len(lay_out([(text, "")], width)) == 1)
            frame.append(_styled(text if fits else _without_tabs(text, width), style) + "\n")
            self._continued = self._loose = False
        self._lines = []
        if with_region:
            frame += [self._printed_rows(width, height), self._region(width, height)]
        frame.append(_END)
        self._out.write("".join(frame))
        self._out.flush()

    def _erased(self) -> str:
        """Two ways around tmux. Where a line was wrapped, a row that is erased from its first cell on is no
        longer part of that line: the cell stays, and is drawn over. And "erase all below" in a window's
        first cell means "clear", with a copy of the screen for the history: it begins one row lower."""
        if self._loose:
            return f"{_SAVE}{_RIGHT}{_ERASE_BELOW}{_RESTORE}"
        erase_lower = f"\x1b[B\r{_ERASE_BELOW}{_RESTORE}"
        if self._continued:
            # A resize may have left us in the last row: have one below.
            return f"\r{_SCROLL_DOWN}\x1b[A{_SAVE}{_RIGHT}{_ERASE_ROW}{erase_lower}"
        return f"\r{_SAVE}{_ERASE_ROW}{erase_lower}"

    def _printed_rows(self, width: int, height: int) -> str:
        """Full rows of a long unfinished line, which join the flow.

        The terminal itself has to wrap them, else a copy would hold line breaks. So the next row's first
        character is printed too, then the cursor goes back upon it: the region draws it again.
        """
        unclear = self._loose or "\t" in self._line or height < 3  # then wait for the line's end
        rows = [] if unclear else lay_out([(self._line, "")], width)
        num_rows = 0
        while num_rows + 1 < len(rows) and all(map(_is_certain, _wrapping(rows, num_rows))):
            num_rows += 1
        if num_rows < 1:
            return ""
        head = "".join(cluster for row in rows[:num_rows] for cluster, _ in row)
        self._line = self._line[len(head) :]
        self._continued = True
        return _styled(head + rows[num_rows][0][0], self._line_style) + "\r"

    def _region(self, width: int, height: int) -> str:
        # Never the whole window: its first row stays the flow's.
        room = height - 1 - self._loose
        if room < 1:
            return ""
        # Somewhere in a row we draw only what stands there already, a character, and go on below.
        first = next(_clusters([(self._line, "")]))[0] if self._loose else ""
        segments = [(self._line[len(first) :], self._line_style)]
        if self._draft is not None:
            guesses = self._pieces(self._draft.tokens)
            for piece, entropy in zip(guesses, self._draft.entropy, strict=True):
                style = next((style for most, style in self._styles if entropy <= most), _DIM)
                segments.append((printable(piece, self._encoding), style))
        body = lay_out(segments, width) if any(text for text, _ in segments) else []
        rows = [_drawn(row) for row in body[max(0, len(body) - room + 1) :]]
        rows.append(_styled(self._status(width), _DIM))
        rows[0] = rows[0] or " "  # over the cell that was not erased
        num_down = len(rows) - 1 + self._loose
        # Make room first, scrolling if need be; then nothing scrolls between save and restore.
        make_room = _SCROLL_DOWN * num_down + f"\x1b[{num_down}A" if num_down else ""
        drawn = "\r\n".join([_styled(first, self._line_style), *rows] if self._loose else rows)
        return f"{_NO_WRAP}{make_room}{_SAVE}{drawn}{_RESTORE}{_WRAP}"

    def _status(self, width: int) -> str:
        elapsed_s = max(self._clock() - self._started, 1e-9)
        rate = f"{self._num_final / elapsed_s:.1f} tok/s"
        if self._draft is not None:
            settled = sum(entropy <= SETTLED_NATS for entropy in self._draft.entropy)
            share = settled / max(1, len(self._draft.entropy))
            parts = [
                f"canvas {self._draft.canvas + 1}",
                f"step {self._draft.step}/{self._max_steps}",
                f"{share:.0%} settled",
                rate,
                f"drafting {len(self._draft.tokens)} tokens",
            ]
        elif self._num_final:
            parts = [f"{self._num_final} tokens", rate]
        else:
            parts = ["reading the prompt"]
        while len(parts) > 1 and len(" | ".join(parts)) > width:
            parts.pop()
        return " | ".join(parts)[:width]


def printable(text: str, encoding: str) -> str:
    """`text` with nothing in it that a terminal obeys but \\n and \\t, or that it cannot be sent."""
    return _encodable(_encodable(text, encoding).translate(_PICTURES), encoding)


def lay_out(segments: Iterable[tuple[str, str]], width: int) -> list[Row]:
    """(text, style) segments cut into rows as a terminal of `width` cells wraps them."""
    rows: list[Row] = [[]]
    column = 0
    for cluster, style in _clusters(segments):
        if cluster == "\n":
            rows.append([])
            column = 0
            continue
        cells = _cluster_cells(cluster)
        if cluster == "\t":
            cells = max(1, min(_TAB_CELLS - column % _TAB_CELLS, width - column))
        if column and column + cells > width:
            rows.append([])
            column = 0
        rows[-1].append((" " * cells if cluster == "\t" else cluster, style))
        column += cells
    return rows


def _clusters(segments: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """What one glyph is made of stays in one piece, in the style of its first character."""
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


def _is_certain(cluster: str) -> bool:
    """Do all terminals give it the cells that we count? Letters and plain signs, Latin accents included."""
    base, marks = cluster[0], cluster[1:]
    category = unicodedata.category(base)
    known = base < "\x7f" or category[0] in "LNP" or category in ("Zs", "Sc", "Sm")
    return known and _cells(base) > 0 and all("\u0300" <= mark <= "\u036f" for mark in marks)


def _wrapping(rows: list[Row], index: int) -> list[str]:
    """What decides where the terminal wraps row `index`: its clusters and the first one behind it."""
    return [cluster for cluster, _ in [*rows[index], rows[index + 1][0]]]


def _without_tabs(text: str, width: int) -> str:
    return "".join(cluster for row in lay_out([(text, "")], width) for cluster, _ in row)


def _drawn(row: Row) -> str:
    drawn, current = [], ""
    for cluster, style in row:
        if style != current:
            drawn.append((_RESET if current else "") + style)
            current = style
        drawn.append(cluster)
    return "".join(drawn) + (_RESET if current else "")


def _styled(text: str, style: str) -> str:
    return f"{style}{text}{_RESET}" if style and text else text


def _encodable(text: str, encoding: str) -> str:
    return text.encode(encoding, "replace").decode(encoding)


def _window(out: TextIO) -> tuple[int, int]:
    try:
        width, height = os.get_terminal_size(out.fileno())
    except OSError:
        width, height = 0, 0
    return (width or 80), (height or 24)  # a serial line does not know, and says 0


@contextmanager
def _uninterrupted() -> Iterator[None]:
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


def _switch_off_echo() -> Callable[[], None]:
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
