"""The pictures of the documentation: well-formed, nothing outside its panel, no text over another."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.figures import figure, main
from benchmarks.line_chart import (
    HEIGHT,
    LETTER_PIXELS,
    MARK_PIXELS,
    WIDTH,
    Panel,
    Point,
    Series,
    draw,
    spread,
)
from dgemma.errors import InputError

SVG = "{http://www.w3.org/2000/svg}"
LETTERS = {"heading": 13.0, "title": 9.6}  # widths, where they are not those of common text
HEIGHTS = {"heading": 19, "title": 14}


def a_panel(*lines: list[Point], **options: Any) -> Panel:
    series = [Series(name=f"line {k}", points=points, colour=k) for k, points in enumerate(lines)]
    return Panel(title="A title", x_label="over", y_label="upwards", series=series, **options)


def falling(power: float, first: float = 1.0, last: float = 1000.0) -> list[Point]:
    xs = [first * (last / first) ** (k / 9) for k in range(10)]
    return [(x, 50 * x**-power) for x in xs]


def parse(svg: str) -> ElementTree.Element:
    """The picture, whose numbers are numbers."""
    root = ElementTree.fromstring(svg)  # noqa: S314 (our own)
    for element in root.iter():
        drawn = " ".join(element.get(name, "") for name in ("d", "cx", "cy", "x", "y", "transform"))
        assert not re.search(r"nan|inf|\de[+-]?\d", drawn)
    return root


def areas(svg: str) -> list[ElementTree.Element]:
    return [group for group in parse(svg).iter(f"{SVG}g") if group.get("class") == "panel"]


def marks(area: ElementTree.Element) -> list[Point]:
    return [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in area.iter(f"{SVG}circle")]


def lines(area: ElementTree.Element) -> list[list[Point]]:
    """The points of each line, in the order of the panel's series; the first is drawn last."""
    styled = [path.attrib["d"] for path in area.iter(f"{SVG}path") if path.attrib["class"].endswith("line")]
    found = [re.findall(r"[ML]([-\d.]+),([-\d.]+)", d) for d in styled if "h12" not in d]
    return [[(float(x), float(y)) for x, y in line] for line in reversed(found)]


def texts(element: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in element.iter(f"{SVG}text")]


Box = tuple[float, float, float, float]


def box(text: ElementTree.Element, x: float, y: float) -> Box:
    """(left, top, right, bottom) of a text whose coordinates begin at (x, y)."""
    style = text.get("class", "")
    width = len(text.text or "") * LETTERS.get(style, LETTER_PIXELS)
    left = x + float(text.get("x", 0)) - {"x": width / 2, "y": width}.get(style, 0)
    base = y + float(text.get("y", 0)) + float(text.get("dy", 0))
    return left, base - 0.8 * HEIGHTS.get(style, 12), left + width, base + 0.2 * HEIGHTS.get(style, 12)


def boxes(svg: str) -> dict[Box, str]:
    """All texts by where they are."""
    root = parse(svg)
    found = {box(text, 0, 0): text.text or "" for text in root.findall(f"{SVG}text")}
    for area in areas(svg):
        x, y = map(float, re.findall(r"[\d.]+", area.attrib["transform"]))
        found |= {box(text, x, y): text.text or "" for text in area.iter(f"{SVG}text")}
    assert len(found) == sum(1 for _ in root.iter(f"{SVG}text"))  # none exactly over another
    return found


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


def drawn(name: str, found: object, saved: Path) -> str:
    saved.write_text(json.dumps(found))
    return figure(name, saved)


CASES: dict[str, list[Panel]] = {
    "one point": [a_panel([(3, 4)])],
    "one point at 0": [a_panel([(0, 0)])],
    "one point, logarithmic": [a_panel([(3, 4)], x_log=True, y_log=True)],
    "constant": [a_panel([(1, 2), (5, 2)], [(1, 2), (5, 2)])],
    "negative": [a_panel([(-3, -4), (-2, 7)])],
    "nine lines with one end": [a_panel(*([(1.0, 2.0 + k), (2.0, 3.0)] for k in range(9)))],
    "nine lines at the bottom": [a_panel(*([(1.0, 2.0 + k), (2.0, 0.0)] for k in range(9)))],
    "logarithmic": [a_panel(falling(0.5), falling(0.7), x_log=True, y_log=True)],
    "logarithmic, three decades": [a_panel(falling(0.2, 1.01, 1990), x_log=True, y_log=True)],
    "logarithmic, below a decade": [a_panel(falling(0.3, 31, 47), x_log=True, y_log=True)],
    "logarithmic, wide": [a_panel(falling(4, 1e-6, 1e9), x_log=True, y_log=True)],
    "beyond its range": [a_panel([(1, -0.2), (2, 1.7)], y_range=(0, 1))],
    "ticks of its own": [a_panel([(7, 1), (90, 3)], x_log=True, x_ticks=(6, 12, 24, 48))],
    "five panels": [a_panel(falling(0.1 * k)) for k in range(5)],
}


