"""The figures of the documentation, drawn by matplotlib from result files. No torch.

    python -m benchmarks.figures sudoku RESULT.json [MORE.json ...] --out docs/sudoku.svg
    python -m benchmarks.figures text RESULT.json --out docs/text-model.svg

What a file does not have is taken from the files after it, or left out of the figure.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from dgemma.errors import CheckpointError, InputError
from dgemma.training.curves import BLUE, BY_NOISE, GREEN, GREY, ORANGE, STYLE, new_figure, write_figure
from dgemma.training.report import NOISE_LABELS

CAPS = (6, 12, 24, 48)  # those of `benchmarks.sudoku`, which imports torch
ACCEPTANCES = {
    "entropy_bound": ("entropy bound", BLUE),
    "confidence": ("confidence", GREEN),
    "fixed": ("fixed", GREY),
}
BANDS = {
    "easy": "Easy: 40 clues or more",
    "medium": "Medium: 30 to 39 clues",
    "hard": "Hard: fewer than 30 clues",
}
LEFT_TO_RIGHT = "left to right"
SOLVED = "share of puzzles solved"

Findings = Mapping[str, Any]
Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line. Its points are joined in the order of x; those without finite numbers are left out."""

    name: str
    points: Sequence[Point]
    colour: str
    dashed: bool = False
    """A line to compare with: without marks at its points."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart. On a logarithmic axis, values that are not above 0 are left out."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_log: bool = False
    y_log: bool = False
    y_range: tuple[float, float] | None = None
    x_ticks: Sequence[float] = ()
    """The values that get a tick; without them, matplotlib chooses."""


def draw(panels: Sequence[Panel], *, heading: str, note: str = "") -> Figure:
    """Panels two to a row. Series and panels without a point are left out."""
    shown = [panel for panel in map(_drawable, panels) if panel.series]
    if not shown:
        raise InputError("no panel has a point that can be drawn; give at least one.")
    rows = -(-len(shown) // 2)
    with matplotlib.rc_context(STYLE):
        figure, axes = new_figure(rows, min(2, len(shown)), figsize=(11, 0.9 + 3.0 * rows))
        figure.suptitle(f"{heading}\n{note}", x=0.01, ha="left", fontsize=11)
        for ax in axes[len(shown) :]:
            ax.set_visible(False)
        for ax, panel in zip(axes, shown, strict=False):
            ax.set_title(panel.title)
            ax.set_xlabel(panel.x_label)
            ax.set_ylabel(panel.y_label)
            for series in panel.series:
                x, y = zip(*series.points, strict=True)
                line = {"linestyle": "--"} if series.dashed else {"marker": "o", "markersize": 3.5}
                ax.plot(x, y, color=series.colour, label=series.name, clip_on=False, **line)
            ax.set_xscale("log" if panel.x_log else "linear")
            ax.set_yscale("log" if panel.y_log else "linear")
            for axis, is_log in ((ax.xaxis, panel.x_log), (ax.yaxis, panel.y_log)):
                if is_log:
                    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                    axis.set_minor_locator(NullLocator())
                    axis.set_major_formatter(lambda value, _: f"{value:,g}")
            if panel.x_ticks:
                ax.set_xticks(panel.x_ticks)
            if panel.y_range:
                ax.set_ylim(*panel.y_range)
            ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _drawable(panel: Panel) -> Panel:
    """Finite points that have a place on their axes, in the order of x."""

    def has_place(point: Point) -> bool:
        pairs = zip(point, (panel.x_log, panel.y_log), strict=True)
        return all(math.isfinite(value) and (value > 0 or not is_log) for value, is_log in pairs)

    found = [replace(s, points=sorted(filter(has_place, s.points), key=itemgetter(0))) for s in panel.series]
    return replace(panel, series=[series for series in found if series.points])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT", help="files of benchmarks/results")
    parser.add_argument("--out", type=Path, required=True, help="the SVG or PNG file to write")
    args = parser.parse_args()
    try:
        write_figure(figure(args.figure, *args.results), args.out)
    except (InputError, CheckpointError, OSError) as error:
        parser.exit(1, f"error: {error}\n")


def figure(name: str, result: Path, *more: Path) -> Figure:
    """The figure `name` of result files. Where several files have the same entry, the first one counts."""
    kind = FIGURES[name]
    try:
        found, *others = (json.loads(file.read_text(encoding="utf-8")) for file in (result, *more))
        note = note_of(found, others)
        for other in others:
            found["ways"] = {**other["ways"], **found["ways"]}
        panels = kind.panels(found)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise InputError(f"{result} is not a result of {kind.maker} ({error!r}); make it anew.") from error
    try:
        return draw(panels, heading=kind.heading, note=note)
    except InputError as error:
        raise InputError(f"{result} has nothing to draw; give a result of {kind.maker}.") from error


def sudoku_panels(found: Findings) -> list[Panel]:
    """A panel per band over the cap on steps, and one over the number of clues."""
    ways = found.get("ways", {})
    by_clues = Panel(
        title="All: by the number of clues",
        x_label="clues",
        y_label=f"{SOLVED}, at most {CAPS[-1]} steps",
        series=[
            Series(name="entropy bound", colour=BLUE, points=clue_points(ways, f"entropy_bound-{CAPS[-1]}")),
            Series(name=LEFT_TO_RIGHT, colour=ORANGE, points=clue_points(ways, "causal")),
        ],
        y_range=(0, 1),
    )
    return [*(band_panel(ways, band, title) for band, title in BANDS.items()), by_clues]


def band_panel(ways: Findings, band: str, title: str) -> Panel:
    series = [
        Series(
            name=name,
            colour=colour,
            points=[
                (cap, ways[way][band]["exact"])
                for cap in CAPS
                if band in ways.get(way := f"{acceptance}-{cap}", {})
            ],
        )
        for acceptance, (name, colour) in ACCEPTANCES.items()
    ]
    if band in ways.get("causal", {}):
        level = ways["causal"][band]["exact"]
        points = [(CAPS[0], level), (CAPS[-1], level)]
        series.append(Series(name=LEFT_TO_RIGHT, colour=ORANGE, points=points, dashed=True))
    return Panel(
        title=title,
        x_label="denoising steps at most",
        y_label=SOLVED,
        series=series,
        x_log=True,
        x_ticks=CAPS,
        y_range=(0, 1),
    )


def clue_points(ways: Findings, way: str) -> list[tuple[float, float]]:
    """(clues, share solved) of all bands, which have no number of clues in common."""
    by_band = ways.get(way, {}).values()
    return [
        (int(group.split()[0]), share)
        for figures in by_band
        for group, share in figures.get("exact_by_clues", {}).items()
    ]


def text_panels(found: Findings) -> list[Panel]:
    """Causal perplexity beside n-grams, and the diffusion loss by noise level, over the text read."""
    curve, ngrams = found.get("curve", []), found.get("ngrams", [])
    causal = [(row["mb"], perplexity(row["causal_nats"])) for row in curve if "causal_nats" in row]
    learned = [(row["mb"], perplexity(row["window_nats"])) for row in ngrams if "window_nats" in row]
    by_noise = [
        [(row["mb"], nats) for row in curve if (nats := noise_nats(row, k)) is not None]
        for k in range(len(NOISE_LABELS))
    ]
    return [
        Panel(
            title="Left to right, on held-out text",
            x_label="MB of text read",
            y_label="perplexity per token",
            series=[
                Series(name="this model", colour=ORANGE, points=causal),
                Series(name="5-gram Kneser-Ney", colour=GREY, points=learned),
            ],
            x_log=True,
            y_log=True,
        ),
        Panel(
            title="Diffusion, by the share of tokens that are noise",
            x_label="MB of text read",
            y_label="loss in nats per token",
            series=[
                Series(name=f"noise {name}", colour=BY_NOISE[k], points=points)
                for k, (name, points) in enumerate(zip(NOISE_LABELS, by_noise, strict=True))
            ],
            x_log=True,
        ),
    ]


def perplexity(nats: float) -> float:
    return math.exp(min(nats, 700.0))  # a larger one overflows and is not drawn


def noise_nats(row: Findings, level: int) -> float | None:
    """None: no example fell into this noise level."""
    nats: float | None = row.get("diffusion_by_noise", [None] * len(NOISE_LABELS))[level]
    return nats


def note_of(found: Findings, others: Sequence[Findings] = ()) -> str:
    """Model, size and date, as far as the files have them."""
    counts = sorted({file.get("puzzles_per_band", 0) for file in (found, *others)})
    span = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    parts: dict[str, Callable[[Any], str]] = {
        "model": str,
        "parameters": lambda count: f"{count / 1e6:.1f}M parameters",
        "puzzles_per_band": lambda _: f"{span} puzzles per band",
        "date": str,
    }
    return " \u00b7 ".join(part(found[key]) for key, part in parts.items() if key in found)


@dataclass(frozen=True, kw_only=True)
class FigureKind:
    heading: str
    maker: str
    """The benchmark whose results it draws."""
    panels: Callable[[Findings], list[Panel]]


FIGURES = {
    "sudoku": FigureKind(
        heading="Sudoku: held-out puzzles solved", maker="benchmarks.sudoku", panels=sudoku_panels
    ),
    "text": FigureKind(
        heading="The text model, while it learns", maker="benchmarks.text_model", panels=text_panels
    ),
}


if __name__ == "__main__":
    main()
