"""The live view, seen through a real pseudo-terminal: nothing is torn, overwritten or left over."""

from __future__ import annotations

import io
import random
import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from pyte import modes

from dgemma.cli.views import answer_view
from dgemma.cli.views.answer_view import LiveView, PlainView, open_view
from dgemma.cli.views.terminal import BEGIN_UPDATE, lay_out, printable, window_size
from dgemma.events import Commit, Draft, Event, Finish
from sizes import cases
from terminal import MARK, PseudoTerminal, Terminal, plain_screen, script

WINDOWS = [(40, 24), (200, 24), (40, 10), (200, 10), (9, 5)]
WORDS = [
    "the", "canvas", "settles", "日本語", "テキスト", "한국어", "naïve", "cafe\u0301", "Привет", "שלום",
    "ไทยคำ", "हिन्दी", "→", "—", "\uff1d", "x" * 61, "界" * 33, "e\u0301\u0323\u0302", "\u200b", "\u202e",
    # A family, two flags, a skin tone, a heart and a keycap as emoji, an old and a new emoji.
    "👨\u200d👩\u200d👧\u200d👦", "🇩🇪🇯🇵", "👍🏽", "❤\ufe0f", "1\ufe0f\u20e3", "🎉", "\U0001fae0",
    "\x1b[31m", "\x1b]0;t\x07", "\x9b2J", "\r", "\x08", "\x7f",
]  # fmt: skip
SHELL = "$ ls\nfiles here\n$ dgemma generate\n"


def pieces(tokens: Iterable[int]) -> list[str]:
    return [chr(token) for token in tokens]


def ticking(step_s: float = 1.0) -> Any:
    """A clock on which each look is `step_s` later: each event is painted."""
    ticks = iter(range(10**9))
    return lambda: next(ticks) * step_s


def random_text(rng: random.Random, num_words: int, words: list[str] = WORDS) -> str:
    text = ""
    for _ in range(num_words):
        text += rng.choice(words) + rng.choice([" ", " ", " ", " ", "", "\n", "\n\n"])
        if text.endswith("\n") and rng.random() < 0.2:
            text += "\tindented\t"
    return text


def shown(text: str) -> str:
    return printable(text, "utf-8") + ("" if text.endswith("\n") else "\n")


def has_tabs_at_the_edge(text: str, columns: int) -> bool:
    return any("\t" in line and len(lay_out([(line, "")], columns)) > 1 for line in text.split("\n"))


def check_region(screen: Terminal, final: str) -> None:
    """While it runs: final lines stand above, the region is at its place and not too high."""
    whole_lines = printable(final, "utf-8").rpartition("\n")[0]
    if not has_tabs_at_the_edge(whole_lines, screen.columns):
        expected = plain_screen(SHELL + whole_lines, screen.columns, screen.lines, joins=screen.joins).text()
        assert screen.text()[: len(expected)] == expected
    region = screen.rows()[screen.cursor.y :]
    while region and not region[-1]:
        region.pop()
    assert 1 <= len(region) <= screen.lines - 1 or screen.lines < 2
    assert not any(getattr(screen.buffer[y], "wrapped", False) for y in range(screen.cursor.y, screen.lines))
    assert screen.cursor.hidden
    assert modes.DECAWM in screen.mode


def check_end(screen: Terminal, expected: Terminal) -> None:
    assert screen.text() == expected.text()
    assert screen.cursor.x == 0
    assert not any(screen.rows()[screen.cursor.y :])
    assert (
        screen.cursor.y == 0
        or screen.rows()[screen.cursor.y - 1]
        or expected.rows()[expected.cursor.y - 1] == ""
    )
    assert not screen.cursor.hidden
    assert modes.DECAWM in screen.mode


def run_view(terminal: PseudoTerminal, events: Iterable[Event], *, check: bool = True) -> Iterator[Terminal]:
    final = ""
    with terminal.writer() as out:
        out.write(SHELL)
        out.flush()
        with LiveView(out, pieces, 48, clock=ticking()) as view:
            for event in events:
                view.show(event)
                final += event.text if isinstance(event, Commit) else ""
                if check and not isinstance(event, Finish):
                    check_region(terminal.sync(), final)
                yield terminal.screen
    terminal.sync()


