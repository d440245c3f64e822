"""A run as it is shown: in a pipe few plain lines, on a terminal a region that stays whole and in place."""

from __future__ import annotations

import io
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pyte import modes

from dgemma.cli.views.live_train_view import LiveTrainView
from dgemma.cli.views.train_view import PlainTrainView, learning_rate, number, open_train_view
from dgemma.training.report import HeldOutReport, StepReport
from terminal import Program, PseudoTerminal, Terminal

STEP = StepReport(
    step=120, num_steps=1000, loss=3.21, diffusion=2.1, encoder=1.11,
    diffusion_by_noise=(0.4, 1.0, 1.9, 2.8, 3.4), learning_rate=1.5e-4, grad_norm=0.8, examples=480,
    tokens=491520, seconds=0.7, tokens_per_second=812.2, eta_s=725.0,
)  # fmt: skip
HELD_OUT = HeldOutReport(
    step=100, diffusion=2.214, encoder=1.2, diffusion_by_noise=(0.5, 1.1, 2.0, None, 3.5), examples=64,
    seconds=3.2,
)  # fmt: skip
SHELL = ["$ ls", "files here", "$ dgemma train"]
WINDOWS = [(60, 24), (160, 24), (60, 8), (160, 8)]


# In a pipe


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_line_says_all_of_a_step() -> None:
    out = io.StringIO()
    with PlainTrainView(out, 1000) as view:
        view.on_step(STEP)
        view.on_eval(HELD_OUT)
        view.on_save(120)
        view.on_note("the learning rate is falling")
    assert out.getvalue().splitlines() == [
        "step 120/1000  loss 3.21 (diffusion 2.10, encoder 1.11)  by noise 0.4 1.0 1.9 2.8 3.4  lr 1.5e-4  "
        "grad 0.8  812 tok/s  eta 12m",
        "held out at step 100  diffusion 2.21, encoder 1.20  by noise 0.5 1.1 2.0 - 3.5  64 examples in 3s",
        "saved at step 120",
        "the learning rate is falling",
    ]


def said_steps(clock_steps: list[tuple[float, int]], num_steps: int) -> list[int]:
    out, clock = io.StringIO(), Clock()
    with PlainTrainView(out, num_steps, clock=clock) as view:
        for now, step in clock_steps:
            clock.now = now
            view.on_step(replace(STEP, step=step))
    return [int(line.split()[1].split("/")[0]) for line in out.getvalue().splitlines()]


def test_lines_come_for_the_first_step_then_every_ten_seconds_and_for_the_last() -> None:
    every_second = [(float(step), step) for step in range(1, 36)]
    assert said_steps(every_second, 35) == [1, 11, 21, 31, 35]
    assert said_steps([(30.0 * step, step) for step in range(1, 5)], 4) == [1, 2, 3, 4]


def test_the_last_step_is_said_before_what_follows_it() -> None:
    out = io.StringIO()
    with PlainTrainView(out, 2, clock=Clock()) as view:
        view.on_step(replace(STEP, step=1))
        view.on_step(replace(STEP, step=2))
        view.on_save(2)
    assert [line.split()[:2] for line in out.getvalue().splitlines()] == [
        ["step", "1/2"],
        ["step", "2/2"],
        ["saved", "at"],
    ]


def test_an_interrupted_run_still_says_how_far_it_came() -> None:
    assert said_steps([(0.0, 1), (1.0, 2), (2.0, 3)], 1000) == [1, 3]
    assert said_steps([(0.0, 1)], 1000) == [1]


def test_noise_levels_without_an_example_keep_what_was_seen_last() -> None:
    out, clock = io.StringIO(), Clock()
    with PlainTrainView(out, 1000, clock=clock) as view:
        view.on_step(replace(STEP, diffusion_by_noise=(None, 1.0, None, None, 2.0)))
        view.on_step(replace(STEP, diffusion_by_noise=(None, 3.0, math.nan, None, None)))
        clock.now = 20
        view.on_step(replace(STEP, diffusion_by_noise=(None,) * 5, eta_s=None))
    first, second = out.getvalue().splitlines()
    assert "by noise - 1.0 - - 2.0  lr" in first
    assert "by noise - 3.0 nan - 2.0  lr" in second
    assert second.endswith("eta -")


