"""The playground in a browser: every mode once, on the bundled models; hostile traces; keys and phones."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from browser.playground_process import CHROMIUM, playing
from dgemma.server.app import create_app
from dgemma.server.http.settings import Settings
from dgemma.server.playground import PlaygroundFacts, PlaygroundModel
from dgemma.trace.html import to_html
from dgemma.trace.trace_reader import read_trace
from hostile_texts import hostile_texts
from server.fake_engine import FakeEngine, FakeText
from server.served import on_a_port

pytest.importorskip("playwright", reason="playwright is not installed: pip install playwright")
if CHROMIUM is None:
    pytest.skip("there is no chromium; set CHROMIUM to one", allow_module_level=True)

from playwright.sync_api import sync_playwright

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

ACTIVE = ("Cc", "Cf", "Cs", "Cn", "Zl", "Zp")  # categories of characters that do more than be seen
MODES = ("sudoku", "forms", "canvas", "chat", "fill", "edit", "decide", "race", "trace")
AXE = files("axe_playwright_python") / "axe.min.js"
MAX_BYTES = 300_000  # of a first visit
TIMEOUT_MS = 60_000  # a first request waits until its model is loaded


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with playing() as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


class Visit:
    """A page, and what went wrong in it."""

    def __init__(self, browser: Browser, address: str, **options: Any) -> None:
        self.address = address
        self.context = browser.new_context(reduced_motion="reduce", accept_downloads=True, **options)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(TIMEOUT_MS)
        self.wrong: list[str] = []
        self.requests: list[str] = []
        self.page.on(
            "console", lambda said: said.type in ("error", "warning") and self.wrong.append(said.text)
        )
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.wrong.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def mode(self, name: str) -> Locator:
        self.page.goto(f"{self.address}/#{name}")
        found = self.page.locator(f".mode-{name}")
        found.wait_for()
        return found

    def close(self) -> None:
        self.context.close()
        assert self.wrong == []
        assert all(url.startswith((self.address, "blob:", "file:")) for url in self.requests), self.requests


@pytest.fixture
def visit(browser: Browser, address: str) -> Iterator[Visit]:
    made = Visit(browser, address)
    yield made
    made.close()


def run(part: Locator, button: str) -> None:
    part.get_by_role("button", name=button, exact=True).click()
    part.get_by_role("button", name="Export trace").first.wait_for()


def test_sudoku_is_solved_on_the_board_and_its_trace_is_a_trace_file(visit: Visit, tmp_path: Path) -> None:
    part = visit.mode("sudoku")
    run(part, "Solve")
    part.get_by_text("Every rule is kept").wait_for()
    assert re.fullmatch(r"[1-9]{81}", "".join(part.locator(".place").all_inner_texts()))
    # Only what was committed is said.
    visit.page.locator(".unseen", has_text="Solved").wait_for(state="attached")
    with visit.page.expect_download() as download:
        part.get_by_role("button", name="Export trace").click()
    saved = tmp_path / download.value.suggested_filename
    download.value.save_as(saved)
    assert read_trace(saved).requests[0].steps


def test_the_scrubber_goes_through_all_steps_by_keyboard(visit: Visit) -> None:
    part = visit.mode("sudoku")
    run(part, "Solve")
    scrubber = part.get_by_role("slider", name="step")
    last = int(scrubber.input_value())
    assert last >= 2
    scrubber.focus()
    visit.page.keyboard.press("Home")
    assert scrubber.input_value() == "0"
    assert "step 1" in (scrubber.get_attribute("aria-valuetext") or "")
    for _ in range(last):
        visit.page.keyboard.press(".")
    assert scrubber.input_value() == str(last)
    assert "final" in part.locator(".player-title").inner_text()


def test_forms_reads_a_message_as_a_record(visit: Visit) -> None:
    part = visit.mode("forms")
    run(part, "Read it")
    record = part.locator(".record")
    assert "Ann Hill" in record.inner_text()
    assert "12:00" in record.inner_text()


def test_a_token_of_the_canvas_has_a_history_and_alternatives(visit: Visit) -> None:
    part = visit.mode("canvas")
    run(part, "Write")
    part.locator(".token[data-index='0']").focus()
    visit.page.keyboard.press("ArrowRight")
    history = part.locator(".history")
    assert "Position 2" in history.inner_text()
    assert "alternatives" in history.inner_text()
    assert part.locator(".token[data-index='1']:focus").count() == 1


def test_chat_answers_and_the_request_is_copied_as_a_command(visit: Visit) -> None:
    visit.context.grant_permissions(["clipboard-read", "clipboard-write"])
    part = visit.mode("chat")
    part.get_by_label("Message").fill("Hello?")
    visit.page.keyboard.press("Enter")
    part.get_by_role("button", name="Export trace").wait_for()
    assert part.locator(".turns li").count() == 2
    part.get_by_role("button", name="Copy as curl").click()
    part.get_by_text("copied as curl").wait_for()
    copied: str = visit.page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith(f"curl -N {visit.address}/text/v1/chat/completions")
    assert '"content":"Hello?"' in copied


def test_fill_fills_every_gap(visit: Visit) -> None:
    part = visit.mode("fill")
    part.get_by_label("Text with gaps").fill(
        "Emma had a little <FILL>. Every morning it got some <FILL> water."
    )
    part.get_by_text("Longest gap, and sampler").click()
    part.get_by_label("most tokens").fill("2")
    run(part, "Fill 2 gaps")
    part.locator(".answer mark").nth(1).wait_for()


def test_each_change_of_an_edit_is_accepted_or_rejected(visit: Visit) -> None:
    part = visit.mode("edit")
    run(part, "Edit")
    assert part.locator(".hunks li").count() >= 1
    old = part.locator(".hunks del").first.inner_text().strip()
    assert part.locator(".diff ins").count() >= 1
    part.get_by_role("button", name="Reject all").click()
    assert part.locator(".diff ins").count() == 0
    part.locator(".hunks input").first.check()
    assert part.locator(".diff ins").count() == 1
    part.get_by_role("button", name="Go on with the result").click()
    assert old not in part.get_by_label("Text", exact=True).input_value()


def test_decide_shows_probabilities_that_add_up(visit: Visit) -> None:
    part = visit.mode("decide")
    run(part, "Decide")
    for table in part.locator(".bars").all():
        numbers = [float(text.split()[0]) for text in table.locator(".number").all_inner_texts()]
        assert sum(numbers) == pytest.approx(100, abs=0.2)


def test_a_race_has_two_canvases_of_one_seed(visit: Visit) -> None:
    part = visit.mode("race")
    part.get_by_label("tokens", exact=True).fill("16")
    run(part, "Race")
    part.get_by_text("Each ran alone").wait_for()
    assert part.locator(".canvas").count() == 2
    assert "left to right" in part.locator(".player-title").nth(1).inner_text()


def hostile_trace(path: Path) -> Path:
    hostile = hostile_texts()
    tokens = list(range(200, 200 + len(hostile)))  # none of them ends an answer
    about = {"command": hostile[0], "model": {"name": hostile[1]}}
    lines = [
        {"format": "dgemma-trace", "version": 1, "about": about},
        {"texts": {str(token): text for token, text in zip(tokens, hostile, strict=True)}},
        {"request": {"number": 0, "round": 0, "row": 0, "seed": 1, "prompt": [], "params": {}}},
        {
            "step": {
                "request": 0, "canvas": 0, "step": 1, "at_ms": 1.0, "argmax": tokens,
                "entropy": [5] * len(tokens), "accepted": "1",
            }
        },
        {"commit": {"request": 0, "canvas": 0, "tokens": tokens, "steps": 1}},
        {
            "answer": {
                "request": 0, "text": "".join(hostile), "tokens": tokens, "finish_reason": "stop",
                "seconds": 1.0,
            }
        },
        {"end": {"lines": 6}},
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def check_hostile(page: Page) -> None:
    shown = page.locator(".canvas")
    shown.wait_for()
    tokens = shown.locator(".token").all_inner_texts()
    assert len(tokens) == 200
    assert "<script>alert(1)</script>" in tokens
    assert "</text></svg><img src=x onerror=alert(1)>" in tokens
    assert max(map(len, tokens)) <= 3 * 60 + 1
    everything = page.locator("body").inner_text()
    acting = {char for char in everything if unicodedata.category(char) in ACTIVE} - {"\n", "\t"}
    assert acting == set()
    markup = ".canvas :is(img, script, style, svg), .answer :is(img, script, style, svg)"
    assert page.locator(markup).count() == 0


def test_a_hostile_trace_is_shown_as_text_and_nothing_of_it_acts(visit: Visit, tmp_path: Path) -> None:
    part = visit.mode("trace")
    before = len(visit.requests)
    part.get_by_label("Trace file").set_input_files(hostile_trace(tmp_path / "hostile.trace"))
    check_hostile(visit.page)
    part.locator(".token").first.focus()
    part.locator(".history").wait_for()
    assert len(visit.requests) == before
    broken = tmp_path / "<b>broken.trace"
    broken.write_text("no trace")
    part.get_by_label("Trace file").set_input_files(broken)
    part.get_by_text("this is not a trace").wait_for()


def test_the_page_of_a_trace_alone_is_as_safe(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "hostile.html"
    page.write_text(to_html(read_trace(hostile_trace(tmp_path / "hostile.trace"))), encoding="utf-8")
    visit = Visit(browser, page.as_uri())
    visit.page.goto(page.as_uri())
    check_hostile(visit.page)
    assert visit.requests == [page.as_uri()]
    visit.close()


def test_a_phone_needs_no_sideways_scrolling_in_any_mode(browser: Browser, address: str) -> None:
    visit = Visit(browser, address, viewport={"width": 390, "height": 800}, color_scheme="dark")
    for name in MODES:
        visit.mode(name)
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390, name
    visit.close()


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light")])
def test_axe_finds_nothing_serious_in_any_mode(
    browser: Browser, address: str, width: int, scheme: Literal["dark", "light"]
) -> None:
    size: Any = {"width": width, "height": 900}
    # The page's own policy allows no script from outside, which axe is.
    visit = Visit(browser, address, viewport=size, color_scheme=scheme, bypass_csp=True)
    for name in MODES:
        visit.mode(name)
        visit.page.evaluate(AXE.read_text())
        found = visit.page.evaluate("axe.run(document)")["violations"]
        assert [one for one in found if one["impact"] in ("serious", "critical")] == [], name
    visit.close()


def test_a_first_visit_is_small(visit: Visit) -> None:
    visit.mode("sudoku")
    sizes = visit.page.evaluate(
        "[...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]"
        ".map((entry) => entry.transferSize)"
    )
    assert 0 < sum(sizes) < MAX_BYTES


def test_a_key_is_asked_for_and_forgotten_by_a_reload_and_answers_come_without_traces(
    browser: Browser,
) -> None:
    model = PlaygroundModel(base="", name="dgemma", modes=("chat",), traces=False, canvas_len=8)
    settings = Settings(api_keys=("open-sesame",))
    app = create_app(settings, FakeEngine(), FakeText(), PlaygroundFacts(models=(model,)))
    with on_a_port(app) as address:
        visit = Visit(browser, address)
        visit.page.goto(address)
        visit.page.get_by_label("API key").fill("wrong")
        visit.page.keyboard.press("Enter")
        visit.page.get_by_text("not one of the server's keys").wait_for()
        visit.page.get_by_label("API key").fill("open-sesame")
        visit.page.keyboard.press("Enter")
        visit.page.get_by_text("Live canvases need a server").wait_for()
        part = visit.page.locator(".mode-chat")
        part.get_by_role("button", name="Send").click()
        part.locator(".turns .assistant p").wait_for()
        part.get_by_role("button", name="New conversation").wait_for()
        held = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
        assert "open-sesame" not in visit.page.evaluate(held)
        visit.page.reload()
        visit.page.get_by_label("API key").wait_for()
        # The browser's own note of each refusal.
        visit.wrong = [text for text in visit.wrong if "401" not in text]
        visit.close()
