"""Record a command in a real terminal: frames as PNG, and the seconds until it shows something and answers.

    python -m tools.record_terminal --columns 80 --out frames -- solve --pace 0.1
    python -m tools.record_terminal --load 8 --rounds 3 -- generate bundled:text "The file " --raw --seed 1

What a person types comes from --type, line by line, each when a prompt (>) has waited a second. With
--load so many processes compute beside it. Needs the dev extra (pyte) and Pillow.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from terminal import Program, PseudoTerminal, Terminal  # noqa: E402

COMMAND = "import sys; from dgemma.cli.main import main; sys.exit(main())"
# A server, or whatever else does not end by itself, is over when the screen says this.
READY = ("serving", "listening")
COLOURS = {"default": "#d8dee9", "green": "#8fbf7f", "brown": "#e0b860", "red": "#e07a70", "cyan": "#7fb8c8"}
DIM, GROUND = "#7b8494", "#1b1f27"
CELL, ROW = 9, 19
_WAITS_S = 1.0
_MOST_S = 600


class Recording:
    """What stood on the screen, and when it changed."""

    def __init__(self) -> None:
        self.frames: list[tuple[float, Any]] = []  # seconds since the key was pressed, image
        self.first_s: float | None = None
        self.typed: list[tuple[float, float]] = []  # when a line was typed, and the last change before it
        self.ready_s: float | None = None  # of a server

    @property
    def answer_s(self) -> float:
        """Until the answer stood there: from the key, or in a chat from the first typed line."""
        if self.ready_s is not None:
            return self.ready_s
        if len(self.typed) > 1:
            return self.typed[1][1] - self.typed[0][0]
        return self.frames[-1][0]

    def look(self, screen: Terminal, seconds: float, *, draws: bool) -> bool:
        """-> Whether it has changed."""
        rows = tuple(screen.rows())
        is_new = not self.frames or self.frames[-1][1][0] != rows
        if any(rows) and self.first_s is None:
            self.first_s = seconds
        if is_new:
            self.frames.append((seconds, (rows, draw(screen) if draws else None)))
        return is_new


def record(argv: Sequence[str], columns: int, lines: int, typed: Sequence[str], *, draws: bool) -> Recording:
    recording, waiting = Recording(), list(typed)
    with PseudoTerminal(columns, lines) as terminal:
        began = changed = time.perf_counter()
        with Program(terminal, COMMAND, *argv) as program:
            while program.process.poll() is None:
                time.sleep(0.02)
                now = time.perf_counter()
                if now - began > _MOST_S:
                    raise SystemExit(f"{argv} has not ended after {_MOST_S} s")
                with terminal._lock:
                    if recording.look(terminal.screen, now - began, draws=draws):
                        changed = now
                    prompts = terminal.screen.display[terminal.screen.cursor.y].startswith("> ")
                    is_ready = any(word in row for row in terminal.screen.rows() for word in READY)
                if argv[0] == "serve" and is_ready:
                    recording.ready_s = now - began
                    program.process.send_signal(signal.SIGTERM)
                    program.process.wait(60)
                elif waiting and now - changed > _WAITS_S and prompts:
                    recording.typed.append((now - began, changed - began))
                    terminal.type(waiting.pop(0) + "\r")
            ended = time.perf_counter() - began
        recording.look(terminal.sync(), ended, draws=draws)
    return recording


def draw(screen: Terminal) -> Any:
    from PIL import Image, ImageDraw, ImageFont

    regular, bold = (
        ImageFont.truetype(_font(name), 15) for name in ("DejaVuSansMono.ttf", "DejaVuSansMono-Bold.ttf")
    )
    image = Image.new("RGB", (CELL * screen.columns + 16, ROW * screen.lines + 16), GROUND)
    canvas = ImageDraw.Draw(image)
    for y in range(screen.lines):
        for x in range(screen.columns):
            cell = screen.buffer[y][x]
            colour = DIM if cell.italics else COLOURS.get(cell.fg, COLOURS["default"])
            if cell.data.strip():
                font = bold if cell.bold else regular
                canvas.text((8 + CELL * x, 8 + ROW * y), cell.data, font=font, fill=colour)
    return image


def _font(name: str) -> str:
    import matplotlib

    return os.path.join(matplotlib.get_data_path(), "fonts", "ttf", name)


@contextmanager
def load(num: int) -> Iterator[None]:
    """So many processes that compute; they end with this block, or after ten minutes."""
    code = "import time; end = time.monotonic() + 600\nwhile time.monotonic() < end: pass"
    busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(num)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def spread(values: Sequence[float]) -> list[float]:
    """Median, least, most."""
    return [round(value, 2) for value in (statistics.median(values), min(values), max(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--columns", type=int, default=80)
    parser.add_argument("--lines", type=int, default=24)
    parser.add_argument("--out", type=Path, help="directory of the frames")
    parser.add_argument("--frames", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--load", type=int, default=0)
    parser.add_argument("--type", action="append", default=[], metavar="LINE")
    parser.add_argument("argv", nargs="+", help="of dgemma")
    args = parser.parse_args()
    firsts, ends = list[float](), list[float]()
    with load(args.load):
        for _ in range(args.rounds):
            found = record(args.argv, args.columns, args.lines, args.type, draws=args.out is not None)
            firsts.append(found.first_s or found.frames[-1][0])
            ends.append(found.answer_s)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        last = len(found.frames) - 1
        chosen = sorted({round(last * number / max(1, args.frames - 1)) for number in range(args.frames)})
        for number, at in enumerate(chosen):
            found.frames[at][1][1].save(args.out / f"{number}-{found.frames[at][0]:.2f}s.png")
    print(json.dumps({
        "command": args.argv, "load": args.load, "columns": args.columns, "rounds": args.rounds,
        "first_seen_s": spread(firsts), "answer_s": spread(ends),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
