"""A terminal to test with: a real pseudo-terminal, behind it pyte, made stricter where it is lenient; and a
model that writes what a script says."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import random
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import pyte
from pyte import modes
from wcwidth import wcwidth

from dgemma.events import Answer, Commit, Draft, Event, Finish, FinishReason, Timings
from dgemma.params import GenerationParams

# In no text; the reader of a pseudo-terminal stops at it.
MARK = "\x1b_here\x1b\\"


class Terminal(pyte.HistoryScreen):
    """pyte's screen, with what matters here as real terminals have it.

    - Characters without width never drop the text behind them; a wide one is never cut by the edge.
    - A full row waits with its wrap for the next character, and forgets that when the cursor moves.
    - Where terminals differ it is the difficult one: "erase below" in the first cell keeps a copy of the
      screen, and a row erased from its first cell on is no longer part of a wrapped line (both tmux).
    - Rows know whether the text runs on (`wrapped`), so that `text()` can join them.
    - A resized window reflows its text and takes the cursor along (`reflow`), or crops it, as xterm does.
    - `joins`: emoji sequences share two cells, as in newer terminals; else each code point has its own.
    - Dim, which pyte does not know, is kept as italics.
    """

    def __init__(self, columns: int, rows: int, *, joins: bool = False, reflow: bool = True) -> None:
        self.joins, self.reflow = joins, reflow
        super().__init__(columns, rows, history=100_000)

    # Drawing

    def draw(self, data: str) -> None:
        for char in data:
            width = max(0, wcwidth(char))
            if self._belongs_to_the_last(char, width):
                self._extend_last(char)
                continue
            if self.cursor.x + width > self.columns:
                if modes.DECAWM in self.mode:
                    self.buffer[self.cursor.y].wrapped = True  # type: ignore[attr-defined]
                    self.cursor.x = 0
                    self._next_row()
                else:
                    self.cursor.x = self.columns - width
            line = self.buffer[self.cursor.y]
            line[self.cursor.x] = self.cursor.attrs._replace(data=char)
            if width == 2:
                line[self.cursor.x + 1] = self.cursor.attrs._replace(data="")
            self.cursor.x += width

    def _last_cell(self) -> int | None:
        x = self.cursor.x - 1
        while x >= 0 and self.buffer[self.cursor.y][x].data == "":
            x -= 1
        return x if x >= 0 else None

    def _belongs_to_the_last(self, char: str, width: int) -> bool:
        if width == 0:
            return True
        x = self._last_cell()
        if not self.joins or x is None:
            return False
        last = self.buffer[self.cursor.y][x].data
        flag = (
            "\U0001f1e6" <= char <= "\U0001f1ff" and len(last) == 1 and "\U0001f1e6" <= last <= "\U0001f1ff"
        )
        return last.endswith("\u200d") or "\U0001f3fb" <= char <= "\U0001f3ff" or flag

    def _extend_last(self, char: str) -> None:
        x = self._last_cell()
        if x is None:
            return
        line = self.buffer[self.cursor.y]
        line[x] = line[x]._replace(data=line[x].data + char)
        grows = self.joins and (char == "\ufe0f" or "\U0001f1e6" <= char <= "\U0001f1ff")
        if grows and self.cursor.x == x + 1 < self.columns:
            line[x + 1] = line[x]._replace(data="")
            self.cursor.x += 1

    def _next_row(self) -> None:
        if self.cursor.y == self.lines - 1:
            self.history.top.append(self.buffer[0])
        pyte.Screen.index(self)

    # Moving: the cursor stands on a cell

    def _stand(self) -> None:
        self.cursor.x = min(self.cursor.x, self.columns - 1)

    def cursor_up(self, count: int | None = None) -> None:
        self._stand()
        super().cursor_up(count)

    def cursor_down(self, count: int | None = None) -> None:
        self._stand()
        super().cursor_down(count)

    def index(self) -> None:
        self._stand()
        self._next_row()

    def save_cursor(self) -> None:
        self._stand()
        self.savepoints.clear()  # a terminal has one, not a stack
        super().save_cursor()

    def tab(self) -> None:
        self._stand()
        self.cursor.x = min((self.cursor.x // 8 + 1) * 8, self.columns - 1)

    def erase_in_line(self, how: int = 0, private: bool = False) -> None:
        assert how in (0, 2)
        self._erase_row(self.cursor.y, 0 if how == 2 else min(self.cursor.x, self.columns - 1))

    def erase_in_display(self, how: int = 0, *args: Any, **kwargs: Any) -> None:
        assert how == 0
        self._stand()
        if (self.cursor.x, self.cursor.y) == (0, 0):  # tmux takes it for "clear", and keeps a copy
            self.history.top.extend(self.buffer.pop(y) for y in range(self.lines) if self.buffer[y])
        for y in range(self.cursor.y, self.lines):
            self._erase_row(y, self.cursor.x if y == self.cursor.y else 0)

    def _erase_row(self, y: int, start: int) -> None:
        self.buffer[y].wrapped = False  # type: ignore[attr-defined]
        if start == 0 and y == self.cursor.y:  # as in tmux: the line above no longer runs on here
            above = (
                self.buffer[y - 1] if y else self.history.top[-1] if self.history.top else self._empty_row()
            )
            above.wrapped = False
        for x in range(start, self.columns):
            self.buffer[y].pop(x, None)

    def select_graphic_rendition(self, *attrs: int, private: bool = False) -> None:
        super().select_graphic_rendition(*(3 if code == 2 else code for code in attrs))

    # Resizing

    def resize(self, lines: int | None = None, columns: int | None = None) -> None:
        lines, columns = lines or self.lines, columns or self.columns
        rows = [*self.history.top, *(self.buffer[y] for y in range(self.lines))]
        self._stand()
        at = len(self.history.top) + self.cursor.y, self.cursor.x
        if columns != self.columns:
            rows, at = (
                self._reflowed(rows, at, columns) if self.reflow else (self._cropped(rows, columns), at)
            )
        # The cursor keeps its row if it can; rows that then fall off at the bottom are lost.
        first = max(0, at[0] - min(self.cursor.y, lines - 1))
        self.history.top.clear()
        self.history.top.extend(rows[:first])
        self.buffer.clear()
        for y, row in enumerate(rows[first : first + lines]):
            self.buffer[y] = row
        self.lines, self.columns = lines, columns
        self.cursor.y, self.cursor.x = at[0] - first, min(at[1], columns - 1)
        self.set_margins()

    def _cropped(self, rows: list[Any], columns: int) -> list[Any]:
        for row in rows:
            for x in [x for x in row if x >= columns]:
                del row[x]
        return rows

    def _reflowed(
        self, rows: list[Any], at: tuple[int, int], columns: int
    ) -> tuple[list[Any], tuple[int, int]]:
        new: list[Any] = [self._empty_row()]
        x, place = 0, None
        for y, row in enumerate(rows):
            width = max(
                [k + 1 for k in row if row[k].data != " " or getattr(row, "wrapped", False)], default=0
            )
            if y == at[0]:
                width = max(width, at[1] + 1)
            cell = 0
            while cell < width:
                size = 2 if cell + 1 in row and row[cell + 1].data == "" else 1
                if x + size > columns:
                    new[-1].wrapped = True
                    new.append(self._empty_row())
                    x = 0
                if y == at[0] and cell <= at[1] < cell + size:
                    place = len(new) - 1, x
                for k in range(size):
                    if cell + k in row:
                        new[-1][x + k] = row[cell + k]
                cell, x = cell + size, x + size
            if not getattr(row, "wrapped", False):
                new.append(self._empty_row())
                x = 0
        assert place is not None
        return new[:-1], place

    def _empty_row(self) -> Any:
        return pyte.screens.StaticDefaultDict(self.default_char)

    # Reading

    @staticmethod
    def _row_text(row: Any) -> str:
        text = "".join(row[x].data for x in range(max(row, default=-1) + 1))
        return text if getattr(row, "wrapped", False) else text.rstrip(" ")

    def rows(self) -> list[str]:
        """The window's rows."""
        return [self._row_text(self.buffer[y]) for y in range(self.lines)]

    def text(self) -> list[str]:
        """All lines from the beginning of the history, wrapped ones joined, without empty ones at the end."""
        lines, joined = [], ""
        for row in [*self.history.top, *(self.buffer[y] for y in range(self.lines))]:
            joined += self._row_text(row)
            if not getattr(row, "wrapped", False):
                lines.append(joined)
                joined = ""
        while lines and not lines[-1]:
            lines.pop()
        return lines


