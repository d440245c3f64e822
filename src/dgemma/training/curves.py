"""The curves of a run as one picture: SVG made of its log, readable on light and dark pages. No torch."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from dgemma.errors import CheckpointError
from dgemma.training.axis import step_axis
from dgemma.training.panel import BOTTOM, HEIGHT, LEFT, TOP, WIDTH, Line, draw_panel
from dgemma.training.report import (
    LOG_NAME,
    NOISE_BINS,
    NOISE_LABELS,
    HeldOutReport,
    Report,
    StepReport,
    duration,
    read_log,
)
from dgemma.training.svg_page import BLUE, BY_NOISE, DARK_STYLE, GREY, ORANGE, STYLE, xml_text

CURVES_NAME = "curves.svg"

_HEADER, _MARGIN, _EDGE = 84, 28, 8
_PANEL_WIDTH, _PANEL_HEIGHT = LEFT + WIDTH + _MARGIN, TOP + HEIGHT + BOTTOM + 16
_LOG_STEPS_FROM = 500
_HEADING_LEN = 44

_COLOURS = {
    "diffusion": BLUE,
    "encoder": ORANGE,
    "neutral": GREY,
    **{f"noise-{k}": colours for k, colours in enumerate(BY_NOISE)},
}
_STYLE = """
.broken{stroke:#dc2626;stroke-width:1.5}
.raw{stroke-width:1;stroke-opacity:.3}.raw[class^=noise]{stroke-opacity:.2}.key{stroke-opacity:.8}.smooth{stroke-width:2.2}.only{stroke-width:1.8}
.dot{stroke-width:7}.mark{stroke-width:1.8;fill:#fff}
"""
_DARK_STYLE = """
.mark{fill:#0f141b}.broken{stroke:#f87171}
"""


def write_curves(run_dir: Path) -> Path:
    """Draw `log.jsonl` of a run as `curves.svg` beside it."""
    svg = draw_curves(read_log(run_dir / LOG_NAME), title=run_dir.resolve().name)
    path = run_dir / CURVES_NAME
    new = path.with_name(path.name + ".new")
    try:
        new.write_text(svg, encoding="utf-8")
        os.replace(new, path)  # a page that shows it never sees half of it
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror}. Make room, or choose another directory."
        ) from error
    return path


def draw_curves(reports: Sequence[Report], *, title: str = "Training") -> str:
    """The picture of a log, as the text of an SVG file."""
    # A report of the same step that came later replaces the earlier one.
    by_step = {r.step: r for r in reports if isinstance(r, StepReport)}
    by_look = {r.step: r for r in reports if isinstance(r, HeldOutReport)}
    said, looks = [by_step[k] for k in sorted(by_step)], [by_look[k] for k in sorted(by_look)]
    numbers = [*by_step, *by_look] or [0]
    axis = step_axis(min(numbers), max(numbers), log=_is_mostly_early(said))
    right, below = _EDGE + _PANEL_WIDTH, _HEADER + _PANEL_HEIGHT - 18  # its panels have no legend
    panels = [
        draw_panel(_EDGE, _HEADER, "Loss", _losses(said, looks), axis, may_log=True),
        draw_panel(
            right, _HEADER, "Diffusion loss by noise level t", _by_noise(said, looks), axis, may_log=True
        ),
        draw_panel(_EDGE, below, "Learning rate", [_rate(said)], axis, may_log=False),
        draw_panel(right, below, "Gradient norm", [_norm(said)], axis, may_log=True),
    ]
    left, width, height = _EDGE + LEFT, 2 * (_EDGE + _PANEL_WIDTH), below + _PANEL_HEIGHT
    heading, summary = xml_text(title), xml_text(_summary(said, looks))
    short = xml_text(title if len(title) <= _HEADING_LEN else title[: _HEADING_LEN - 1] + "\u2026")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img">',
            f"<title>{heading}</title><desc>{summary}</desc>",
            f"<style>{STYLE}{_STYLE}{_rules(0)}",
            f"@media (prefers-color-scheme:dark){{{DARK_STYLE}{_DARK_STYLE}{_rules(1)}}}</style>",
            f'<rect class="page" width="{width}" height="{height}"/>',
            # A picture inside, so that a heading in a wide script ends before the keys.
            f'<svg width="{right}" height="48"><text class="heading" x="{left}" y="38">{short}</text></svg>',
            f'<text x="{left}" y="60">{summary}</text>',
            *_keys(right + LEFT, any('"broken"' in panel for panel in panels)),
            *panels,
            "</svg>\n",
        ]
    )


def _losses(steps: Sequence[StepReport], looks: Sequence[HeldOutReport]) -> list[Line]:
    return [
        Line(
            name="diffusion",
            style="diffusion",
            points=[(r.step, r.diffusion) for r in steps],
            marks=[(r.step, r.diffusion) for r in looks],
        ),
        Line(
            name="encoder",
            style="encoder",
            points=[(r.step, r.encoder) for r in steps if r.encoder],  # 0: it was not supervised
            marks=[(r.step, r.encoder) for r in looks],
        ),
    ]


def _by_noise(steps: Sequence[StepReport], looks: Sequence[HeldOutReport]) -> list[Line]:
    return [
        Line(
            name=f"{'t ' if k == 0 else ''}{NOISE_LABELS[k]}",
            style=f"noise-{k}",
            points=[(r.step, v) for r in steps if (v := r.diffusion_by_noise[k]) is not None],
            marks=[(r.step, v) for r in looks if (v := r.diffusion_by_noise[k]) is not None],
        )
        for k in range(NOISE_BINS)
    ]


def _rate(steps: Sequence[StepReport]) -> Line:
    points = [(r.step, r.learning_rate) for r in steps]
    return Line(name="learning rate", style="neutral", points=points, smooth=False)


def _norm(steps: Sequence[StepReport]) -> Line:
    return Line(name="smoothed", style="neutral", points=[(r.step, r.grad_norm) for r in steps])


def _is_mostly_early(steps: Sequence[StepReport]) -> bool:
    """Did a twentieth of the steps bring most of the fall? On a linear axis that would be a wall."""
    losses = [r.loss for r in steps if math.isfinite(r.loss)]
    if len(losses) < _LOG_STEPS_FROM or steps[0].step > 0.01 * steps[-1].step:
        return False
    few = len(losses) // 20
    first, early, late = (fmean(part) for part in (losses[:5], losses[few : 2 * few], losses[-few:]))
    return first - late > 0.2 * abs(first) and first - early > 0.6 * (first - late)


def _summary(steps: Sequence[StepReport], looks: Sequence[HeldOutReport]) -> str:
    if not steps:
        return "no steps yet"
    last = steps[-1]
    parts = [
        f"step {last.step:,} of {last.num_steps:,}",
        f"{last.examples:,} examples",
        f"{last.tokens:,} tokens",
        duration(math.fsum(r.seconds for r in steps)),
    ]
    if looks:
        parts.append(
            f"held out after step {looks[-1].step:,}: diffusion {looks[-1].diffusion:.3f}, "
            f"encoder {looks[-1].encoder:.3f}"
        )
    return " \u00b7 ".join(parts)


def _keys(x: int, has_broken: bool) -> list[str]:
    """What holds for all panels, said once."""
    keys = [
        ("each step", '<path class="neutral raw key" d="M0,-4h16"/>'),
        ("smoothed", '<path class="neutral smooth" d="M0,-4h16"/>'),
        ("held out", '<circle class="neutral mark" r="3.6" cx="8" cy="-4"/>'),
    ]
    if has_broken:
        keys.append(("not finite", '<path class="broken" d="M5,-7l6,6m0-6l-6,6"/>'))
    return [
        f'<g transform="translate({x + 100 * k} 38)">{key}<text x="21">{name}</text></g>'
        for k, (name, key) in enumerate(keys)
    ]


def _rules(theme: int) -> str:
    return "".join(f".{name}{{stroke:{colours[theme]}}}" for name, colours in _COLOURS.items())
