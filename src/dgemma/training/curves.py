"""The curves of a run as one figure, drawn by matplotlib from its log. No torch.

A run has more steps than a figure has columns. Steps are therefore gathered into columns: a thin band shows
the smallest and largest value of each, a line their smoothed mean.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dgemma.durable_files import write_whole
from dgemma.errors import CheckpointError, InputError
from dgemma.training.report import (
    LOG_NAME,
    NOISE_BINS,
    NOISE_LABELS,
    HeldOutReport,
    StepReport,
    TrainingReport,
    duration,
    read_log,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES_NAME = "curves.svg"
MISSING_MATPLOTLIB = 'figures need matplotlib; run: pip install "dgemma[plot]"'

BLUE, ORANGE, GREY, GREEN = "#2563c9", "#c2570c", "#6b7280", "#0f8a6b"
# Noise levels are ordered, and so are their colours.
BY_NOISE = ("#1d1a9e", "#8a0fb0", "#cf3f7d", "#ec7a3c", "#cf9a00")
STYLE: Any = {
    "svg.hashsalt": "dgemma",  # deterministic ids: the same figure gives the same file
    "svg.fonttype": "none",  # text stays text
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "text.color": "#111827",
}

_COLUMNS = 480
_SMOOTH_COLUMNS = 10.0  # the standard deviation of the smoothing window
_LOG_RATIO = 50.0  # values that differ by more get a logarithmic axis
_LARGEST, _SMALLEST = 1e100, 1e-100  # larger numbers count as not finite, smaller ones as 0
_RARE = 0.5  # percent of the values at either end that may lie outside: one spike must not flatten the figure


def write_curves(run_dir: Path, name: str = CURVES_NAME) -> Path:
    """Draw the `log.jsonl` of a run into its directory. The suffix of `name`, .svg or .png, is the format."""
    reports = read_log(run_dir / LOG_NAME)
    path = run_dir / name
    write_figure(draw_curves(reports, title=run_dir.resolve().name), path)
    return path


def write_figure(figure: Figure, path: Path) -> None:
    """The figure as SVG or PNG, by the suffix. The same figure gives the same bytes."""
    import matplotlib

    kind = path.suffix.removeprefix(".")
    if kind not in ("svg", "png"):
        raise InputError(
            f"{path.name} ends in {path.suffix!r}; figures are written as .svg or .png.", field="path"
        )
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        # matplotlib writes no date into PNG files and does not accept the key.
        figure.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else None, dpi=144)
    try:
        write_whole(path, buffer.getvalue())  # a reader never sees an incomplete file
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror}. Free some space, or choose another directory."
        ) from error


def new_figure(num_rows: int, num_columns: int, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure without pyplot's global state, and its axes row by row. Call it within `rc_context(STYLE)`."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(MISSING_MATPLOTLIB) from None
    figure = Figure(layout="constrained", **options)
    axes = np.atleast_1d(figure.subplots(num_rows, num_columns))
    return figure, list(axes.flat)


def draw_curves(reports: Sequence[TrainingReport], *, title: str = "Training") -> Figure:
    """Losses, losses by noise level, learning rate and gradient norm over the steps."""
    try:
        import matplotlib
    except ImportError:
        raise InputError(MISSING_MATPLOTLIB) from None
    # A later report of the same step replaces the earlier one.
    by_step = {r.step: r for r in reports if isinstance(r, StepReport)}
    by_eval = {r.step: r for r in reports if isinstance(r, HeldOutReport)}
    steps, evals = [by_step[k] for k in sorted(by_step)], [by_eval[k] for k in sorted(by_eval)]
    with matplotlib.rc_context(STYLE):
        figure, (losses, noise, rate, norm) = new_figure(2, 2, figsize=(11, 7))
        figure.suptitle(f"{_printable(title)[:60]}\n{_summary(steps, evals)}", x=0.01, ha="left", fontsize=11)
        log = _is_mostly_early(steps)
        x = np.array([r.step for r in steps], float)
        x_eval = np.array([r.step for r in evals], float)
        lines: Lines = {
            "diffusion": (BLUE, [r.diffusion for r in steps], [r.diffusion for r in evals]),
            # 0: it was not supervised.
            "encoder": (ORANGE, [r.encoder or None for r in steps], [r.encoder for r in evals]),
        }
        _draw(losses, "Loss", x, x_eval, lines, log=log)
        by_noise: Lines = {
            f"t {NOISE_LABELS[k]}": (
                BY_NOISE[k],
                [r.diffusion_by_noise[k] for r in steps],
                [r.diffusion_by_noise[k] for r in evals],
            )
            for k in range(NOISE_BINS)
        }
        _draw(noise, "Diffusion loss by noise level t", x, x_eval, by_noise, log=log)
        rates: Lines = {"learning rate": (GREY, [r.learning_rate for r in steps], [])}
        _draw(rate, "Learning rate", x, x_eval, rates, log=log, smooth=False)
        _draw(
            norm,
            "Gradient norm",
            x,
            x_eval,
            {"gradient norm": (GREY, [r.grad_norm for r in steps], [])},
            log=log,
        )
    return figure


Lines = Mapping[str, tuple[str, Sequence[float | None], Sequence[float | None]]]
"""By name: colour, a value per step, a value per evaluation of held-out data."""


def _draw(
    axes: Axes, title: str, x: Any, x_eval: Any, lines: Lines, *, log: bool, smooth: bool = True
) -> None:
    axes.set_title(title)
    axes.set_xlabel("step (logarithmic)" if log else "step")
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    shown: list[Any] = []
    smoothed: list[Any] = []
    broken: set[float] = set()
    for name, (colour, values, held_out) in lines.items():
        y, y_eval = _numbers(values), _numbers(held_out)
        broken |= {
            float(at)
            for at, v, raw in zip(x, y, values, strict=True)
            if raw is not None and not np.isfinite(v)
        }
        columns = _Columns(x, y, log=log)
        shown += [y[np.isfinite(y)], y_eval[np.isfinite(y_eval)]]
        if smooth and len(columns.centers) > 1:
            axes.fill_between(
                columns.centers, columns.lows, columns.highs, color=colour, alpha=0.25, linewidth=0.5
            )
            smoothed.append(columns.smoothed())
            axes.plot(columns.centers, smoothed[-1], color=colour, linewidth=1.8, label=name)
        else:
            marker = "o" if len(columns.centers) == 1 else None
            axes.plot(columns.centers, columns.means, color=colour, linewidth=1.5, marker=marker, label=name)
        if np.isfinite(y_eval).any():
            kept = np.linspace(0, len(x_eval) - 1, min(len(x_eval), 100)).astype(int)
            axes.plot(x_eval[kept], y_eval[kept], "o", color=colour, markerfacecolor="white", markersize=4.5)
    _scale(axes, shown, smoothed)
    if broken:
        places = _Columns(np.array(sorted(broken)), np.ones(len(broken)), log=log).centers
        axes.plot(
            places, np.full(len(places), 0.03), "x", color="#dc2626", transform=axes.get_xaxis_transform(),
            label="not finite",
        )  # fmt: skip
    if any(held_out for _, _, held_out in lines.values()):
        axes.plot([], [], "o", color=GREY, markerfacecolor="white", markersize=4.5, label="held out")
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(loc="best", ncols=2)


def _numbers(values: Sequence[float | None]) -> Any:
    """NaN for what is absent or too large to draw."""
    numbers = np.array([math.nan if value is None else value for value in values], float)
    return np.where(np.abs(numbers) < _LARGEST, numbers, math.nan)


def _scale(axes: Axes, shown: Sequence[Any], smoothed: Sequence[Any]) -> None:
    values = np.concatenate(shown) if shown else np.empty(0)
    if not len(values):
        axes.set_ylim(0, 1)
        return
    low, high = (float(v) for v in np.percentile(values, [_RARE, 100 - _RARE]))
    low, high = min([low, *map(np.min, smoothed)]), max([high, *map(np.max, smoothed)])
    if low > _SMALLEST and high > _LOG_RATIO * low:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.3, high * 1.3)
    elif high - low < 1e-6 * max(abs(low), abs(high), _SMALLEST):
        margin = 0.1 * max(abs(low), abs(high)) or 1.0
        axes.set_ylim(low - margin, high + margin)
    else:
        margin = 0.06 * (high - low)
        axes.set_ylim(0 if 0 <= low < 0.5 * high else low - margin, high + margin)


class _Columns:
    """Values grouped by the column of the figure that contains their step, without NaN."""

    def __init__(self, x: Any, y: Any, *, log: bool) -> None:
        good = np.isfinite(y)
        x, y = x[good], y[good]
        place = np.log(np.maximum(x, 1)) if log else x
        low, high = (place.min(), place.max()) if len(x) else (0.0, 0.0)
        width = max(high - low, 1e-9) / _COLUMNS
        column = np.minimum(((place - low) / width).astype(int), _COLUMNS - 1)
        self._places, starts, self._counts = np.unique(column, return_index=True, return_counts=True)
        self._sums = np.add.reduceat(y, starts) if len(y) else y
        self.lows = np.minimum.reduceat(y, starts) if len(y) else y
        self.highs = np.maximum.reduceat(y, starts) if len(y) else y
        self.centers = np.add.reduceat(x, starts) / self._counts if len(x) else x
        self.means = self._sums / self._counts

    def smoothed(self) -> Any:
        """Means under a Gaussian window around each column. Unlike a running mean, they do not lag."""
        distance = (self._places[:, None] - self._places[None, :]) / _SMOOTH_COLUMNS
        window = np.exp(-0.5 * distance**2)
        return (window @ self._sums) / (window @ self._counts)


def _is_mostly_early(steps: Sequence[StepReport]) -> bool:
    """Whether most of the loss decrease is in the first twentieth of the steps. The step axis is then log."""
    losses = [r.loss for r in steps if math.isfinite(r.loss)]
    if len(losses) < 500 or steps[0].step > 0.01 * steps[-1].step:
        return False
    few = len(losses) // 20
    first, early, late = (float(np.mean(part)) for part in (losses[:5], losses[few : 2 * few], losses[-few:]))
    return first - late > 0.2 * abs(first) and first - early > 0.6 * (first - late)


def _summary(steps: Sequence[StepReport], evals: Sequence[HeldOutReport]) -> str:
    if not steps:
        return "no steps yet"
    last = steps[-1]
    parts = [
        f"step {last.step:,} of {last.num_steps:,}",
        f"{last.examples:,} examples",
        f"{last.tokens:,} tokens",
        duration(math.fsum(r.seconds for r in steps)),
    ]
    if evals:
        parts.append(
            f"held out after step {evals[-1].step:,}: diffusion {evals[-1].diffusion:.3f}, "
            f"encoder {evals[-1].encoder:.3f}"
        )
    return " \u00b7 ".join(parts)


def _printable(text: str) -> str:
    """`text` for XML, without control characters and lone surrogates; $ would begin a formula."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text).replace("$", r"\$")