@pytest.mark.parametrize("joins", [False, True], ids=["code_points", "clusters"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("seed", range(cases(4, 2)))
def test_any_text_ends_as_if_it_had_been_printed(window: tuple[int, int], joins: bool, seed: int) -> None:
    rng = random.Random(seed)
    text = random_text(rng, 60)
    noise = [*map(chr, range(32, 127)), *"\x1b\n\t界🎉\u0301\u200d\x9b"]
    with PseudoTerminal(*window, joins=joins) as terminal:
        for _ in run_view(terminal, script(text, canvas_len=rng.choice([7, 64, 256]), noise=noise, rng=rng)):
            pass
        # There the terminal itself would overwrite; another test has these.
        if not has_tabs_at_the_edge(text, window[0]):
            check_end(terminal.screen, plain_screen(SHELL + shown(text), *window, joins=joins))


@pytest.mark.parametrize("seed", range(cases(6, 4)))
@pytest.mark.parametrize("reflow", [True, False], ids=["reflow", "crop"])
def test_the_window_may_be_resized_at_any_time(reflow: bool, seed: int) -> None:
    rng = random.Random(seed)
    text = random_text(rng, 80, [word for word in WORDS if word not in "\u200b\u202e"])
    with PseudoTerminal(80, 24, joins=bool(seed % 2), reflow=reflow) as terminal:
        for _ in run_view(terminal, script(text, canvas_len=50, rng=rng), check=False):
            if rng.random() < 0.5:
                terminal.resize(rng.choice([40, 41, 80, 100, 200]), rng.choice([10, 24, 50]))
        screen = terminal.screen
        assert screen.cursor.x == 0
        assert not any(screen.rows()[screen.cursor.y :])
        if reflow:  # cropping loses text by itself
            words = [line.split() for line in screen.text()]
            assert words == [line.split() for line in (SHELL + shown(text)).rstrip().split("\n")]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_it_may_begin_in_the_windows_first_cell(window: tuple[int, int]) -> None:
    text = "some words\n" + "and a line that is longer " * 4
    with PseudoTerminal(*window) as terminal:
        with terminal.writer() as out, LiveView(out, pieces, 48, clock=ticking()) as view:
            for event in script(text, canvas_len=20):
                view.show(event)
        check_end(terminal.sync(), plain_screen(text + "\n", *window))


def test_a_long_line_joins_the_flow_before_it_ends() -> None:
    text = "".join(f"word{n} " for n in range(200))
    with PseudoTerminal(40, 10) as terminal:
        for _ in run_view(terminal, script(text, canvas_len=100)):
            pass
        check_end(terminal.screen, plain_screen(SHELL + shown(text), 40, 10))
    with PseudoTerminal(40, 10) as terminal, terminal.writer() as out:
        view = LiveView(out, pieces, 48, clock=ticking())
        with view:
            view.show(Commit(row=0, canvas=0, tokens=(1,), steps=3, text=text))
            screen = terminal.sync()
            # All full rows, as one line that the terminal wrapped; then the rest and the status.
            assert screen.text()[0] == text[: len(text) // 40 * 40] + text[len(text) // 40 * 40 :].rstrip()
            assert view._line == text[len(text) // 40 * 40 :]


@pytest.mark.parametrize("columns", [40, 41, 79])
def test_text_that_fills_its_rows_exactly(columns: int) -> None:
    """The last column is where terminals wait with a wrap; a moved cursor must not lose a character."""
    for text in (
        "x" * columns * 3,
        "x" * columns + "\n" + "y" * columns,
        "界" * columns,
        "a" + "界" * columns,
    ):
        with PseudoTerminal(columns, 10) as terminal:
            for _ in run_view(terminal, script(text, canvas_len=columns, num_steps=2)):
                pass
            check_end(terminal.screen, plain_screen(SHELL + text + "\n", columns, 10))


def test_a_tab_at_the_right_edge_overwrites_nothing() -> None:
    text = "x" * 40 + "\tab\t" + "y" * 40 + "\tz\n\tshort\n"
    with PseudoTerminal(40, 10) as terminal:
        for _ in run_view(terminal, script(text, canvas_len=30)):
            pass
        lines = terminal.screen.text()[3:]
        assert "".join(lines[0].split()) == "x" * 40 + "ab" + "y" * 40 + "z"
        assert lines[1] == "        short"


def test_the_canvas_that_does_not_fit_shows_its_tail() -> None:
    guess = "".join(f"line {n}\n" for n in range(50)) + "the end"
    draft = Draft(
        row=0, canvas=0, step=3, tokens=tuple(map(ord, guess)), entropy=(0.0,) * len(guess), text=guess
    )
    with PseudoTerminal(40, 10) as terminal:
        for screen in run_view(terminal, [draft]):
            rows = screen.rows()[screen.cursor.y : screen.cursor.y + 9]
            assert " ".join(rows[-3:-1]).endswith("line 49\u21b5the end"), "line breaks of a draft are marks"
        check_end(terminal.screen, plain_screen(SHELL, 40, 10))


def draft_of(text: str, step: int = 1, entropy: float = 5.0) -> Draft:
    tokens = tuple(map(ord, text))
    return Draft(row=0, canvas=0, step=step, tokens=tokens, entropy=(entropy,) * len(tokens), text=text)


def test_the_words_of_a_draft_are_not_broken() -> None:
    text = "every word of a draft stays whole at the right edge of a narrow window"
    with PseudoTerminal(20, 24) as terminal:
        for screen in run_view(terminal, [draft_of(text)]):
            rows = screen.rows()[screen.cursor.y :]
            shown = [row for row in rows[:-1] if row and not row.startswith("canvas")]
            assert " ".join(shown) == text
            assert all(len(row) <= 20 for row in shown)


def test_a_word_longer_than_a_row_is_broken() -> None:
    rows = lay_out([("ab " + "x" * 25, "")], 10, whole_words=True)
    assert ["".join(part for part, _ in row) for row in rows] == ["ab ", "x" * 10, "x" * 10, "x" * 5]


def test_the_status_line_stays_where_it_is_while_a_canvas_is_written() -> None:
    """Drafts are of different length from step to step."""
    drafts = [draft_of("word " * number, number) for number in (40, 3, 25, 39, 1)]
    with PseudoTerminal(40, 24) as terminal:
        heights = [len(screen.text()) for screen in run_view(terminal, drafts)]
        assert len({*heights}) == 1
        commit = Commit(row=0, canvas=0, tokens=(1,), steps=5, text="word\n")
    with PseudoTerminal(40, 24) as terminal:
        events = [*drafts, commit, draft_of("short", 1)]
        heights = [len(screen.text()) for screen in run_view(terminal, events)]
        assert heights[-1] < heights[0]


def test_no_rate_is_shown_before_there_is_one() -> None:
    with PseudoTerminal(80, 24) as terminal:
        for screen in run_view(terminal, [draft_of("nothing is settled")]):
            assert "tok/s" not in screen.text()[-1]
        assert "settled" in terminal.raw.decode()
    with PseudoTerminal(80, 24) as terminal:
        for screen in run_view(terminal, [draft_of("all is settled", entropy=0.0)]):
            assert re.search(r"[1-9][0-9.]* tok/s|0\.[1-9] tok/s", screen.text()[-1])


def test_ctrl_c_leaves_the_draft_on_the_screen() -> None:
    with PseudoTerminal(40, 24) as terminal, terminal.writer() as out:
        with pytest.raises(KeyboardInterrupt), LiveView(out, pieces, 48, clock=ticking()) as view:  # noqa: PT012
            view.show(Commit(row=0, canvas=0, tokens=(1,), steps=1, text="final text\n"))
            view.show(draft_of("half a\nthought "))
            raise KeyboardInterrupt
        assert terminal.sync().text() == ["final text", "half a", "thought"]


@pytest.mark.parametrize(("columns", "rows"), [(1, 1), (2, 2), (1, 24), (40, 1), (40, 2)])
def test_absurd_windows_do_no_harm(columns: int, rows: int) -> None:
    with PseudoTerminal(columns, rows) as terminal:
        for _ in run_view(terminal, script("some text\nof two lines", canvas_len=8), check=False):
            pass
        assert "".join(terminal.screen.text()).endswith("some textof two lines")


def status_of(draft: Draft, columns: int) -> str:
    with (
        PseudoTerminal(columns, 24) as terminal,
        terminal.writer() as out,
        LiveView(out, pieces, 48, clock=ticking()) as view,
    ):
        view.show(Commit(row=0, canvas=0, tokens=(1,) * 30, steps=9, text="done\n"))
        view.show(draft)
        return [row for row in terminal.sync().rows() if row][-1]


def test_the_status_says_where_it_is_and_fits() -> None:
    draft = Draft(row=0, canvas=1, step=7, tokens=(97,) * 4, entropy=(0.0, 0.05, 1.0, 5.0), text="aaaa")
    line = status_of(draft, 200)
    assert re.fullmatch(r"canvas 2 \| step 7/48 \| 50% settled \| \d+\.\d tok/s \| drafting 4 tokens", line)
    assert status_of(draft, 40).startswith("canvas 2 | step 7/48 | 50% settled")
    assert status_of(draft, 5) == "canva"


def test_confidence_is_colour_and_without_colours_dim_or_bold() -> None:
    draft = Draft(row=0, canvas=0, step=1, tokens=tuple(b"abcd"), entropy=(0.0, 0.5, 1.0, 5.0), text="abcd")
    plain, dim = ("default", False, False), ("default", False, True)
    for colour, expected in (
        (True, [plain, ("green", False, False), ("brown", False, False), dim]),
        (False, [("default", True, False), plain, plain, dim]),
    ):
        with (
            PseudoTerminal(40, 24) as terminal,
            terminal.writer() as out,
            LiveView(out, pieces, 48, colour=colour, clock=ticking()) as view,
        ):
            view.show(draft)
            row = terminal.sync().buffer[0]
            assert [(row[x].fg, row[x].bold, row[x].italics) for x in range(4)] == expected


def test_thoughts_are_dim_and_on_lines_of_their_own() -> None:
    with PseudoTerminal(40, 24) as terminal:
        for _ in run_view(terminal, script("An answer.", thought="Hm.\nWell", canvas_len=5), check=False):
            pass
        screen = terminal.screen
        assert screen.text()[3:] == ["Hm.", "Well", "An answer."]
        assert [screen.buffer[y][0].italics for y in (3, 4, 5)] == [True, True, False]


def test_an_empty_answer_is_an_empty_line_in_both_views() -> None:
    with PseudoTerminal(40, 24) as terminal:
        for _ in run_view(terminal, script("")):
            pass
        assert terminal.screen.text() == SHELL.rstrip("\n").split("\n")
        assert terminal.screen.cursor.y == 4
    out = io.StringIO()
    with PlainView(out) as plain:
        for event in script(""):
            plain.show(event)
    assert out.getvalue() == "\n"


def test_no_control_character_of_the_model_reaches_the_terminal() -> None:
    hostile = "".join(map(chr, [*range(32), *range(127, 160)])) + "\x1b]52;c;eA==\x07\x1b[2J"
    with PseudoTerminal(80, 24) as terminal:
        for _ in run_view(terminal, script(hostile * 2, noise=hostile), check=False):
            pass
        raw = terminal.raw.decode().replace(MARK, "")
        ours = r"\x1b(\[\?(2026|25|7)[hl]|\[[BCJK]|\[\d+A|\[[0123]?[0-9]?m|[78D])"
        left = re.sub(ours, "", raw)
        assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", left)
        assert "\u241b]52;c;eA==\u2407" in left


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437"])
def test_a_terminal_without_utf8_gets_what_it_knows(encoding: str) -> None:
    with PseudoTerminal(40, 24, encoding=encoding) as terminal:
        with terminal.writer(encoding) as out, LiveView(out, pieces, 48, clock=ticking()) as view:
            for event in script("plain 日本 🎉\x1b \ud800 end"):
                view.show(event)
        assert terminal.sync().text()[0].startswith("plain ?")
        assert terminal.screen.text()[0].endswith(" end")
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with PlainView(out) as plain:
        for event in script("plain 日本 \ud800 end"):
            plain.show(event)
    assert out.buffer.getvalue() == b"plain ?? ? end\n"  # type: ignore[attr-defined]


def test_repaints_are_rationed_but_no_text_is_lost() -> None:
    now = [0.0]
    with PseudoTerminal(80, 24) as terminal:
        with terminal.writer() as out, LiveView(out, pieces, 48, clock=lambda: now[0]) as view:
            for event in script("one two three four five six seven", num_steps=600, canvas_len=99):
                view.show(event)
                now[0] += 0.001
        assert terminal.sync().text() == ["one two three four five six seven"]
        assert terminal.raw.count(BEGIN_UPDATE.encode()) <= 0.6 * answer_view.REPAINTS_PER_SECOND + 3


def test_ctrl_c_waits_for_a_whole_repaint() -> None:
    with PseudoTerminal(80, 24) as terminal, terminal.writer() as out:
        view = LiveView(out, pieces, 48, clock=ticking())
        original = view._paint

        def interrupted_paint(**options: bool) -> None:
            signal.raise_signal(signal.SIGINT)
            original(**options)

        with view:
            view._paint = interrupted_paint  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                view.show(Commit(row=0, canvas=0, tokens=(1,), steps=1, text="kept\nand this"))
            view._paint = original  # type: ignore[method-assign]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert terminal.sync().text() == ["kept", "and this"]
        assert not terminal.screen.cursor.hidden


def test_the_view_works_in_a_thread_and_under_a_handler_of_the_users() -> None:
    def show() -> None:
        with terminal.writer() as out, LiveView(out, pieces, 48) as view:
            for event in script("text"):
                view.show(event)

    with PseudoTerminal(80, 24) as terminal:
        thread = threading.Thread(target=show)
        thread.start()
        thread.join()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            show()
        finally:
            signal.signal(signal.SIGINT, before)
        assert terminal.sync().text() == ["text", "text"]


def test_an_error_leaves_a_clean_screen_with_what_was_final() -> None:
    with PseudoTerminal(80, 24) as terminal, terminal.writer() as out:
        with pytest.raises(ValueError), LiveView(out, pieces, 48, clock=ticking()) as view:  # noqa: PT012
            view.show(Commit(row=0, canvas=0, tokens=(1,), steps=1, text="final"))
            view.show(Draft(row=0, canvas=1, step=1, tokens=(97,), entropy=(1.0,), text="a"))
            view.show(Draft(row=0, canvas=1, step=1, tokens=(97,), entropy=(), text="a"))
        assert terminal.sync().text() == ["final"]
        assert not terminal.screen.cursor.hidden


def test_a_window_of_unknown_size_counts_as_80_by_24() -> None:
    with PseudoTerminal(40, 24) as terminal, terminal.writer() as out:
        terminal.screen.lines, terminal.screen.columns = 0, 0
        terminal._set_size()
        assert window_size(out) == (80, 24)
    with open("/dev/null", "w") as nowhere:
        assert window_size(nowhere) == (80, 24)


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
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    assert open_view(pieces, 48).live is live


def test_a_dumb_terminal_gets_no_escapes_either() -> None:
    with PseudoTerminal(80, 24) as terminal:
        with terminal.writer() as out, PlainView(out) as view:
            for event in script("safe\x1b[2J"):
                view.show(event)
        terminal.sync()
        assert "\x1b" not in terminal.raw.decode().replace(MARK, "")


def test_a_repaint_is_quick() -> None:
    text = "The quick brown fox 日本語 " * 60
    seconds = []
    for _ in range(10):  # of the processor, and the least: others may be busy
        start = time.process_time()
        lay_out([(char, "") for char in text], 80)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.05
