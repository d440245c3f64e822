"""Record the live view of `dgemma generate` as a picture: three moments of one answer, one below the other.

    python tools/record_live_view.py MODEL "PROMPT" [--seed N] [--out docs/live-view.svg]
    python tools/record_live_view.py --demo

The command runs in a real pseudo-terminal, and the picture is what stood on its screen. With --demo the
events come from a script instead of a model, and the caption says so. Needs the dev extra (pyte).
"""

from __future__ import annotations

import argparse
import html
import os
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from dgemma.events import Commit, Draft, Event  # noqa: E402
from dgemma.params import GenerationParams  # noqa: E402
from terminal import Program, PseudoTerminal, Terminal, script  # noqa: E402

CELL_WIDTH, ROW_HEIGHT, MARGIN = 8.4, 18, 14
# The view's colours by pyte's names for them, on a dark ground.
COLOURS = {"default": "#d8dee9", "green": "#8fbf7f", "brown": "#e0b860"}
DIM, GROUND, FRAME, CAPTION = "#6b7482", "#1b1f27", "#39414f", "#7d8796"

COMMAND = "import sys; from dgemma.cli.main import main; sys.exit(main())"
DEMO_COMMAND = "import record_live_view; record_live_view.run_demo()"
DEMO_PROMPT = "What is a block-diffusion model?"
DEMO_TEXT = (
    "A block-diffusion model does not write from left to right. It starts with a canvas of noise, reads "
    "all of it at once, keeps what it is sure of and draws the rest again. After a few steps the words "
    "hold each other in place; the canvas is final, and the next one begins."
)
DEMO_STEPS = 12

Run = tuple[int, str, str, bool]
"""(column, text, colour, bold)"""


@dataclass(frozen=True)
class Moment:
    label: str
    rows: list[list[Run]]
    settled: int | None  # per cent; None when nothing is being drafted


class DemoModel:
    """Words as tokens; a word that is not sure yet is a random one."""

    has_chat_template = False
    generation_defaults = GenerationParams()

    def __init__(self) -> None:
        self._words = [word + " " for word in DEMO_TEXT.split()]
        self._guess: list[str] = []

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return self._guess

    def stream(self, prompt: str, **options: Any) -> Iterator[Event]:
        rng = random.Random(3)
        noise = [*self._words, "== ", "river ", "un", "7 ", "maybe ", "; ", "ing "]
        doubts = [rng.betavariate(2, 2) for _ in self._words]
        tokens = tuple(range(len(self._words)))
        for step in range(1, DEMO_STEPS + 1):
            left = [max(0.0, doubt - step / DEMO_STEPS) for doubt in doubts]
            self._guess = [
                rng.choice(noise) if doubt > 0.1 else word
                for word, doubt in zip(self._words, left, strict=True)
            ]
            entropy = tuple(6 * doubt for doubt in left)
            yield Draft(row=0, canvas=0, step=step, tokens=tokens, entropy=entropy, text="".join(self._guess))
            time.sleep(0.2)
        yield Commit(row=0, canvas=0, tokens=tokens, steps=DEMO_STEPS, text=DEMO_TEXT)
        *_, finish = script(DEMO_TEXT)
        yield finish


def run_demo() -> None:
    """The command line with a scripted model, inside the pseudo-terminal."""
    import dgemma
    from dgemma.cli import main

    dgemma.load = lambda path, **options: DemoModel()  # type: ignore[assignment,misc]
    sys.exit(main.main())


def record(code: str, argv: list[str], columns: int, rows: int) -> list[Moment]:
    """Every different screen from the first draft on; the last one is that of the finished answer."""
    seen: list[Moment] = []
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
    with (
        PseudoTerminal(columns, rows) as terminal,
        Program(terminal, code, *argv, env={"PYTHONPATH": path}) as program,
    ):

        def look(screen: Terminal) -> bool:
            status = re.search(r"(canvas \d+ \| step \d+/\d+ \| (\d+)% settled)", "\n".join(screen.rows()))
            if status and (not seen or seen[-1].label != status[1]):
                seen.append(Moment(status[1], runs(screen), int(status[2])))
            return program.process.poll() is not None

        terminal.wait_for(look, timeout_s=3600)
        if program.wait() != 0 or not seen:
            sys.exit("nothing was recorded; the command said:\n" + "\n".join(terminal.screen.text()))
        return [*seen, Moment("final", runs(terminal.screen), None)]


