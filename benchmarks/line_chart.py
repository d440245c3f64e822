"""Line charts as SVG text: panels side by side, each line named at its end. No torch.

They look like the curves of a training run (`dgemma.training.curves`), and fit light and dark pages.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from statistics import fmean

from dgemma.errors import InputError
from dgemma.training import svg_page
from dgemma.training.axis import Axis, value_axis
from dgemma.training.svg_page import xml_text

WIDTH, HEIGHT = 360, 230  # of the lines' area, in pixels
_LEFT, _TOP, _BOTTOM = 52, 62, 48  # around it
_KEY, _NAME = WIDTH + 20, WIDTH + 38  # where names begin: a piece of the line, then the text
_EDGE, _MARGIN, _PER_ROW = 8, 12, 2
LABEL_HEIGHT, MARK_PIXELS = 16, 7.0  # names at the lines' ends, and marks, are at least this far apart
LETTER_PIXELS, _TITLE_LETTER, _HEADING_LETTER = 7.4, 9.6, 13.0  # about: fonts differ, this is a wide one
_MOST_TICKS, _LARGEST = 8, 1e100  # a number beyond counts as not finite

PALETTE = (svg_page.BLUE, svg_page.ORANGE, svg_page.GREEN, svg_page.GREY, *svg_page.BY_NOISE)
BLUE, ORANGE, GREEN, GREY, NOISE = range(5)

_STYLE = """
.line{stroke-width:2.2}.dashed{stroke-width:2;stroke-dasharray:3 5.5}.leader{stroke-opacity:.5}
"""

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line. Its points are joined in the order of x; those without finite numbers are left out."""

    name: str
    points: Sequence[Point]
    colour: int
    """A place in PALETTE."""
    dashed: bool = False
    """A line to compare with: without marks at its points."""

    def __post_init__(self) -> None:
        assert 0 <= self.colour < len(PALETTE)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart. On a logarithmic axis, what is not above 0 is left out."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_log: bool = False
    y_log: bool = False
    y_range: tuple[float, float] | None = None
    """Shown in any case; without it, what the points need."""
    x_ticks: Sequence[float] = ()
    """The values that get a tick, all of them shown; without them, round ones."""


