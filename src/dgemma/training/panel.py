"""One chart of a figure, as a piece of SVG: title, legend, axes, lines with their smoothed form. No torch.

A run has more steps than a screen has columns. So points are gathered by the column of pixels they fall
into: of each column the least and the largest value are drawn, and a smoothed line is made of the means.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from dgemma.training.axis import Axis, value_axis

WIDTH, HEIGHT = 480, 230  # of the lines' area, in pixels
LEFT, TOP, BOTTOM = 52, 58, 40  # around it
_SMOOTH_PIXELS = 10.0  # the smoothed line's standard deviation
_MARK_PIXELS = 3.0
_LARGEST = 1e100  # beyond, a number counts as not finite
_LETTER_PIXELS = 6.8  # about, of a legend's letters: fonts differ

Point = tuple[int, float]
"""(step, value)"""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A quantity over the steps. `style` is the CSS class of its colour."""

    name: str
    style: str
    points: Sequence[Point]
    marks: Sequence[Point] = ()
    """Measured now and then, shown one by one."""
    smooth: bool = True
    """A thin line of what was, and a thick one of its tendency; or one line of what was."""


@dataclass
class _Column:
    """The points of one column of pixels."""

    points: list[tuple[float, float]] = field(default_factory=list)  # (x in pixels, value)
    broken: bool = False  # also holds what is not finite


def draw_panel(x: int, y: int, title: str, lines: Sequence[Line], steps: Axis, *, may_log: bool) -> str:
    """The panel whose upper left corner is (x, y)."""
    columns = [_columns(line.points, steps) for line in lines]
    smoothed = [_smoothed(c) if line.smooth else {} for line, c in zip(lines, columns, strict=True)]
    marks = [v for line in lines for _, v in line.marks if _is_finite(v)]
    values = value_axis(
        [v for line in lines for _, v in line.points if _is_finite(v)],
        must_show=[*(v for means in smoothed for v in means.values()), *marks],
        may_log=may_log,
    )
    if values.log:  # there the middle of what is seen is that of the logarithms
        smoothed = [
            _smoothed(c, log=True) if line.smooth else {} for line, c in zip(lines, columns, strict=True)
        ]
    broken = sorted({at for c in columns for at, column in c.items() if column.broken})
    clip = f"area-{x}-{y}"
    parts = [
        f'<g transform="translate({x + LEFT} {y + TOP})">',
        f'<clipPath id="{clip}"><rect x="-4" y="-4" width="{WIDTH + 8}" height="{HEIGHT + 8}"/></clipPath>',
        f'<text class="title" x="0" y="{-36 if len(lines) > 1 else -16}">{escape(title)}</text>',
        *_legend(lines),
        *_axes(steps, values),
        f'<g clip-path="url(#{clip})">',
    ]
    for line, c in zip(lines, columns, strict=True):
        weight = "dot" if len(c) == 1 else "raw" if line.smooth else "only"
        parts.append(f'<path class="{line.style} {weight}" d="{_path(map(_extremes, c.values()), values)}"/>')
    for line, c, means in zip(lines, columns, smoothed, strict=True):
        if means:
            middles = [[(at + 0.5, means[at])] if at in means else [] for at in c]
            parts.append(f'<path class="{line.style} smooth" d="{_path(middles, values)}"/>')
    parts.append("</g>")
    parts += [f'<path class="broken" d="M{at - 3},{HEIGHT - 7}l6,6m0-6l-6,6"/>' for at in broken]
    for line in lines:
        # Of marks that would hide each other the last one; one before the axis begins, on its beginning.
        places = ((max(0.0, steps.place(step)) * WIDTH, v) for step, v in line.marks if _is_finite(v))
        for at, value in {int(at / _MARK_PIXELS): (at, value) for at, value in places}.values():
            where = f'cx="{at:.1f}" cy="{_y(value, values)}"'
            parts.append(f'<circle class="{line.style} mark" r="3.6" {where}/>')
    return "\n".join([*parts, "</g>"])


def _is_finite(value: float) -> bool:
    return abs(value) < _LARGEST  # false for NaN


def _columns(points: Iterable[Point], steps: Axis) -> dict[int, _Column]:
    found: dict[int, _Column] = {}
    for step, value in points:
        x = steps.place(step) * WIDTH
        column = found.setdefault(min(int(x), WIDTH - 1), _Column())
        if _is_finite(value):
            column.points.append((x, value))
        else:
            column.broken = True
    return found


def _extremes(column: _Column) -> list[tuple[float, float]]:
    """The points with the least and the largest value, in the order they came in."""
    points = column.points
    if len(points) <= 2:
        return points
    return sorted([min(points, key=_value), max(points, key=_value)])


def _value(point: tuple[float, float]) -> float:
    return point[1]


def _smoothed(columns: dict[int, _Column], *, log: bool = False) -> dict[int, float]:
    """Means around each column that has values, by a bell curve: no lag, as a running mean would have."""
    scaled = {
        at: [math.log(v) for _, v in column.points if v > 0] if log else [v for _, v in column.points]
        for at, column in columns.items()
    }
    sums = {at: (math.fsum(values), len(values)) for at, values in scaled.items() if values}
    reach = int(3 * _SMOOTH_PIXELS)
    bell = [math.exp(-0.5 * (d / _SMOOTH_PIXELS) ** 2) for d in range(reach + 1)]
    means = {}
    for at in sums:
        near = [(bell[abs(d)], *sums[at + d]) for d in range(-reach, reach + 1) if at + d in sums]
        mean = sum(w * s for w, s, _ in near) / sum(w * n for w, _, n in near)
        means[at] = math.exp(mean) if log else mean
    return means


def _path(columns: Iterable[Sequence[tuple[float, float]]], values: Axis) -> str:
    """Columns without points interrupt it. A point alone is drawn as a dot, by its round ends."""
    parts: list[str] = []
    pen_down = False
    for column in columns:
        for x, value in column:
            at = f"{x:.1f},{_y(value, values)}"
            parts.append(f"L{at}" if pen_down else f"M{at}h0")
            pen_down = True
        pen_down = pen_down and bool(column)
    return "".join(parts)


def _y(value: float, values: Axis) -> str:
    # Far outside is outside: enormous coordinates are drawn wrongly.
    return f"{(1 - min(max(values.place(value), -1.0), 2.0)) * HEIGHT:.1f}"


def _legend(lines: Sequence[Line]) -> Iterator[str]:
    x = 0.0
    for line in lines if len(lines) > 1 else []:
        name = escape(line.name)
        yield (
            f'<g transform="translate({x:.0f} -14)"><path class="{line.style} smooth" d="M0,-4h16"/>'
            f'<text x="21">{name}</text></g>'
        )
        x += 21 + len(line.name) * _LETTER_PIXELS + 16


def _axes(steps: Axis, values: Axis) -> Iterator[str]:
    for value, text in values.ticks(6):
        y = _y(value, values)
        yield f'<path class="grid" d="M0,{y}h{WIDTH}"/><text class="y" x="-8" y="{y}" dy="4">{text}</text>'
    for step, text in steps.ticks(6):
        x = f"{steps.place(step) * WIDTH:.1f}"
        yield f'<path class="axis" d="M{x},{HEIGHT}v4"/>'
        yield f'<text class="x" x="{x}" y="{HEIGHT + 18}">{text}</text>'
    yield f'<path class="axis" d="M0,{HEIGHT}h{WIDTH}"/>'
    name = "step (logarithmic)" if steps.log else "step"
    yield f'<text class="x" x="{WIDTH / 2}" y="{HEIGHT + 34}">{name}</text>'