def runs(screen: Terminal) -> list[list[Run]]:
    """The screen's rows as runs of one style, without empty rows at the end."""
    drawn: list[list[Run]] = []
    for y in range(screen.lines):
        row: list[Run] = []
        for x in sorted(screen.buffer[y]):
            cell = screen.buffer[y][x]
            style = (DIM if cell.italics else COLOURS.get(cell.fg, COLOURS["default"]), cell.bold)
            if row and row[-1][2:] == style and row[-1][0] + len(row[-1][1]) == x and cell.data.isascii():
                row[-1] = (row[-1][0], row[-1][1] + cell.data, *style)
            elif cell.data:
                row.append((x, cell.data, *style))
        drawn.append(row)
    while drawn and not drawn[-1]:
        drawn.pop()
    return drawn


def choose(moments: list[Moment]) -> list[Moment]:
    """The first draft, one half-way, and the end."""
    drafts = moments[:-1]
    half_way = min(drafts[1:] or drafts, key=lambda moment: abs((moment.settled or 0) - 55))
    return [drafts[0], half_way, moments[-1]]


def picture(moments: list[Moment], columns: int, caption: str) -> str:
    width = columns * CELL_WIDTH + 4 * MARGIN
    parts: list[str] = []
    top: float = MARGIN
    for moment in moments:
        parts.append(_text(MARGIN, top + 12, moment.label, CAPTION))
        top += 20
        height = len(moment.rows) * ROW_HEIGHT + MARGIN
        parts.append(
            f'<rect x="{MARGIN}" y="{top}" width="{width - 2 * MARGIN:.0f}" height="{height}" rx="6" '
            f'fill="{GROUND}" stroke="{FRAME}"/>'
        )
        for y, row in enumerate(moment.rows):
            for x, text, colour, bold in row:
                at = 2 * MARGIN + x * CELL_WIDTH
                parts.append(_text(at, top + MARGIN + 7 + y * ROW_HEIGHT, text, colour, bold=bold))
        top += height + MARGIN
    parts.append(_text(MARGIN, top + 6, caption, CAPTION))
    size = f'width="{width:.0f}" height="{top + 20:.0f}"'
    font = 'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>\n' + "\n".join(parts) + "\n</svg>\n"


def _text(x: float, y: float, text: str, colour: str, *, bold: bool = False) -> str:
    # The length is given, so that a viewer's own font cannot shift the columns.
    length = f' textLength="{len(text) * CELL_WIDTH:.1f}"' if text.isascii() and len(text) > 1 else ""
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}"{weight}{length} xml:space="preserve">'
        f"{html.escape(text)}</text>"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="a checkpoint directory")
    parser.add_argument("prompt", nargs="?", help="what to ask")
    parser.add_argument("--demo", action="store_true", help="replay a script instead of running a model")
    parser.add_argument("--seed", default="0", help="of the answer (default: 0)")
    parser.add_argument("--columns", type=int, default=88)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "live-view.svg")
    args = parser.parse_args()
    if args.demo:
        argv = ["generate", "demo", DEMO_PROMPT, "--max-denoising-steps", str(DEMO_STEPS)]
        moments = record(DEMO_COMMAND, argv, args.columns, args.rows)
        caption = "The live view of dgemma generate, replaying a script: no model wrote this."
    elif args.model and args.prompt:
        argv = ["generate", args.model, args.prompt, "--seed", args.seed]
        moments = record(COMMAND, argv, args.columns, args.rows)
        caption = f"dgemma generate {Path(args.model).name} {args.prompt!r} --seed {args.seed}"
    else:
        parser.error("give MODEL and PROMPT, or --demo")
    args.out.write_text(picture(choose(moments), args.columns, caption))
    print(f"{args.out}: {len(moments)} moments seen, three drawn")


if __name__ == "__main__":
    main()