class PseudoTerminal:
    """A pseudo-terminal whose output a `Terminal` shows."""

    def __init__(self, columns: int, rows: int, *, encoding: str = "utf-8", **kind: bool) -> None:
        self.screen = Terminal(columns, rows, **kind)
        self.raw = b""
        self._stream = pyte.Stream(self.screen)
        self._decoder = codecs.getincrementaldecoder(encoding)("replace")
        self._marks = threading.Semaphore(0)
        self._lock = threading.Lock()
        self.ours, self.theirs = pty.openpty()
        self._set_size()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def writer(self, encoding: str = "utf-8") -> TextIO:
        return open(os.dup(self.theirs), "w", encoding=encoding)

    def sync(self) -> Terminal:
        """Wait until all that was written is on the screen."""
        os.write(self.theirs, MARK.encode())
        assert self._marks.acquire(timeout=120)
        return self.screen

    def resize(self, columns: int, rows: int) -> None:
        self.sync()
        with self._lock:
            self.screen.resize(rows, columns)
        self._set_size()

    def type(self, keys: str | bytes) -> None:
        os.write(self.ours, keys if isinstance(keys, bytes) else keys.encode())

    def wait_for(self, condition: Callable[[Terminal], object], timeout_s: float = 120) -> Terminal:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with self._lock:
                if condition(self.screen):
                    return self.screen
            time.sleep(0.01)
        raise AssertionError("the screen never came to that:\n" + "\n".join(self.screen.text()))

    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self.theirs)[3] & termios.ECHO)

    def close(self) -> None:
        os.close(self.theirs)
        self._reader.join(20)
        os.close(self.ours)

    def __enter__(self) -> PseudoTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _set_size(self) -> None:
        size = struct.pack("HHHH", self.screen.lines, self.screen.columns, 0, 0)
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, size)

    def _read(self) -> None:
        text = ""
        while True:
            try:
                data = os.read(self.ours, 65536)
            except OSError:  # all writers have gone
                return
            self.raw += data
            text += self._decoder.decode(data)
            while MARK in text:
                before, _, text = text.partition(MARK)
                self._feed(before)
                self._marks.release()
            # A mark may have come in two pieces.
            keep = next((n for n in range(len(MARK) - 1, 0, -1) if text.endswith(MARK[:n])), 0)
            self._feed(text[: len(text) - keep])
            text = text[len(text) - keep :]

    def _feed(self, text: str) -> None:
        with self._lock:
            self._stream.feed(text)


