"""Plays a trace on a terminal: space, arrows, Home, End, + and -, q."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from dgemma.cli.views.terminal import (
    BEGIN_UPDATE,
    DIM,
    END_UPDATE,
    ERASE_BELOW,
    ERASE_ROW,
    HIDE_CURSOR,
    NO_WRAP,
    RESET_STYLE,
    SHOW_CURSOR,
    WRAP,
    encodable,
    window_size,
)
from dgemma.trace.frames import Cell, Frame
from dgemma.trace.visible import num_columns, visible

HELP = "space: play or pause   left, right: step   Home, End: jump   + -: speed   q: quit"
_ALTERNATE, _MAIN, _TOP_LEFT = "\x1b[?1049h", "\x1b[?1049l", "\x1b[H"
_LEVELS = ("", "\x1b[32m", "\x1b[33m", "\x1b[2m")
_NO_COLOURS = ("\x1b[1m", "", "", "\x1b[2m")
_PINNED, _CORRECTED, _UNDERLINE = "\x1b[34m", "\x1b[31m", "\x1b[4m"
_KEYS = {
    "\x1b[C": "next", "\x1b[D": "back", "\x1b[H": "first", "\x1b[F": "last", "\x1b[1~": "first",
    "\x1b[4~": "last", " ": "play", "q": "quit", "\x03": "quit", "\x04": "quit", "\x1b": "quit",
    "+": "faster", "=": "faster", "-": "slower", "l": "next", "h": "back", "g": "first", "G": "last",
}  # fmt: skip
SPEEDS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # steps per second


class TracePlayer:
    """Which frame is shown, and whether time moves it on."""

    def __init__(self, frames: Sequence[Frame], *, is_playing: bool = True) -> None:
        self._frames = frames
        self.at = 0
        self.is_playing = is_playing and len(frames) > 1
        self._speed = 2

    @property
    def frame(self) -> Frame:
        return self._frames[self.at]

    @property
    def wait_s(self) -> float | None:
        """Until the next step; None: until a key."""
        return 1 / SPEEDS[self._speed] if self.is_playing else None

    @property
    def status(self) -> str:
        state = f"playing, {SPEEDS[self._speed]:g} steps/s" if self.is_playing else "paused"
        return f"{self.at + 1} of {len(self._frames)}, {state}"

    def press(self, key: str) -> bool:
        """Whether to go on."""
        action = _KEYS.get(key)
        if action in ("next", "back", "first", "last"):
            self.is_playing = False
        if action == "next":
            self.at = min(self.at + 1, len(self._frames) - 1)
        elif action == "back":
            self.at = max(self.at - 1, 0)
        elif action == "first":
            self.at = 0
        elif action == "last":
            self.at = len(self._frames) - 1
        elif action == "play":
            if not self.is_playing and self.at == len(self._frames) - 1:
                self.at = 0
            self.is_playing = not self.is_playing
        elif action in ("faster", "slower"):
            self._speed = max(0, min(len(SPEEDS) - 1, self._speed + (1 if action == "faster" else -1)))
        return action != "quit"

    def tick(self) -> None:
        """The time of a step is over."""
        self.at = min(self.at + 1, len(self._frames) - 1)
        self.is_playing = self.at < len(self._frames) - 1


def play(frames: Sequence[Frame], out: TextIO = sys.stdout) -> None:
    """Until the user quits."""
    player = TracePlayer(frames)
    with _raw_terminal(out) as read_key:
        while True:
            out.write(screen(player, *window_size(out), encoding=out.encoding or "ascii"))
            out.flush()
            key = read_key(player.wait_s)
            if key is None:
                player.tick()
            elif not player.press(key):
                return


def screen(player: TracePlayer, width: int, height: int, *, encoding: str) -> str:
    """All that the terminal shows."""
    colours = _NO_COLOURS if os.environ.get("NO_COLOR") else _LEVELS
    frame = player.frame
    rows = [f"{DIM}{frame.title}{RESET_STYLE}", ""]
    before = visible(frame.before, 10_000)
    room = max(1, height - 4)
    body = list(_rows(before, frame.cells, max(1, width - 1), colours))
    rows += body[-room:]
    rows += [""] * (height - 2 - len(rows))
    rows += [f"{DIM}{player.status}   {HELP}"[: width - 1] + RESET_STYLE]
    drawn = f"{ERASE_ROW}\r\n".join(encodable(row, encoding) for row in rows)
    return f"{BEGIN_UPDATE}{NO_WRAP}{_TOP_LEFT}{drawn}{ERASE_BELOW}{WRAP}{END_UPDATE}"


def _rows(before: str, cells: Sequence[Cell], width: int, colours: Sequence[str]) -> Iterator[str]:
    row, column = "", 0
    lines = before.split("\u21b5")
    parts = [
        (line[at : at + width], "", number < len(lines) - 1 and at + width >= len(line))
        for number, line in enumerate(lines)
        for at in range(0, max(1, len(line)), width)
    ]
    for text, style, ends in [
        *parts,
        *((cell.text, _style(cell, colours), cell.ends_line) for cell in cells),
    ]:
        if column and column + num_columns(text) > width:
            yield row
            row, column = "", 0
        row += f"{style}{text}{RESET_STYLE}" if style else text
        column += num_columns(text)
        if ends:
            yield row
            row, column = "", 0
    if row:
        yield row


def _style(cell: Cell, colours: Sequence[str]) -> str:
    if cell.state == "pinned":
        return _PINNED
    if cell.state == "corrected":
        return _CORRECTED
    return colours[cell.level] + (_UNDERLINE if cell.is_changed else "")


@contextmanager
def _raw_terminal(out: TextIO) -> Iterator[Callable[[float | None], str | None]]:
    """Keys as they are pressed, on a screen of its own; the terminal is as before afterwards."""
    source = sys.stdin.fileno()
    saved = termios.tcgetattr(source)
    try:
        tty.setcbreak(source)
        out.write(_ALTERNATE + HIDE_CURSOR)
        yield lambda timeout: _read_key(source, timeout)
    finally:
        termios.tcsetattr(source, termios.TCSADRAIN, saved)
        out.write(SHOW_CURSOR + _MAIN)
        out.flush()


def _read_key(source: int, timeout: float | None) -> str | None:
    """One key, or None after the time. An escape sequence arrives in one read."""
    began = time.monotonic()
    while True:
        left = None if timeout is None else max(0.0, began + timeout - time.monotonic())
        if not select.select([source], [], [], left)[0]:
            return None
        found = os.read(source, 16).decode("ascii", "replace")
        if not found:
            return "q"  # the input has ended
        if found.startswith("\x1b") or len(found) == 1:
            return found
        return found[0]