@pytest.mark.parametrize("case", CASES)
def test_every_point_is_drawn_inside_its_panel(case: str) -> None:
    panels = CASES[case]
    for panel, area in zip(panels, areas(draw(panels, heading="A heading")), strict=True):
        assert [len(line) for line in lines(area)] == [len(series.points) for series in panel.series]
        points = [*marks(area), *(point for line in lines(area) for point in line)]
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)


@pytest.mark.parametrize("case", CASES)
def test_no_text_lies_over_another_or_leaves_the_picture(case: str) -> None:
    check_texts(draw(CASES[case], heading="A heading", note="a note of many words " * 20))


@pytest.mark.parametrize("name", ["sudoku", "text"])
def test_no_text_of_a_figure_lies_over_another(name: str, saved: Path) -> None:
    check_texts(drawn(name, a_sudoku_result() if name == "sudoku" else a_text_result(), saved))


def check_texts(svg: str) -> None:
    found, root = boxes(svg), parse(svg)
    for left, top, right, bottom in found:
        assert left >= 0 <= top
        assert right <= float(root.attrib["width"])
        assert bottom <= float(root.attrib["height"])
    for a, b in combinations(found, 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart, (found[a], found[b])


@pytest.mark.parametrize("case", CASES)
def test_every_axis_has_ticks(case: str) -> None:
    for area in areas(draw(CASES[case], heading="A heading")):
        for style in "xy":
            assert len([text for text in area.iter(f"{SVG}text") if text.get("class") == style]) >= 2


def test_points_too_close_to_tell_apart_share_a_mark_and_the_last_has_one() -> None:
    points = [(float(k), 2 + math.sin(k / 50)) for k in range(500)]
    (area,) = areas(draw([a_panel(points)], heading="A heading"))
    (line,) = lines(area)
    assert all(math.dist(a, b) > MARK_PIXELS - 0.2 for a, b in pairwise(marks(area)))
    assert len(line) == 500
    assert marks(area)[-1] == line[-1]
    assert 40 < len(marks(area)) < 120


def test_points_at_one_place_keep_their_order() -> None:
    (area,) = areas(draw([a_panel([(1, 1), (2, 9), (2, 5), (3, 1)])], heading="A heading"))
    heights = [y for _, y in marks(area)]
    assert heights[1] < heights[2]


def test_larger_values_stand_higher_and_further_right() -> None:
    rising = [(1.0, 1.0), (10.0, 20.0), (100.0, 3000.0)]
    for log in (False, True):
        (area,) = areas(draw([a_panel(rising, x_log=log, y_log=log)], heading="A heading"))
        for (x, y), (next_x, next_y) in pairwise(marks(area)):
            assert x < next_x
            assert y > next_y


def test_spread_labels_keep_their_order_and_distance_and_move_no_further_than_they_must() -> None:
    generator = random.Random(0)
    for count in range(1, 13):
        wanted = [generator.uniform(0, 100) for _ in range(count)]
        places = spread(wanted, 8, 100)
        assert all(-1e-9 <= place <= 100 + 1e-9 for place in places)
        by_wanted = [place for _, place in sorted(zip(wanted, places, strict=True))]
        assert all(after - before >= 8 - 1e-9 for before, after in pairwise(by_wanted))
    assert spread([90, 10, 50], 8, 100) == [90, 10, 50]
    assert spread([50, 50, 50], 8, 100) == [42, 50, 58]
    assert spread([100, 100], 8, 100) == [92, 100]


def test_text_is_escaped() -> None:
    wild = 'a<b>&"c"\x00\''
    series = Series(name=wild, points=[(1, 1), (2, 2)], colour=0)
    panel = Panel(title=wild, x_label=wild, y_label=wild, series=[series])
    found = texts(parse(draw([panel], heading=wild, note=wild)))
    assert found.count(wild.replace("\x00", "\ufffd")) == 6


def test_what_has_no_place_on_an_axis_is_left_out() -> None:
    points = [(0.0, 1.0), (1.0, 0.0), (1.0, math.nan), (2.0, math.inf), (3.0, 4.0), (5.0, 6.0)]
    (area,) = areas(draw([a_panel(points, x_log=True, y_log=True)], heading="A heading"))
    assert len(marks(area)) == 2


def test_a_picture_without_a_point_is_refused() -> None:
    with pytest.raises(InputError, match="no panel has a point"):
        draw([a_panel([(1, math.nan)]), a_panel([])], heading="A heading")


@pytest.mark.parametrize("name", ["sudoku", "text"])
def test_the_same_file_gives_the_same_bytes(name: str, saved: Path) -> None:
    found = a_sudoku_result() if name == "sudoku" else a_text_result()
    assert drawn(name, found, saved) == drawn(name, found, saved)


def test_a_full_sudoku_file_has_a_panel_per_band_and_one_over_clues(saved: Path) -> None:
    *bands, clues = areas(drawn("sudoku", a_sudoku_result(), saved))
    names = {"entropy bound", "confidence", "fixed", "left to right"}
    for area in bands:
        assert names <= set(texts(area))
        assert len(marks(area)) == 12  # causal is a level: no marks
    assert len(bands) == 3
    assert names & set(texts(clues)) == {"entropy bound", "left to right"}
    assert len(marks(clues)) == 2 * 9


def test_ways_that_a_file_does_not_have_are_left_out(saved: Path) -> None:
    found = a_sudoku_result()
    found["ways"] = {"fixed-6": found["ways"]["fixed-6"], "entropy_bound-12": {"easy": {"exact": 0.5}}}
    easy, medium, hard = areas(drawn("sudoku", found, saved))
    assert {"fixed", "entropy bound"} <= set(texts(easy))
    for area in (medium, hard):
        assert "fixed" in texts(area)
        assert not {"entropy bound", "confidence", "left to right"} & set(texts(area))


def test_a_text_file_shows_perplexities_and_every_noise_level(saved: Path) -> None:
    causal, diffusion = areas(drawn("text", a_text_result(), saved))
    assert {"this model", "5-gram Kneser-Ney"} <= set(texts(causal))
    assert len(marks(causal)) == 8
    assert {"noise 0.0-0.2", "noise 0.2-0.4", "noise 0.8-1.0"} <= set(texts(diffusion))
    assert len(marks(diffusion)) == 19  # one level had no example once


def test_a_text_file_without_n_grams_is_drawn_without_them(saved: Path) -> None:
    found = a_text_result()
    del found["ngrams"]
    causal, _ = areas(drawn("text", found, saved))
    assert "5-gram Kneser-Ney" not in texts(causal)


def test_files_behind_the_first_fill_its_gaps_and_change_nothing_else(tmp_path: Path) -> None:
    def way(exact: float) -> dict[str, dict[str, float]]:
        return {"easy": {"exact": exact}}

    files = []
    for number, ways in enumerate([{"fixed-6": way(0.5)}, {"fixed-6": way(0.9), "fixed-12": way(0.75)}]):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps({"puzzles_per_band": 1000 if number == 0 else 50, "ways": ways}))
    both = tmp_path / "both.json"
    ways = {"fixed-12": way(0.75), "fixed-6": way(0.5)}
    both.write_text(json.dumps({"puzzles_per_band": 1000, "ways": ways}))
    joined, whole = figure("sudoku", *files), figure("sudoku", both)
    assert joined != figure("sudoku", files[0])
    assert "50 to 1,000 puzzles per band" in joined
    assert joined.replace("50 to 1,000", "1,000") == whole


