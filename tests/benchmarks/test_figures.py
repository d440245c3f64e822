"""The figures of the documentation: every point is drawn, and an incomplete file is drawn or refused."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.figures import Panel, Point, Series, draw, figure, main
from dgemma.errors import InputError
from dgemma.training.curves import BLUE, write_figure


def a_panel(*lines: list[Point], **options: Any) -> Panel:
    series = [Series(name=f"line {k}", points=points, colour=BLUE) for k, points in enumerate(lines)]
    return Panel(title="A title", x_label="over", y_label="upwards", series=series, **options)


def falling(power: float, first: float = 1.0, last: float = 1000.0) -> list[Point]:
    xs = [first * (last / first) ** (k / 9) for k in range(10)]
    return [(x, 50 * x**-power) for x in xs]


def charts(drawn: Figure) -> list[Axes]:
    return [axes for axes in drawn.axes if axes.get_visible()]


def points(axes: Axes) -> dict[str, list[Point]]:
    return {
        str(line.get_label()): list(map(tuple, line.get_xydata().tolist()))  # type: ignore[union-attr]
        for line in axes.get_lines()
    }


def a_sudoku_result() -> dict[str, Any]:
    clues = {"easy": (40, 45, 50), "medium": (30, 35, 39), "hard": (23, 26, 29)}
    shares = {"easy": 1.0, "medium": 0.9, "hard": 0.2}

    def band(name: str, factor: float) -> dict[str, Any]:
        share = round(shares[name] * factor, 4)
        return {"exact": share, "exact_by_clues": {f"{n} clues": share for n in clues[name]}}

    ways = {
        f"{acceptance}-{cap}": {name: band(name, 1 - 1 / cap) for name in clues}
        for acceptance in ("entropy_bound", "confidence", "fixed")
        for cap in (48, 24, 12, 6)
    }
    ways["causal"] = {name: band(name, 0.1) for name in clues}
    ways["untrained"] = {name: band(name, 0.0) for name in clues}
    about = {"date": "2026-11-16", "model": "bundled:sudoku", "parameters": 4791216}
    return {**about, "puzzles_per_band": 1000, "ways": ways}


def a_text_result() -> dict[str, Any]:
    def row(step: int) -> dict[str, Any]:
        nats = 3 + 20 * step**-0.5
        levels = [0.3 * nats, None if step == 500 else 0.5 * nats, 0.7 * nats, 0.9 * nats, nats]
        return {"step": step, "mb": step / 40, "causal_nats": nats, "diffusion_by_noise": levels}

    ngrams = [{"mb": mb, "window_nats": 5.6 - 0.3 * math.log(mb)} for mb in (1.0, 3.0, 10.0, 96.4)]
    return {
        "model": "runs/a<b>&c",
        "curve": [row(step) for step in (500, 1000, 4000, 16000)],
        "ngrams": ngrams,
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return tmp_path / "result.json"


def drawn(name: str, found: object, saved: Path) -> Figure:
    saved.write_text(json.dumps(found))
    return figure(name, saved)


CASES: dict[str, list[Panel]] = {
    "one point": [a_panel([(3, 4)])],
    "one point, logarithmic": [a_panel([(3, 4)], x_log=True, y_log=True)],
    "constant": [a_panel([(1, 2), (5, 2)], [(1, 2), (5, 2)])],
    "negative": [a_panel([(-3, -4), (-2, 7)])],
    "logarithmic": [a_panel(falling(0.5), falling(0.7), x_log=True, y_log=True)],
    "logarithmic, wide": [a_panel(falling(4, 1e-6, 1e9), x_log=True, y_log=True)],
    "ticks of its own": [a_panel([(7, 1), (90, 3)], x_log=True, x_ticks=(6, 12, 24, 48))],
    "five panels": [a_panel(falling(0.1 * k)) for k in range(5)],
}


@pytest.mark.parametrize("case", CASES)
def test_every_point_is_drawn_within_the_limits_of_its_axes(case: str, tmp_path: Path) -> None:
    found = draw(CASES[case], heading="A heading", note="a note")
    for panel, axes in zip(CASES[case], charts(found), strict=True):
        assert list(points(axes).values()) == [list(series.points) for series in panel.series]
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        for x, y in (point for line in points(axes).values() for point in line):
            assert left <= x <= right
            assert low <= y <= high
    write_figure(found, tmp_path / "out.svg")
    assert "A heading" in (tmp_path / "out.svg").read_text()


def test_what_has_no_place_on_an_axis_is_left_out() -> None:
    wild = [(0.0, 1.0), (1.0, 0.0), (1.0, math.nan), (2.0, math.inf), (5.0, 6.0), (3.0, 4.0)]
    (axes,) = charts(draw([a_panel(wild, x_log=True, y_log=True)], heading="A heading"))
    assert points(axes) == {"line 0": [(3.0, 4.0), (5.0, 6.0)]}


def test_a_figure_without_a_point_is_refused() -> None:
    with pytest.raises(InputError, match="no panel has a point"):
        draw([a_panel([(1, math.nan)]), a_panel([])], heading="A heading")


@pytest.mark.parametrize("name", ["sudoku", "text"])
def test_the_same_file_gives_the_same_bytes(name: str, saved: Path) -> None:
    found = a_sudoku_result() if name == "sudoku" else a_text_result()
    for out in ("a.svg", "b.svg"):
        write_figure(drawn(name, found, saved), saved.with_name(out))
    assert saved.with_name("a.svg").read_bytes() == saved.with_name("b.svg").read_bytes()


def test_a_full_sudoku_file_has_a_panel_per_band_and_one_over_clues(saved: Path) -> None:
    *bands, clues = charts(drawn("sudoku", a_sudoku_result(), saved))
    assert len(bands) == 3
    for axes in bands:
        assert {name: len(line) for name, line in points(axes).items()} == {
            "entropy bound": 4, "confidence": 4, "fixed": 4, "left to right": 2,
        }  # fmt: skip
    assert {name: len(line) for name, line in points(clues).items()} == {
        "entropy bound": 9, "left to right": 9,
    }  # fmt: skip


def test_ways_that_a_file_does_not_have_are_left_out(saved: Path) -> None:
    found = a_sudoku_result()
    found["ways"] = {"fixed-6": found["ways"]["fixed-6"], "entropy_bound-12": {"easy": {"exact": 0.5}}}
    easy, medium, hard = charts(drawn("sudoku", found, saved))
    assert points(easy).keys() == {"fixed", "entropy bound"}
    assert points(medium).keys() == points(hard).keys() == {"fixed"}


def test_a_text_file_shows_perplexities_and_every_noise_level(saved: Path) -> None:
    causal, diffusion = charts(drawn("text", a_text_result(), saved))
    assert {name: len(line) for name, line in points(causal).items()} == {
        "this model": 4, "5-gram Kneser-Ney": 4,
    }  # fmt: skip
    assert [len(line) for line in points(diffusion).values()] == [4, 3, 4, 4, 4]  # one level lacks an example
    assert next(iter(points(diffusion))) == "noise 0.0-0.2"


def test_a_text_file_without_n_grams_is_drawn_without_them(saved: Path) -> None:
    found = a_text_result()
    del found["ngrams"]
    causal, _ = charts(drawn("text", found, saved))
    assert points(causal).keys() == {"this model"}


def test_files_after_the_first_fill_its_gaps_and_change_nothing_else(tmp_path: Path) -> None:
    def way(exact: float) -> dict[str, dict[str, float]]:
        return {"easy": {"exact": exact}}

    files = []
    for number, ways in enumerate([{"fixed-6": way(0.5)}, {"fixed-6": way(0.9), "fixed-12": way(0.75)}]):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps({"puzzles_per_band": 1000 if number == 0 else 50, "ways": ways}))
    joined = figure("sudoku", *files)
    assert points(charts(joined)[0]) == {"fixed": [(6.0, 0.5), (12.0, 0.75)]}
    assert "50 to 1,000 puzzles per band" in joined.get_suptitle()


@pytest.mark.parametrize("name", ["sudoku", "text"])
@pytest.mark.parametrize("found", [{}, {"ways": {}}, {"curve": [], "ngrams": []}])
def test_a_file_with_nothing_to_draw_is_refused(name: str, found: object, saved: Path) -> None:
    with pytest.raises(InputError, match=r"result\.json has nothing to draw; give a result of benchmarks\."):
        drawn(name, found, saved)


@pytest.mark.parametrize("text", ["", "[]", '{"curve": 3}', '{"curve": [{"causal_nats": 1}]}'])
def test_a_file_of_another_format_is_refused(text: str, saved: Path) -> None:
    saved.write_text(text)
    with pytest.raises(InputError, match=r"result\.json is not a result of benchmarks\.text_model"):
        figure("text", saved)


def test_the_command_writes_the_figure_or_says_why_not(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = saved.with_name("out.svg")
    saved.write_text(json.dumps(a_text_result()))
    monkeypatch.setattr(sys, "argv", ["figures", "text", str(saved), "--out", str(out)])
    main()
    svg = out.read_bytes()
    assert b"5-gram Kneser-Ney" in svg
    saved.write_text("{}")
    with pytest.raises(SystemExit):
        main()
    assert "nothing to draw" in capsys.readouterr().err
    assert out.read_bytes() == svg  # the old one stays