def test_what_a_note_holds_is_not_obeyed() -> None:
    out = io.StringIO()
    with PlainTrainView(out, 10) as view:
        view.on_note("a \x1b[2J b")
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [
        (None, 2, "-"), (0.0, 2, "0.00"), (3.214, 2, "3.21"), (99.994, 2, "99.99"), (123.4, 2, "123"),
        (99999.4, 2, "99999"), (99999.9, 2, "1e5"), (1e300, 2, "1e300"), (-1.5, 2, "-1.50"),
        (0.004, 2, "0.004"), (0.03, 1, "0.03"), (1e-5, 2, "1e-5"), (math.nan, 2, "nan"),
        (-math.inf, 2, "-inf"), (812.2, 0, "812"), (0.3, 0, "0.3"),
    ],
)  # fmt: skip
def test_a_number_is_short(value: float | None, decimals: int, text: str) -> None:
    assert number(value, decimals) == text


def test_a_learning_rate_shows_its_size() -> None:
    assert [learning_rate(v) for v in (1.5e-4, 1e-5, 0.0, math.nan)] == ["1.5e-4", "1.0e-5", "0", "nan"]


@pytest.mark.parametrize(
    ("environment", "is_terminal", "live"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm"}, False, False),
        ({"TERM": "dumb"}, True, False),
        ({}, True, False),
        ({"WT_SESSION": "1"}, True, True),
    ],
)
def test_only_a_terminal_that_can_gets_the_live_view(
    environment: dict[str, str], is_terminal: bool, live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TERM", "WT_SESSION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    assert open_train_view(10, 0).live is live


def test_a_pipe_imports_neither_rich_nor_torch() -> None:
    code = (
        "import sys; from dgemma.cli.views.train_view import open_train_view; "
        "view = open_train_view(10); view.__enter__().on_note('hello'); "
        "sys.exit(bool({'rich', 'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"hello\n")


# On a terminal


def a_view(out: Any, **options: Any) -> LiveTrainView:
    out.write("\n".join([*SHELL, ""]))
    out.flush()
    return LiveTrainView(out, 1000, **options)


def a_run() -> Iterator[StepReport | HeldOutReport]:
    for step in range(1, 61):
        missing = tuple(None if (step + k) % 3 == 0 else 0.7 * k + 1 / step for k in range(5))
        loss = 3 + 100 / step**2
        yield replace(STEP, step=step, diffusion_by_noise=missing, loss=loss, diffusion=2 + 1 / step)
        if step % 20 == 0:
            yield replace(HELD_OUT, step=step)


def show(view: LiveTrainView, report: StepReport | HeldOutReport) -> None:
    if isinstance(report, StepReport):
        view.on_step(report)
    else:
        view.on_eval(report)


def region(screen: Terminal) -> list[str]:
    rows = screen.rows()[screen.cursor.y :]
    while rows and not rows[-1]:
        rows.pop()
    return rows


def bar_of(screen: Terminal) -> str:
    return (region(screen) or [""])[0]


def is_bar(row: str, columns: int) -> bool:
    return row.startswith("step ") and row.endswith("eta 12m") and len(row) == columns


def check_whole(screen: Terminal) -> None:
    """Nothing wraps, and the cursor waits where a repaint begins."""
    assert screen.cursor.x == 0
    assert screen.cursor.hidden
    assert modes.DECAWM in screen.mode
    assert not any(getattr(screen.buffer[y], "wrapped", False) for y in range(screen.cursor.y, screen.lines))
    assert 1 <= len(region(screen)) <= max(1, screen.lines - 1)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_the_region_stays_in_place_and_whole(window: tuple[int, int]) -> None:
    with PseudoTerminal(*window) as terminal:
        with terminal.writer() as out, a_view(out, clock=Clock()) as view:
            for report in a_run():
                show(view, report)
            view.on_save(60)
            screen = terminal.wait_for(
                lambda screen: bar_of(screen).startswith("step 60/") and "60" in region(screen)[-1]
            )
            check_whole(screen)
            assert screen.text()[: len(SHELL)] == SHELL
            assert len(screen.text()) == len(SHELL) + 5
            wide = window[0] == 160
            bar, names, training, held_out, facts = region(screen)
            assert bar.endswith("812 tok/s  eta 12m")
            assert len(bar) == window[0]
            long = "loss diffusion encoder t 0.0-0.2 0.2-0.4 0.4-0.6 0.6-0.8 0.8-1.0"
            assert names.split() == (long if wide else "loss diff enc t<0.2 <0.4 <0.6 <0.8 <1.0").split()
            assert " ".join(training.split()) == "training 3.03 2.02 1.11 0.02 0.72 1.42 2.12 2.82"
            assert " ".join(held_out.split()) == "held out 2.21 1.20 0.50 1.10 2.00 - 3.50"
            assert {len(row) for row in (names, training, held_out)} == {83 if wide else 56}
            assert facts.startswith("lr 1.5e-4 | grad 0.8 | held out at step 60")
            assert ("saved at step 60 | 480 examples | 491,520 tokens" in facts) is wide
        check_end(terminal.sync(), [*SHELL, bar, names, training, held_out, facts])


def check_end(screen: Terminal, expected: list[str]) -> None:
    assert screen.text() == expected
    assert screen.cursor.x == 0
    assert not any(screen.rows()[screen.cursor.y :])
    assert not screen.cursor.hidden
    assert modes.DECAWM in screen.mode


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("reflow", [True, False], ids=["reflow", "crop"])
def test_the_window_may_be_resized_at_any_time(reflow: bool, seed: int) -> None:
    rng = random.Random(seed)
    with PseudoTerminal(160, 24, reflow=reflow) as terminal, terminal.writer() as out:
        with a_view(out, clock=Clock()) as view:  # the eta stays
            for number_, report in enumerate(a_run()):
                show(view, report)
                if number_ % 6 == 0:
                    columns = rng.choice([60, 61, 84, 100, 160])
                    terminal.resize(columns, rng.choice([8, 24, 50]))
                    terminal.wait_for(lambda screen, columns=columns: is_bar(bar_of(screen), columns))
                    check_whole(terminal.sync())
        text = terminal.sync().text()
        bar, names, training, held_out, facts = text[-5:]
        assert bar.startswith("step 60/1000 ")
        assert len(bar) == columns
        first_words = [row.split()[0] for row in (names, training, held_out, facts)]
        assert first_words == ["loss", "training", "held", "lr"]
        if reflow:  # cropping loses text by itself
            assert text[:-5] == SHELL


def test_a_resized_window_is_drawn_anew_even_while_a_step_takes_long() -> None:
    clock = Clock()  # on which no repaint is ever due
    with PseudoTerminal(160, 24) as terminal, terminal.writer() as out, a_view(out, clock=clock) as view:
        view.on_step(STEP)
        for columns in (160, 60, 100):
            terminal.resize(columns, 24)
            terminal.wait_for(lambda screen, columns=columns: is_bar(bar_of(screen), columns))
            check_whole(terminal.sync())


@pytest.mark.parametrize("window", [(1, 1), (2, 3), (9, 2), (20, 4), (56, 5), (83, 24)], ids=str)
def test_absurd_windows_do_no_harm(window: tuple[int, int]) -> None:
    with PseudoTerminal(*window) as terminal:
        with terminal.writer() as out, LiveTrainView(out, 1000) as view:
            for report in a_run():
                show(view, report)
            terminal.wait_for(lambda screen: region(screen))
            check_whole(terminal.sync())
        assert not terminal.sync().cursor.hidden


def test_before_the_first_step_it_says_where_it_begins() -> None:
    with PseudoTerminal(60, 24) as terminal, terminal.writer() as out, a_view(out, start_step=500):
        screen = terminal.wait_for(lambda screen: region(screen))
        (bar,) = region(screen)
        assert bar.startswith("step 500/1000 ")
        assert bar.endswith("first step ...")


def test_a_run_may_begin_with_a_look_at_held_out_data() -> None:
    with PseudoTerminal(60, 24) as terminal, terminal.writer() as out, a_view(out) as view:
        view.on_eval(replace(HELD_OUT, step=0))
        screen = terminal.wait_for(lambda screen: len(region(screen)) == 4)
        assert region(screen)[3] == "held out at step 0"


def test_the_time_goes_on_while_a_step_takes_long() -> None:
    clock = Clock()
    with PseudoTerminal(60, 24) as terminal, terminal.writer() as out, a_view(out, clock=clock) as view:
        view.on_step(STEP)
        terminal.wait_for(lambda screen: bar_of(screen).endswith("eta 12m"))
        clock.now = 300
        terminal.wait_for(lambda screen: bar_of(screen).endswith("eta 7m"))
        clock.now = 3000
        terminal.wait_for(lambda screen: bar_of(screen).endswith("eta 0s"))
        view.on_step(replace(STEP, eta_s=None))
        terminal.wait_for(lambda screen: bar_of(screen).endswith("eta -"))


def test_notes_join_the_flow_above_the_region_each_once() -> None:
    notes = ["short", "long " * 40, "日本語 🎉", "two\nlines", "\x1b[2J not obeyed"]
    shown = ["short", ("long " * 40), "日本語 🎉", "two", "lines", "␛[2J not obeyed"]
    with PseudoTerminal(60, 12) as terminal, terminal.writer() as out:
        with a_view(out) as view:
            for report in a_run():
                show(view, report)
                if report.step % 12 == 0 and notes:
                    view.on_note(notes.pop(0))
                    terminal.wait_for(region)
                    check_whole(terminal.sync())
        text = terminal.sync().text()
        assert [line.rstrip() for line in text[:-5]] == [*SHELL, *(line.rstrip() for line in shown)]


def test_what_others_write_to_stderr_becomes_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    with PseudoTerminal(60, 24) as terminal, terminal.writer() as out:
        monkeypatch.setattr(sys, "stderr", out)
        with a_view(out) as view:
            view.on_step(STEP)
            print("UserWarning:", "careful", file=sys.stderr)
            print("unfinished", end="", file=sys.stderr)
            assert not sys.stderr.isatty()
            assert sys.stderr.fileno() == out.fileno()
        assert sys.stderr is out
        text = "\n".join(terminal.sync().text())
        assert "UserWarning: careful\n" in text
        assert text.index("careful") < text.index("\nunfinished\n") < text.index("step 120/1000")
        assert text.count("step 120/1000") == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_utf8_gets_what_it_knows(encoding: str) -> None:
    with PseudoTerminal(60, 24, encoding=encoding) as terminal:
        with terminal.writer(encoding) as out, a_view(out) as view:
            view.on_step(replace(STEP, loss=-1e-30, diffusion=-12345.0, tokens_per_second=math.nan))
            view.on_note("größer 日本")
        text = "\n".join(terminal.sync().text())
        assert "step 120/1000" in text
        assert "er ??" in text
        assert "\ufffd" not in text


def test_without_colours_the_bar_can_still_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with PseudoTerminal(60, 24) as terminal:
        with terminal.writer() as out, a_view(out) as view:
            view.on_step(replace(STEP, step=500))
        bar = terminal.sync().text()[len(SHELL)]
        assert b"\x1b[3" not in terminal.raw
        assert bar.count("━") in (11, 12, 13, 14)
        assert "   " in bar


def test_a_terminal_that_goes_away_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    with LiveTrainView(Gone(), 1000) as view:
        for report in a_run():
            show(view, report)
        view.on_note("still here")
    assert not view._painter.is_alive()


def test_an_error_leaves_what_was_shown_and_a_clean_terminal() -> None:
    with PseudoTerminal(60, 24) as terminal, terminal.writer() as out:
        with pytest.raises(ValueError), a_view(out) as view:  # noqa: PT012
            view.on_step(STEP)
            raise ValueError
        screen = terminal.sync()
        check_end(screen, [*SHELL, *screen.text()[len(SHELL) :]])
        assert screen.text()[len(SHELL)].startswith("step 120/1000")


PROGRAM = """
import time
from dgemma.cli.views.train_view import open_train_view
try:
    with open_train_view(10, 0) as view:
        view.on_note("running")
        time.sleep(600)
except KeyboardInterrupt:
    print("stopped")
"""


def test_ctrl_c_and_keys_leave_a_clean_terminal() -> None:
    with PseudoTerminal(60, 24) as terminal, Program(terminal, PROGRAM.lstrip()) as program:
        terminal.wait_for(lambda screen: "running" in screen.rows())
        assert not terminal.echoes()
        terminal.type("keys\n")
        program.interrupt()
        assert program.wait() == 0
        assert terminal.echoes()
        text = terminal.sync().text()
        assert text[0] == "running"
        assert text[1].startswith("step 0/10")
        assert text[2:] == ["stopped"]
        assert not terminal.screen.cursor.hidden
