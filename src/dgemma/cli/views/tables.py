"""A report as tables: drawn on a terminal, aligned text in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dgemma.cli.views.terminal import printable
from dgemma.evaluation.intervals import Difference, Estimate, Interval
from dgemma.evaluation.report import EvaluationReport, score_names, scores_of


@dataclass(frozen=True, kw_only=True)
class Table:
    """Text columns, aligned left, then columns of figures, aligned right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_text_columns: int = 1


def score_table(report: EvaluationReport) -> Table:
    return Table(
        header=("score", "mean", "95 % interval", "n"),
        rows=[[name, *_cells(found)] for name, found in report.scores.items()],
    )


def group_table(report: EvaluationReport) -> Table:
    names = score_names(report.results)
    return Table(
        header=("group", "score", "mean", "95 % interval", "n"),
        rows=[
            [group, name, *_cells(found)]
            for group, results in report.groups.items()
            for name, found in scores_of(results, names).items()
        ],
        num_text_columns=2,
    )


def fact_table(report: EvaluationReport) -> Table:
    facts = {
        "examples": f"{report.n}, {report.failed} failed" if report.failed else str(report.n),
        "steps per canvas": _joined(report.steps_mean, "mean", report.steps_p90, "in 9 of 10 at most"),
        "tokens per forward": _figure(report.tokens_per_forward),
        "seconds per example": _figure(report.seconds_per_example),
        "tokens per second": _figure(report.tokens_per_second),
        "finish": ", ".join(f"{reason} {count}" for reason, count in report.finish_reasons.items()) or "-",
        "seed": str(report.settings["seed"]),
    }
    return Table(header=(), rows=[list(fact) for fact in facts.items()], num_text_columns=2)


def comparison_table(differences: Mapping[str, Difference]) -> Table:
    return Table(
        header=("this minus other", "difference", "95 % interval", "higher", "lower", "n", "p"),
        rows=[
            [
                name, f"{found.mean:+.3f}", _interval(found.interval, sign="+"), str(found.higher),
                str(found.lower), str(found.n), f"{found.p_value:.2g}",
            ]
            for name, found in differences.items()
        ],
    )  # fmt: skip


def show(tables: Sequence[Table]) -> None:
    """Those that have rows, on stdout."""
    tables = [table for table in tables if table.rows]
    if sys.stdout.isatty():
        _draw(tables)
    else:
        print("\n\n".join(map(plain, tables)))


def plain(table: Table) -> str:
    rows = [row for row in (table.header, *table.rows) if row]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [
        [cell.ljust(w) if i < table.num_text_columns else cell.rjust(w) for i, (cell, w) in enumerate(cells)]
        for cells in (zip(row, widths, strict=True) for row in rows)
    ]
    return "\n".join("   ".join(row).rstrip() for row in aligned)


def _draw(tables: Sequence[Table]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console()
    for table in tables:
        drawn = RichTable(box=box.SIMPLE_HEAD, show_header=bool(table.header))
        for number in range(len(table.rows[0])):
            name = table.header[number] if table.header else ""
            drawn.add_column(name, justify="left" if number < table.num_text_columns else "right")
        for row in table.rows:
            drawn.add_row(*(Text(printable(cell, console.encoding)) for cell in row))
        console.print(drawn)


def _cells(found: Estimate) -> list[str]:
    return [_figure(found.mean), _interval(found.interval), str(found.n)]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"


def _interval(interval: Interval | None, sign: str = "") -> str:
    return "-" if interval is None else f"{interval.low:{sign}.3f} to {interval.high:{sign}.3f}"


def _joined(mean: float | None, mean_name: str, p90: int | None, p90_name: str) -> str:
    return "-" if mean is None else f"{_figure(mean)} {mean_name}, {p90} {p90_name}"