class Program:
    """A program that runs in a pseudo-terminal, which is its controlling one: Ctrl-C reaches it."""

    # Opening a terminal makes it the controlling one of a session that has none.
    _PRELUDE = "import os; os.close(os.open(os.ttyname(0), os.O_RDWR)); "

    def __init__(self, terminal: PseudoTerminal, code: str, *argv: str, env: Mapping[str, str] = {}) -> None:
        self.terminal = terminal
        # COLUMNS and LINES would be those of the terminal that runs the tests.
        own = ("NO_COLOR", "TERM", "COLUMNS", "LINES")
        inherited = {name: value for name, value in os.environ.items() if name not in own}
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-c", self._PRELUDE + code, *argv],
            stdin=terminal.theirs, stdout=terminal.theirs, stderr=terminal.theirs,
            env={**inherited, "TERM": "xterm-256color", "PYTHONPATH": path, **env},
            start_new_session=True,
        )  # fmt: skip

    def interrupt(self) -> None:
        self.terminal.type("\x03")

    def wait(self) -> int:
        status = self.process.wait(120)
        self.terminal.sync()
        return status

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        """A test that failed leaves no process behind."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def plain_screen(text: str, columns: int, rows: int, **kind: bool) -> Terminal:
    """What a terminal shows when `text` is simply printed: the measure of everything else."""
    screen = Terminal(columns, rows, **kind)
    pyte.Stream(screen).feed(text.replace("\n", "\r\n"))
    return screen


class ScriptedModel:
    """Stands for a loaded model: a token is a code point, and the answer comes from a script.

    `reply(messages, options) -> (thought, text)`; a raw prompt is one message of role "raw".
    """

    canvas_len = 32
    generation_defaults = GenerationParams()

    def __init__(
        self,
        reply: Callable[[list[dict[str, Any]], dict[str, Any]], tuple[str, str]],
        *,
        has_chat_template: bool = True,
        step_s: float = 0.0,
        go: str | None = None,
    ) -> None:
        """go: a file without which the second step of a canvas is not followed by a third."""
        self._reply = reply
        self.has_chat_template = has_chat_template
        self._step_s = step_s
        self._go = go

    def token_texts(self, tokens: Sequence[int]) -> list[str]:
        return [chr(token) for token in tokens]

    def stream(self, prompt: str, **options: Any) -> Iterator[Event]:
        return self.stream_chat([{"role": "raw", "content": prompt}], **options)

    def stream_chat(self, messages: list[dict[str, Any]], **options: Any) -> Iterator[Event]:
        thought, text = self._reply(messages, options)
        drafts = options.get("drafts", True)
        for event in script(text, thought=thought, canvas_len=self.canvas_len):
            if isinstance(event, Draft):
                time.sleep(self._step_s)
                while event.step > 2 and self._go is not None and not os.path.exists(self._go):
                    time.sleep(0.01)
            if drafts or not isinstance(event, Draft):
                yield event


def script(
    text: str,
    *,
    thought: str = "",
    canvas_len: int = 64,
    num_steps: int = 4,
    noise: Sequence[str] = "abc xyz",
    rng: random.Random | None = None,
) -> Iterator[Event]:
    """The events of an answer: each canvas comes out of noise in `num_steps` steps."""
    rng = rng or random.Random(0)
    whole = thought + text
    for canvas, start in enumerate(range(0, max(1, len(whole)), canvas_len)):
        final = whole[start : start + canvas_len]
        tokens = tuple(map(ord, final))
        for step in range(1, num_steps + 1):
            known = [rng.random() < step / num_steps for _ in final]
            guess = [
                char if right else rng.choice(noise)[0] for char, right in zip(final, known, strict=True)
            ]
            yield Draft(
                row=0, canvas=canvas, step=step, tokens=tuple(map(ord, guess)), text="".join(guess),
                entropy=tuple(0.0 if right else rng.uniform(0, 4) for right in known),
            )  # fmt: skip
        in_thought = final[: max(0, len(thought) - start)]
        yield Commit(
            row=0, canvas=canvas, tokens=tokens, steps=num_steps, text=final[len(in_thought) :],
            thought=in_thought,
        )  # fmt: skip
    steps = (num_steps,) * (canvas + 1)
    timings = Timings(total_s=2.0, first_commit_s=1.0)
    tokens = tuple(map(ord, whole))
    yield Finish(
        row=0,
        answer=Answer(
            text=text, thought=thought, tokens=tokens, finish_reason=FinishReason.STOP, seed=7,
            decode="diffuse", steps=steps, prompt_tokens=5, timings=timings,
        ),
    )  # fmt: skip