@pytest.mark.parametrize("name", ["sudoku", "text"])
@pytest.mark.parametrize("found", [{}, {"ways": {}}, {"curve": [], "ngrams": []}])
def test_a_file_with_nothing_to_draw_is_refused(name: str, found: object, saved: Path) -> None:
    with pytest.raises(InputError, match=r"result\.json has nothing to draw; give a result of benchmarks\."):
        drawn(name, found, saved)


@pytest.mark.parametrize("text", ["", "[]", '{"curve": 3}', '{"curve": [{"causal_nats": 1}]}'])
def test_a_file_of_another_form_is_refused(text: str, saved: Path) -> None:
    saved.write_text(text)
    with pytest.raises(InputError, match=r"result\.json is not a result of benchmarks\.text_model"):
        figure("text", saved)


def test_the_command_writes_the_picture_or_says_why_not(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = saved.with_name("out.svg")
    svg = drawn("text", a_text_result(), saved)
    monkeypatch.setattr(sys, "argv", ["figures", "text", str(saved), "--out", str(out)])
    main()
    assert out.read_text(encoding="utf-8") == svg
    saved.write_text("{}")
    with pytest.raises(SystemExit):
        main()
    assert "nothing to draw" in capsys.readouterr().err
    assert out.read_text(encoding="utf-8") == svg  # the old one stays