def draw(panels: Sequence[Panel], *, heading: str, note: str = "") -> str:
    """The picture, as the text of an SVG file. Panels without a point are left out."""
    shown = [panel for panel in map(_drawable, panels) if panel.series]
    if not shown:
        raise InputError("no panel has a point that can be drawn; give at least one.")
    pitch = _LEFT + math.ceil(max(map(_room, shown))) + _MARGIN
    width = 2 * _EDGE + pitch * min(_PER_ROW, len(shown))
    header, top = _header(heading, note, width)
    row = _TOP + HEIGHT + _BOTTOM
    height = top + row * math.ceil(len(shown) / _PER_ROW) + _EDGE
    size = f'width="{width}" height="{height}"'
    places = [(_EDGE + pitch * (k % _PER_ROW), top + row * (k // _PER_ROW)) for k in range(len(shown))]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}" role="img">',
            f"<title>{xml_text(heading)}</title><desc>{xml_text(note)}</desc>",
            f"<style>{svg_page.STYLE}{_STYLE}{_rules(0)}",
            f"@media (prefers-color-scheme:dark){{{svg_page.DARK_STYLE}{_rules(1)}}}</style>",
            f'<rect class="page" {size}/>',
            *header,
            *(line for panel, (x, y) in zip(shown, places, strict=True) for line in _draw_panel(panel, x, y)),
            "</svg>\n",
        ]
    )


def _room(panel: Panel) -> float:
    """What the area needs with the texts above and beside it, from its left edge on."""
    name = _NAME + LETTER_PIXELS * max(len(series.name) for series in panel.series)
    return max(name, len(panel.title) * _TITLE_LETTER, len(panel.y_label) * LETTER_PIXELS)


def spread(wanted: Sequence[float], gap: float, high: float) -> list[float]:
    """Places from 0 to `high`, at least `gap` apart, in the order of those `wanted` and as near as can be."""
    order = sorted(range(len(wanted)), key=lambda k: wanted[k])
    gap = min(gap, high / max(1, len(wanted) - 1))
    # Least squares: neighbours that are too close become one group, which stands around its mean.
    groups: list[list[float]] = []
    for rank, k in enumerate(order):
        groups.append([wanted[k] - rank * gap])
        while len(groups) > 1 and fmean(groups[-2]) > fmean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    most = high - gap * (len(wanted) - 1)
    starts = [min(max(fmean(group), 0.0), most) for group in groups for _ in group]
    places = {k: start + rank * gap for rank, (k, start) in enumerate(zip(order, starts, strict=True))}
    return [places[k] for k in range(len(wanted))]


def _drawable(panel: Panel) -> Panel:
    """Only what has a place on its axes, in the order of x."""

    def has_place(point: Point) -> bool:
        pairs = zip(point, (panel.x_log, panel.y_log), strict=True)
        return all(abs(v) < _LARGEST and (v > 1 / _LARGEST or not log) for v, log in pairs)

    found = [replace(s, points=sorted(filter(has_place, s.points), key=itemgetter(0))) for s in panel.series]
    return replace(panel, series=[series for series in found if series.points])


def _header(heading: str, note: str, width: int) -> tuple[list[str], int]:
    """The lines above the panels, and where the panels begin."""
    parts, y, room = [], 12, width - 2 * _EDGE - _LEFT
    kinds = (heading, "heading", 26, _HEADING_LETTER), (note, "note", 18, LETTER_PIXELS)
    for text, style, step, letter in kinds:
        for line in textwrap.wrap(text, max(1, int(room / letter))):
            y += step
            parts.append(f'<text class="{style}" x="{_EDGE + _LEFT}" y="{y}">{xml_text(line)}</text>')
    return parts, y + 10


def _draw_panel(panel: Panel, x: int, y: int) -> Iterator[str]:
    """The panel whose upper left corner is (x, y)."""
    x_axis, y_axis = _x_axis(panel), _y_axis(panel)
    yield f'<g class="panel" transform="translate({x + _LEFT} {y + _TOP})">'
    yield f'<text class="title" y="-34">{xml_text(panel.title)}</text>'
    yield f'<text y="-14">{xml_text(panel.y_label)}</text>'
    yield from _grid(panel, x_axis, y_axis)
    drawn = [
        [(x_axis.place(a) * WIDTH, (1 - y_axis.place(b)) * HEIGHT) for a, b in s.points] for s in panel.series
    ]
    heights = spread([points[-1][1] for points in drawn], LABEL_HEIGHT, HEIGHT)
    for series, points, height in zip(panel.series, drawn, heights, strict=True):
        yield from _name(series, points[-1], height)
    for series, points in reversed(list(zip(panel.series, drawn, strict=True))):  # the first lies on top
        yield from _line(series, points)
    yield "</g>"


def _line(series: Series, points: Sequence[Point]) -> Iterator[str]:
    joined = "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    yield f'<path class="{_style(series)}" d="M{joined}"/>'
    if not series.dashed or len(points) == 1:
        for x, y in _marked(points):
            yield f'<circle class="f{series.colour}" r="3.2" cx="{x:.1f}" cy="{y:.1f}"/>'


def _marked(points: Sequence[Point]) -> list[Point]:
    """The last one, and before it those that are not too close to the next marked one to be told apart."""
    kept = [points[-1]]
    for point in reversed(points):
        if math.dist(point, kept[-1]) >= MARK_PIXELS:
            kept.append(point)
    return kept[::-1]


def _style(series: Series) -> str:
    return f"c{series.colour} {'dashed' if series.dashed else 'line'}"


def _name(series: Series, end: Point, height: float) -> Iterator[str]:
    """The name behind a piece of its line, and a thin way there from the line's end."""
    (x, y), bend = end, (WIDTH + _KEY) / 2
    curve = f"M{x:.1f},{y:.1f}H{WIDTH}C{bend},{y:.1f} {bend},{height:.1f} {_KEY},{height:.1f}"
    yield f'<path class="c{series.colour} leader" d="{curve}"/>'
    yield f'<path class="{_style(series)}" d="M{_KEY},{height:.1f}h12"/>'
    yield f'<text class="name" x="{_NAME}" y="{height:.1f}" dy="4">{xml_text(series.name)}</text>'


def _grid(panel: Panel, x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    for value, text in y_axis.ticks(_MOST_TICKS):
        y = f"{(1 - y_axis.place(value)) * HEIGHT:.1f}"
        yield f'<path class="grid" d="M0,{y}h{WIDTH}"/><text class="y" x="-10" y="{y}" dy="4">{text}</text>'
    for value, text in [(value, f"{value:,g}") for value in panel.x_ticks] or x_axis.ticks(_MOST_TICKS):
        x = f"{x_axis.place(value) * WIDTH:.1f}"
        yield f'<path class="axis" d="M{x},{HEIGHT}v4"/>'
        yield f'<text class="x" x="{x}" y="{HEIGHT + 20}">{text}</text>'
    yield f'<path class="axis" d="M0,{HEIGHT}h{WIDTH}"/>'
    yield f'<text class="x" x="{WIDTH / 2}" y="{HEIGHT + 38}">{xml_text(panel.x_label)}</text>'


def _x_axis(panel: Panel) -> Axis:
    values = [*(x for series in panel.series for x, _ in series.points), *panel.x_ticks]
    low, high = min(values), max(values)
    if panel.x_log:
        return _log_axis(low, high, tight=bool(panel.x_ticks) or high >= 10 * low)
    room = 0.03 * (high - low) or 0.5 * abs(low) or 1.0
    return Axis(low=low - room, high=high + room, whole=all(value == int(value) for value in values))


def _y_axis(panel: Panel) -> Axis:
    values = [*(y for series in panel.series for _, y in series.points), *(panel.y_range or ())]
    if panel.y_log:
        return _log_axis(min(values), max(values), tight=False)
    if panel.y_range:
        return Axis(low=min(values), high=max(values))
    return value_axis([], must_show=values, may_log=False)


def _log_axis(low: float, high: float, *, tight: bool) -> Axis:
    """With a little room at either end, or else from one round number to another: so it has two ticks."""
    if tight and low < high:
        room = (high / low) ** 0.03
        return Axis(low=low / room, high=high * room, log=True)
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    rounds = [digit * 10.0**k for k in decades for digit in (1, 2, 5)]
    below, above = (v for v in rounds if v <= low / 1.05), (v for v in rounds if v >= high * 1.05)
    return Axis(low=max(below), high=min(above), log=True)


def _rules(theme: int) -> str:
    colours = [pair[theme] for pair in PALETTE]
    return "".join(f".c{k}{{stroke:{c}}}.f{k}{{fill:{c}}}" for k, c in enumerate(colours))
