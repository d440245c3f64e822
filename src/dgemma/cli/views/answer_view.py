"""An answer while it is written: on a terminal the canvas settling, in a pipe the plain text alone.

Final text leaves in the normal flow, so that scrollback and copying work. Below it stands the live
region: the unfinished last line, the running canvas coloured by confidence, one status line. At rest the
hidden cursor stands on the region's first cell. A terminal that is resized moves the cursor along with
the text, so all that a repaint has to erase comes after the cursor, whatever the new size. The region is
drawn with automatic wrapping switched off: a character of another width than we think cannot break a row.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, TextIO

from dgemma.cli.views.terminal import (
    BEGIN_UPDATE,
    CURSOR_RIGHT,
    DIM,
    END_UPDATE,
    ERASE_BELOW,
    ERASE_ROW,
    HIDE_CURSOR,
    NO_WRAP,
    RESTORE_CURSOR,
    SAVE_CURSOR,
    SCROLL_DOWN,
    SHOW_CURSOR,
    WRAP,
    clusters,
    drawn_row,
    encodable,
    has_certain_width,
    lay_out,
    printable,
    styled,
    supports_escapes,
    switch_off_echo,
    uninterrupted,
    window_size,
    without_tabs,
    wrapping_clusters,
)
from dgemma.events import Answer, Commit, Draft, Event, Finish
from dgemma.params import GenerationParams

if TYPE_CHECKING:
    from dgemma import LanguageModel

REPAINTS_PER_SECOND = 15
SETTLED_NATS = 0.1  # at most so unsure, a token of a draft counts as settled

_LINE_MARK = "\u21b5"

# Style of a draft's token by its entropy in nats; ln 2 is a toss-up between two tokens.
_COLOURS = ((SETTLED_NATS, ""), (0.7, "\x1b[32m"), (2.0, "\x1b[33m"))
_NO_COLOURS = ((SETTLED_NATS, "\x1b[1m"), (2.0, ""))


def open_view(token_texts: Callable[[Sequence[int]], list[str]], max_steps: int) -> LiveView | PlainView:
    """The view that stdout can show."""
    if supports_escapes() and sys.stdout.isatty():
        return LiveView(sys.stdout, token_texts, max_steps, colour=not os.environ.get("NO_COLOR"))
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
            # In a pipe the text is as the model wrote it; a terminal must not interpret its escape sequences.
            safe = printable(event.text, encoding) if self._out.isatty() else encodable(event.text, encoding)
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
        token_texts: Callable[[Sequence[int]], list[str]],
        max_steps: int,
        *,
        colour: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = out
        self._encoding = out.encoding or "ascii"
        # In a draft, where lines come and go from step to step; a final one ends.
        self._line_mark = _LINE_MARK if encodable(_LINE_MARK, self._encoding) == _LINE_MARK else "/"
        self._token_texts = token_texts
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
        self._num_held = 0  # rows of the running canvas: the status line below it shall not jump

    def __enter__(self) -> Self:
        with uninterrupted():
            self._restore_echo = switch_off_echo()
            self._out.write(HIDE_CURSOR)
            self._paint()
        return self

    def show(self, event: Event) -> None:
        with uninterrupted():
            if isinstance(event, Draft):
                self._draft = event
            elif isinstance(event, Commit):
                self._draft, self._num_held = None, 0
                self._num_final += len(event.tokens)
                self._empty &= not event.text
                self._add(event.thought, DIM)
                self._add(event.text, "")
            else:
                self._finished = True
            if self._lines or self._clock() - self._last_paint >= 1 / REPAINTS_PER_SECOND:
                self._paint()

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        with uninterrupted():
            if kind is KeyboardInterrupt and self._draft is not None:
                self._add("".join(self._token_texts(self._draft.tokens)).rstrip(), DIM)  # as far as it was
            if self._line or (self._finished and self._empty):
                self._end_line()
            self._draft = None
            self._paint(with_region=False)
            self._out.write(SHOW_CURSOR)
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
        width, height = window_size(self._out)
        self._loose |= self._continued and width != self._width
        if width != self._width:
            self._num_held = 0
        self._width = width
        frame = [BEGIN_UPDATE, self._erased()]
        for text, style in self._lines:
            # A tab that reaches the right edge would overwrite: there, spaces.
            fits = "\t" not in text or (not self._loose and len(lay_out([(text, "")], width)) == 1)
            frame.append(styled(text if fits else without_tabs(text, width), style) + "\n")
            self._continued = self._loose = False
        self._lines = []
        if with_region:
            frame += [self._printed_rows(width, height), self._region(width, height)]
        frame.append(END_UPDATE)
        self._out.write("".join(frame))
        self._out.flush()

    def _erased(self) -> str:
        """Two ways around tmux. Where a line was wrapped, a row that is erased from its first cell on is no
        longer part of that line: the cell stays, and is drawn over. And "erase all below" in a window's
        first cell means "clear", with a copy of the screen for the history: it begins one row lower."""
        if self._loose:
            return f"{SAVE_CURSOR}{CURSOR_RIGHT}{ERASE_BELOW}{RESTORE_CURSOR}"
        erase_lower = f"\x1b[B\r{ERASE_BELOW}{RESTORE_CURSOR}"
        if self._continued:
            # A resize may have left us in the last row: have one below.
            return f"\r{SCROLL_DOWN}\x1b[A{SAVE_CURSOR}{CURSOR_RIGHT}{ERASE_ROW}{erase_lower}"
        return f"\r{SAVE_CURSOR}{ERASE_ROW}{erase_lower}"

    def _printed_rows(self, width: int, height: int) -> str:
        """Full rows of a long unfinished line, which join the flow.

        The terminal itself has to wrap them, else a copy would hold line breaks. So the next row's first
        character is printed too, then the cursor goes back upon it: the region draws it again.
        """
        unclear = self._loose or "\t" in self._line or height < 3  # then wait for the line's end
        rows = [] if unclear else lay_out([(self._line, "")], width)
        num_rows = 0
        while num_rows + 1 < len(rows) and all(map(has_certain_width, wrapping_clusters(rows, num_rows))):
            num_rows += 1
        if num_rows < 1:
            return ""
        head = "".join(cluster for row in rows[:num_rows] for cluster, _ in row)
        self._line = self._line[len(head) :]
        self._continued = True
        return styled(head + rows[num_rows][0][0], self._line_style) + "\r"

    def _region(self, width: int, height: int) -> str:
        # Never the whole window: its first row stays the flow's.
        height_left = height - 1 - self._loose
        if height_left < 1:
            return ""
        # Somewhere in a row we draw only what stands there already, a character, and go on below.
        first = next(clusters([(self._line, "")]))[0] if self._loose else ""
        segments = [(self._line[len(first) :], self._line_style)]
        if self._draft is not None:
            guesses = self._token_texts(self._draft.tokens)
            for text, entropy in zip(guesses, self._draft.entropy, strict=True):
                style = next((style for most, style in self._styles if entropy <= most), DIM)
                segments.append((printable(text, self._encoding).replace("\n", self._line_mark), style))
        body = lay_out(segments, width, whole_words=True) if any(text for text, _ in segments) else []
        if self._draft is not None:
            self._num_held = max(self._num_held, len(body))
            body += [[] for _ in range(self._num_held - len(body))]
        rows = [drawn_row(row) for row in body[max(0, len(body) - height_left + 1) :]]
        rows.append(styled(self._status(width), DIM))
        rows[0] = rows[0] or " "  # over the cell that was not erased
        num_down = len(rows) - 1 + self._loose
        # Make space first, scrolling if need be; then nothing scrolls between save and restore.
        make_space = SCROLL_DOWN * num_down + f"\x1b[{num_down}A" if num_down else ""
        drawn = "\r\n".join([styled(first, self._line_style), *rows] if self._loose else rows)
        return f"{NO_WRAP}{make_space}{SAVE_CURSOR}{drawn}{RESTORE_CURSOR}{WRAP}"

    def _status(self, width: int) -> str:
        if self._draft is not None:
            settled = sum(entropy <= SETTLED_NATS for entropy in self._draft.entropy)
            share = settled / max(1, len(self._draft.entropy))
            parts = [
                f"canvas {self._draft.canvas + 1}",
                f"step {self._draft.step}/{self._max_steps}",
                f"{share:.0%} settled",
                *self._rate(self._num_final + settled),
                f"drafting {len(self._draft.tokens)} tokens",
            ]
        elif self._num_final:
            parts = [f"{self._num_final} tokens", *self._rate(self._num_final)]
        else:
            parts = ["reading the prompt"]
        while len(parts) > 1 and len(" | ".join(parts)) > width:
            parts.pop()
        return " | ".join(parts)[:width]

    def _rate(self, num_tokens: int) -> list[str]:
        """Of final and settled tokens; none before the first."""
        rate = num_tokens / max(self._clock() - self._started, 1e-9)
        return [f"{rate:.1f} tok/s"] if rate >= 0.05 else []


def open_answer_view(lm: LanguageModel, options: dict[str, Any]) -> LiveView | PlainView:
    params = GenerationParams.make(lm.generation_defaults, **options)
    return open_view(lm.token_texts, params.max_denoising_steps)


def show_answer(
    view: LiveView | PlainView, start: Callable[[], Iterator[Event]]
) -> tuple[str, Answer | None]:
    """Show an answer as it is written -> (its final text, the answer, or None if Ctrl-C ended it)."""
    text, answer = "", None
    try:
        with view:
            for event in start():
                if isinstance(event, Commit):
                    text += event.text
                elif isinstance(event, Finish):
                    answer = event.answer
                view.show(event)
    except KeyboardInterrupt:
        pass
    return text, answer


def stats(answer: Answer) -> str:
    timings = answer.timings
    rows = {
        "tokens": f"{len(answer.tokens)} after a prompt of {answer.prompt_tokens}",
        "seconds": f"{timings.total_s:.2f}, first text after {timings.first_commit_s:.2f}",
        "tokens/s": f"{answer.tokens_per_second:.1f}",
        "steps per canvas": ", ".join(map(str, answer.steps)) or "none, written left to right",
        "tokens per forward": f"{answer.tokens_per_forward:.2f}",
        "finish": str(answer.finish_reason),
        "seed": str(answer.seed),
    }
    return "\n".join(f"{name:<20}{value}" for name, value in rows.items())
