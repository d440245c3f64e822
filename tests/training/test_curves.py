"""The figure of a run: drawn for any log, small, the same bytes for the same log, and complete."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from dgemma.errors import CheckpointError, InputError
from dgemma.training.curves import CURVES_NAME, draw_curves, write_curves, write_figure
from dgemma.training.report import NOISE_LABELS, HeldOutReport, RunLog, StepReport, TrainingReport
from sizes import IS_FULL

STEP = StepReport(
    step=1, num_steps=10, loss=3.2, diffusion=2.1, encoder=1.1,
    diffusion_by_noise=(0.4, None, 1.9, 2.8, 3.4), learning_rate=1.5e-4, grad_norm=0.8, examples=4,
    tokens=4096, seconds=0.7, tokens_per_second=812.5, eta_s=None,
)  # fmt: skip
HELD_OUT = HeldOutReport(
    step=0,
    diffusion=2.5,
    encoder=1.4,
    diffusion_by_noise=(0.5, 1.0, 2.0, None, 3.5),
    examples=64,
    seconds=3.0,
)
TITLES = ["Loss", "Diffusion loss by noise level t", "Learning rate", "Gradient norm"]


def a_run(
    num_steps: int, loss: Callable[[int], float] = lambda step: 1 + 1 / step, first: int = 1
) -> list[StepReport]:
    return [
        replace(STEP, step=step, num_steps=num_steps, loss=loss(step), diffusion=loss(step))
        for step in range(first, num_steps + 1)
    ]


def svg(reports: list[TrainingReport], where: Path, title: str = "Training") -> bytes:
    path = where / "figure.svg"
    write_figure(draw_curves(reports, title=title), path)
    return path.read_bytes()


CASES: dict[str, list[TrainingReport]] = {
    "nothing": [],
    "one step": [STEP],
    "one evaluation": [HELD_OUT],
    "two steps": [*a_run(2)],
    "constant": [*a_run(50, lambda _: 2.0)],
    "zero": [*a_run(50, lambda _: 0.0)],
    "negative": [*a_run(50, lambda step: -step)],
    "all nan": [*a_run(50, lambda _: math.nan)],
    "some nan": [*a_run(50, lambda step: math.nan if step % 7 == 0 else 1 / step)],
    "infinite": [*a_run(50, lambda step: (-1) ** step * math.inf if step > 20 else 1.0)],
    "enormous": [*a_run(50, lambda step: 1e308 * (-1) ** step if step > 20 else 1e99 * (-1) ** step)],
    "tiny": [*a_run(50, lambda step: step * 5e-324)],
    "tiny and enormous": [*a_run(50, lambda step: 5e-324 if step % 2 else 1e99)],
    "nearly constant": [*a_run(50, lambda step: 1 + step * 2.3e-16)],
    "resumed late": [*a_run(1_000_050, first=1_000_000)],
    "nan held out": [*a_run(5), replace(HELD_OUT, diffusion=math.nan, encoder=math.inf)],
}


@pytest.mark.parametrize(
    "name", list(CASES) if IS_FULL else ["nothing", "some nan", "enormous", "resumed late"]
)
def test_any_log_is_drawn_as_well_formed_svg(name: str, tmp_path: Path) -> None:
    text = svg(CASES[name], tmp_path)
    ElementTree.fromstring(text)  # noqa: S314 (our own)
    for title in TITLES:
        assert title.encode() in text


def test_a_long_run_stays_small_and_keeps_its_extremes(tmp_path: Path) -> None:
    rng = random.Random(0)
    reports: list[TrainingReport] = []
    for report in a_run(30_000, lambda step: 2 + rng.random() - (2 if step == 17_777 else 0)):
        reports.append(report)
        if report.step % 10 == 0:
            reports.append(replace(HELD_OUT, step=report.step))
    figure = draw_curves(reports)
    band = figure.axes[0].collections[0].get_paths()[0].vertices
    x, y = band[np.argmin(band[:, 1])]
    assert x == pytest.approx(17_777, abs=100)
    assert y < 1
    assert len(svg(reports, tmp_path)) < 600_000


def test_the_smoothed_line_has_no_lag_and_less_noise() -> None:
    rng = random.Random(0)
    figure = draw_curves(a_run(2000, lambda step: 3 - step / 1000 + rng.gauss(0, 0.3)))
    x, y = (np.asarray(data) for data in figure.axes[0].lines[0].get_data())
    inside = slice(40, -40)
    assert np.abs(y - (3 - x / 1000))[inside].max() < 0.12


def test_held_out_points_stand_at_their_step() -> None:
    reports = [*a_run(100), *(replace(HELD_OUT, step=step) for step in (0, 50, 100))]
    lines = draw_curves(reports).axes[0].lines
    (points,) = [line for line in lines if line.get_marker() == "o" and line.get_color() == "#2563c9"]
    assert list(points.get_xdata()) == [0, 50, 100]
    assert list(points.get_ydata()) == [2.5] * 3


def test_what_is_not_finite_is_left_out_and_marked() -> None:
    axes = draw_curves(CASES["some nan"]).axes[0]
    (marks,) = [line for line in axes.lines if line.get_label() == "not finite"]
    assert list(marks.get_xdata()) == [7, 14, 21, 28, 35, 42, 49]
    assert not [line for line in draw_curves(a_run(50)).axes[0].lines if line.get_label() == "not finite"]


def test_noise_levels_are_named() -> None:
    labels = [line.get_label() for line in draw_curves(a_run(5)).axes[1].lines]
    assert labels == [f"t {label}" for label in NOISE_LABELS]


@pytest.mark.parametrize("title", ["<b>&\"'", "a\x00\x1b\ud800\uffff", "]]>", "$x_1$", "x" * 500])
def test_any_title_is_only_text(title: str, tmp_path: Path) -> None:
    root = ElementTree.fromstring(svg([STEP], tmp_path, title))  # noqa: S314 (our own)
    texts = "".join(root.itertext())
    shown = "".join(sign if sign.isprintable() else "\ufffd" for sign in title)
    assert shown[:60] in texts


def test_steps_are_logarithmic_only_when_most_happens_early() -> None:
    def is_log(reports: list[StepReport]) -> bool:
        return draw_curves(reports).axes[0].get_xlabel() == "step (logarithmic)"

    assert is_log(a_run(5000, lambda step: 2 + 10 * math.exp(-step / 40)))
    assert not is_log(a_run(5000, lambda step: 2 - step / 5000))
    assert not is_log(a_run(5000, lambda step: 2 + 0.2 * math.exp(-step / 40)))
    assert not is_log(a_run(100, lambda step: 2 + 10 * math.exp(-step)))
    assert not is_log(a_run(5000, lambda step: 2 + 10 * math.exp(-(step - 4000) / 4), first=4000))


def test_values_far_apart_get_a_logarithmic_axis_and_a_rare_spike_does_not_flatten_the_rest() -> None:
    assert draw_curves(a_run(50, lambda step: 10.0 ** (step / 10))).axes[0].get_yscale() == "log"
    assert draw_curves(a_run(50)).axes[0].get_yscale() == "linear"
    spiked = a_run(1001, lambda step: 40.0 if step == 500 else 1.0 + step % 2)
    assert draw_curves(spiked).axes[0].get_ylim()[1] < 3


def test_the_last_report_of_a_step_counts(tmp_path: Path) -> None:
    first, second = a_run(20), a_run(20, lambda step: 5.0, first=10)
    assert svg([*first, *second], tmp_path) == svg([*first[:9], *second], tmp_path)


def test_the_summary_names_the_place_of_the_run() -> None:
    reports = [*a_run(3), replace(HELD_OUT, step=3)]
    assert draw_curves(reports).get_suptitle().splitlines()[1] == (
        "step 3 of 3 · 4 examples · 4,096 tokens · 2s · held out after step 3: diffusion 2.500, encoder 1.400"
    )
    assert draw_curves([]).get_suptitle().splitlines()[1] == "no steps yet"


def write_log(where: Path) -> None:
    with RunLog(where) as log:
        for report in a_run(5):
            log.write(report)


def test_the_figure_of_a_run_stands_beside_its_log_and_its_bytes_do_not_change(tmp_path: Path) -> None:
    write_log(tmp_path)
    path = write_curves(tmp_path)
    assert path == tmp_path / CURVES_NAME
    first = path.read_bytes()
    assert write_curves(tmp_path).read_bytes() == first
    assert b"<dc:date>" not in first
    assert len(list(tmp_path.iterdir())) == 2


def test_a_png_is_written_by_its_suffix_and_others_are_refused(tmp_path: Path) -> None:
    write_log(tmp_path)
    assert write_curves(tmp_path, "curves.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match=r"ends in '\.gif'; figures are written as \.svg or \.png"):
        write_curves(tmp_path, "curves.gif")


def test_without_matplotlib_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r'need matplotlib; run: pip install "dgemma\[plot\]"'):
        draw_curves([STEP])


def test_a_run_without_a_log_has_no_figure(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"log\.jsonl cannot be read"):
        write_curves(tmp_path)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    RunLog(tmp_path).close()
    (tmp_path / CURVES_NAME).mkdir()
    with pytest.raises(CheckpointError, match=r"curves\.svg cannot be written: Is a directory"):
        write_curves(tmp_path)
