"""Decisions as a table: with bars on a terminal, aligned text in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dgemma.cli.live_view import printable
from dgemma.cli.report_view import Table, show

if TYPE_CHECKING:
    from dgemma.canvas.decide import Decision

_HEADER = ("question", "answer", "", "probability")
_BAR_CELLS = 20


def show_decisions(decisions: Sequence[Decision]) -> None:
    """A row for each choice of each question, the likeliest marked; for levels, their mean too."""
    if sys.stdout.isatty():
        _draw(decisions)
        return
    rows = [row[:4] for decision in decisions for row in _rows(decision)]
    show([Table(header=_HEADER, rows=rows, words=3)])


def _rows(decision: Decision) -> Iterator[tuple[str, str, str, str, float | None]]:
    """Question, answer, mark, figure, and how long a bar it has."""
    asked = decision.question
    title = " ".join((asked.name or asked.instructions).split())
    for number, (choice, probability) in enumerate(zip(asked.choices, decision.probabilities, strict=True)):
        mark = "*" if number == decision.index else ""
        yield title, " ".join(choice.label.split()), mark, f"{probability:.3f}", probability
    if asked.kind == "score":
        yield title, f"score, 0 to {len(asked.choices) - 1}", "", f"{decision.score:.3f}", None


def _draw(decisions: Sequence[Decision]) -> None:
    """Each question stands once, and its bars are whole in a narrow window too."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console()
    drawn = RichTable(box=box.SIMPLE_HEAD)
    drawn.add_column("question")
    drawn.add_column("answer")
    drawn.add_column("")
    drawn.add_column("", no_wrap=True, min_width=_BAR_CELLS)
    drawn.add_column("probability", justify="right", no_wrap=True, min_width=len("probability"))
    for decision in decisions:
        for number, (title, answer, mark, figure, probability) in enumerate(_rows(decision)):
            bar = "" if probability is None else _bar(probability, console.encoding)
            cells = ("" if number else title, answer, mark, bar, figure)
            drawn.add_row(*(Text(printable(cell, console.encoding)) for cell in cells))
    console.print(drawn)


def _bar(probability: float, encoding: str) -> str:
    full, empty = "█", "░"
    try:
        (full + empty).encode(encoding)
    except UnicodeError:
        full, empty = "#", "."
    cells = round(probability * _BAR_CELLS)
    return full * cells + empty * (_BAR_CELLS - cells)
