"""The picture of a run: always well-formed, never too large, and what matters is in it."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.parsers import expat

import pytest

from dgemma.errors import CheckpointError
from dgemma.training.axis import Axis, label, step_axis, value_axis
from dgemma.training.curves import CURVES_NAME, draw_curves, write_curves
from dgemma.training.panel import HEIGHT, WIDTH
from dgemma.training.report import NOISE_LABELS, HeldOutReport, Report, RunLog, StepReport

Element = tuple[str, dict[str, str]]
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


def a_run(
    num_steps: int, loss: Callable[[int], float] = lambda step: 1 + 1 / step, first: int = 1
) -> list[StepReport]:
    return [
        replace(STEP, step=step, num_steps=num_steps, loss=loss(step), diffusion=loss(step))
        for step in range(first, num_steps + 1)
    ]


def parse(svg: str) -> tuple[list[Element], list[str]]:
    """Elements and texts of a well-formed picture whose numbers are numbers."""
    elements: list[Element] = []
    texts: list[str] = []
    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler = lambda name, attributes: elements.append((name, attributes))
    parser.CharacterDataHandler = texts.append
    parser.Parse(svg.encode(), True)
    for _, attributes in elements:
        drawn = " ".join(attributes.get(name, "") for name in ("d", "cx", "cy", "x", "y", "transform"))
        assert not re.search(r"nan|inf|\de[+-]?\d", drawn)
    return elements, [text.strip() for text in texts if text.strip()]


def paths(svg: str, style: str) -> list[list[tuple[float, float]]]:
    """The points of each line of this style; keys of the legend are left out."""
    found = [a["d"] for name, a in parse(svg)[0] if name == "path" and a.get("class") == style]
    points = [re.findall(r"[ML]([-\d.]+),([-\d.]+)", d) for d in found if "h16" not in d]
    return [[(float(x), float(y)) for x, y in line] for line in points if line]


CASES: dict[str, list[Report]] = {
    "nothing": [],
    "one step": [STEP],
    "one look": [HELD_OUT],
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


@pytest.mark.parametrize("name", CASES)
def test_any_run_makes_a_picture(name: str) -> None:
    _, texts = parse(draw_curves(CASES[name]))
    for title in ("Loss", "Diffusion loss by noise level t", "Learning rate", "Gradient norm"):
        assert title in texts


def test_a_long_run_stays_small_and_keeps_its_extremes() -> None:
    rng = random.Random(0)
    reports: list[Report] = []
    for report in a_run(100_000, lambda step: 2 + rng.random() - (2 if step == 77_777 else 0)):
        reports.append(report)
        if report.step % 10 == 0:
            reports.append(replace(HELD_OUT, step=report.step))
    svg = draw_curves(reports)
    assert len(svg) < 400_000
    for style in ("diffusion raw", "encoder raw", "noise-0 raw", "diffusion smooth", "neutral only"):
        (line,) = paths(svg, style)
        assert WIDTH // 2 < len(line) <= 1000
    (raw,) = paths(svg, "diffusion raw")
    x, y = max(raw, key=lambda point: point[1])
    assert x == pytest.approx(WIDTH * 0.77777, abs=1)
    assert y > max(y for x, y in raw if abs(x - WIDTH * 0.77777) > 2) + 20
    marks = [a for name, a in parse(svg)[0] if name == "circle" and a["class"] == "diffusion mark"]
    assert 100 < len(marks) <= WIDTH


def test_the_smoothed_line_has_no_lag_and_less_noise() -> None:
    rng = random.Random(0)
    svg = draw_curves(a_run(2000, lambda step: 3 - step / 1000 + rng.gauss(0, 0.3)))
    (raw,), (smooth,) = paths(svg, "diffusion raw"), paths(svg, "diffusion smooth")
    height = {round(x - 0.5): y for x, y in smooth}

    def off_the_line(points: list[tuple[float, float]]) -> float:
        low, high = height[40], height[WIDTH - 40]
        slope = (high - low) / (WIDTH - 80)
        inside = [(x, y) for x, y in points if 40 < x < WIDTH - 40]
        return max(abs(y - low - slope * (x - 40)) for x, y in inside)

    assert off_the_line(smooth) < 12
    assert off_the_line(raw) > 40


def test_held_out_points_stand_at_their_step() -> None:
    reports = [*a_run(100), *(replace(HELD_OUT, step=step) for step in (0, 50, 100))]
    elements, texts = parse(draw_curves(reports))
    circles = [a for name, a in elements if name == "circle"]
    assert [a["cx"] for a in circles if a["class"] == "diffusion mark"] == ["0.0", "240.0", "480.0"]
    assert not [a for a in circles if a["class"] == "noise-3 mark"]
    assert len([a for a in circles if a["class"] == "noise-4 mark"]) == 3
    assert "held out" in texts


def test_what_is_not_finite_interrupts_the_line_and_is_marked() -> None:
    svg = draw_curves(CASES["some nan"])
    elements, texts = parse(svg)
    (broken,) = [a["d"] for n, a in elements if n == "path" and a.get("class") == "diffusion raw"]
    assert broken.count("M") == 8  # 50 steps, every 7th missing
    assert len([a for n, a in elements if a.get("class") == "broken"]) == 7 + 1  # and the key
    assert "not finite" in texts
    assert "not finite" not in parse(draw_curves(a_run(50)))[1]


def test_a_single_point_can_be_seen() -> None:
    svg = draw_curves([STEP])
    assert paths(svg, "diffusion dot") == [[(WIDTH / 2, pytest.approx(0.06 * HEIGHT, abs=2))]]
    assert ".dot{stroke-width:7}" in svg


def test_noise_levels_are_named() -> None:
    _, texts = parse(draw_curves(a_run(5)))
    names = [text.removeprefix("t ") for text in texts]
    assert [name for name in names if name in NOISE_LABELS] == [*NOISE_LABELS]


def test_a_light_and_a_dark_page_both_have_colours_for_all() -> None:
    svg = draw_curves(a_run(5))
    light, dark = svg.split("@media (prefers-color-scheme:dark)")
    names = set(re.findall(r'<path class="([\w-]+) ', svg))
    assert {"diffusion", "encoder", "neutral", "noise-0", "noise-4"} <= names
    for name in names:
        assert f".{name}{{stroke:#" in light
        assert f".{name}{{stroke:#" in dark
    assert ".page{fill:#fff}" in light
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("title", ["<b>&\"'", "a\x00\x1b\ud800\uffff", "]]>", "日本語", "x" * 500])
def test_any_title_is_only_text(title: str) -> None:
    elements, texts = parse(draw_curves([STEP], title=title))
    assert not [name for name, _ in elements if name == "b"]
    assert texts[0] == re.sub("[\x00\x1b\ud800\uffff]", "\ufffd", title)


def test_steps_are_logarithmic_only_when_most_happens_early() -> None:
    def is_log(reports: list[StepReport]) -> bool:
        return "step (logarithmic)" in parse(draw_curves(reports))[1]

    assert is_log(a_run(5000, lambda step: 2 + 10 * math.exp(-step / 40)))
    assert not is_log(a_run(5000, lambda step: 2 - step / 5000))
    assert not is_log(a_run(5000, lambda step: 2 + 0.2 * math.exp(-step / 40)))
    assert not is_log(a_run(100, lambda step: 2 + 10 * math.exp(-step)))
    assert not is_log(a_run(5000, lambda step: 2 + 10 * math.exp(-(step - 4000) / 4), first=4000))
    # A look before the first step still has a place there.
    elements, _ = parse(draw_curves([HELD_OUT, *a_run(5000, lambda step: 2 + 10 * math.exp(-step / 40))]))
    assert [a["cx"] for name, a in elements if a.get("class") == "diffusion mark"] == ["0.0"]


def test_a_step_said_twice_counts_as_said_last() -> None:
    first, second = a_run(20), a_run(20, lambda step: 5.0, first=10)
    assert draw_curves([*first, *second]) == draw_curves([*first[:9], *second])


def test_the_summary_says_where_the_run_is() -> None:
    reports = [*a_run(3), replace(HELD_OUT, step=3)]
    summary = parse(draw_curves(reports))[1][1]
    assert summary == (
        "step 3 of 3 · 4 examples · 4,096 tokens · 2s · held out after step 3: diffusion 2.500, encoder 1.400"
    )
    assert parse(draw_curves([]))[1][1] == "no steps yet"


def test_the_picture_of_a_run_stands_beside_its_log(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        for report in a_run(5):
            log.write(report)
    path = write_curves(tmp_path)
    assert path == tmp_path / CURVES_NAME
    assert path.read_text(encoding="utf-8") == draw_curves(a_run(5), title=tmp_path.name)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_run_without_a_log_has_no_picture(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"log\.jsonl cannot be read"):
        write_curves(tmp_path)


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    RunLog(tmp_path).close()
    (tmp_path / CURVES_NAME).mkdir()
    with pytest.raises(CheckpointError, match=r"curves\.svg cannot be written: Is a directory"):
        write_curves(tmp_path)


# Axes


@pytest.mark.parametrize(
    ("axis", "labels"),
    [
        (Axis(low=0, high=1000), ["0", "200", "400", "600", "800", "1,000"]),
        (Axis(low=0, high=100_000), ["0", "20k", "40k", "60k", "80k", "100k"]),
        (Axis(low=0, high=3e6), ["0", "500k", "1.0M", "1.5M", "2.0M", "2.5M", "3.0M"]),
        (Axis(low=0, high=9e6), ["0", "2M", "4M", "6M", "8M"]),
        (Axis(low=1_000_000, high=1_000_050), [f"1,000,0{n}0" for n in range(6)]),
        (Axis(low=0, high=2, whole=True), ["0", "1", "2"]),
        (Axis(low=0, high=1.6e-4), ["0", "5e-5", "1e-4", "1.5e-4"]),
        (Axis(low=1.28, high=1.57), ["1.30", "1.35", "1.40", "1.45", "1.50", "1.55"]),
        (Axis(low=-1, high=1), ["-1.0", "-0.5", "0", "0.5", "1.0"]),
        (Axis(low=0, high=4e12), ["0", "1e12", "2e12", "3e12", "4e12"]),
        (Axis(low=1, high=100_000, log=True), ["1", "10", "100", "1k", "10k", "100k"]),
        (Axis(low=0.3, high=30, log=True), ["0.5", "1", "2", "5", "10", "20"]),
        (Axis(low=0.04, high=40, log=True), ["0.1", "0.3", "1", "3", "10", "30"]),
        (Axis(low=0.02, high=40, log=True), ["0.1", "1", "10"]),
        (Axis(low=1e-9, high=1e9, log=True), ["1e-9", "1e-5", "0.1", "1k", "10M"]),
    ],
)  # fmt: skip
def test_ticks_are_round_numbers(axis: Axis, labels: list[str]) -> None:
    ticks = axis.ticks(6)
    assert [text for _, text in ticks] == labels
    assert all(-1e-6 <= axis.place(value) <= 1 + 1e-6 for value, _ in ticks)
    assert len(ticks) <= 7


def test_ticks_of_any_axis_are_few_and_different() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        values = [rng.choice([-1, 1, 1, 1]) * 10 ** rng.uniform(-9, 9) for _ in range(rng.randint(1, 4))]
        ticks = value_axis(values).ticks(6)
        texts = [text for _, text in ticks]
        assert 1 <= len(ticks) <= 8, values
        assert len(set(texts)) == len(texts), (values, texts)


def test_values_are_on_their_axis() -> None:
    rng = random.Random(1)
    for _ in range(500):
        values = [rng.choice([-1, 1, 1, 1]) * 10 ** rng.uniform(-9, 9) for _ in range(rng.randint(1, 100))]
        axis = value_axis(values)
        assert all(0 <= axis.place(value) <= 1 for value in values)
        assert axis.log == (min(values) > 0 and max(values) > 50 * min(values))
    assert not value_axis([1e-9, 1.0], may_log=False).log


@pytest.mark.parametrize("values", [[], [0.0], [0.0, -0.0], [5e-324, 1e-200]])
def test_an_axis_of_nothing_still_has_a_length(values: list[float]) -> None:
    axis = value_axis(values)
    assert (axis.low, axis.log) == (0.0, False)
    assert axis.high >= 1.0


def test_a_rare_spike_does_not_flatten_the_rest() -> None:
    assert value_axis([*[1.0, 2.0] * 500, 40.0]).high < 3
    assert value_axis([*[1.0, 2.0] * 500, 40.0], must_show=[40.0]).high > 40


def test_what_has_no_logarithm_stands_below_a_logarithmic_axis() -> None:
    assert Axis(low=1, high=100, log=True).place(0) == Axis(low=1, high=100, log=True).place(-5) < 0


def test_steps_begin_at_zero_unless_a_run_began_late() -> None:
    assert step_axis(1, 100, log=False) == Axis(low=0, high=100, whole=True)
    assert step_axis(50, 100, log=False) == Axis(low=50, high=100, whole=True)
    assert step_axis(0, 100, log=True) == Axis(low=1, high=100, log=True, whole=True)
    assert step_axis(7, 7, log=False) == Axis(low=6, high=8, whole=True)


@pytest.mark.parametrize(
    ("value", "step", "text"),
    [
        (0.0, 1, "0"),
        (-0.5, 0.5, "-0.5"),
        (0.001, 0.001, "0.001"),
        (0.0005, 0.0001, "5e-4"),
        (-2e9, 1e9, "-2e9"),
    ],
)
def test_labels_are_short(value: float, step: float, text: str) -> None:
    assert label(value, step) == text
