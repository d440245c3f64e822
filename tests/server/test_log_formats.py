"""The log for people: one readable line per request, nothing that a terminal would obey; JSON elsewhere."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from dgemma.errors import InputError
from dgemma.server.http.log import LOGGER, configure_log
from dgemma.server.http.log_formats import TextFormatter, printable
from dgemma.server.http.settings import Settings
from server.fake_engine import FakeEngine, Script
from server.served import CHAT, HELLO, app_of, ask, post

CLOCK = r"\d\d:\d\d:\d\d  "


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Log:
    """The log of this process, in one form, until the test ends."""

    def __init__(self) -> None:
        self.stream = io.StringIO()

    def configure(self, stream: io.StringIO, log_format: str = "auto") -> None:
        self.stream = stream
        configure_log(stream, log_format)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    names = (LOGGER.name, "dgemma.engine", "dgemma.model", "uvicorn.error", "uvicorn.access")
    before = [
        (logger, logger.handlers, logger.propagate, logger.level) for logger in map(logging.getLogger, names)
    ]
    try:
        yield Log()
    finally:
        for logger, handlers, propagate, level in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)


@pytest.mark.parametrize(
    ("log_format", "is_terminal", "is_text"),
    [
        ("auto", True, True), ("auto", False, False), ("text", False, True), ("text", True, True),
        ("json", True, False), ("json", False, False),
    ],
)  # fmt: skip
def test_auto_is_for_people_on_a_terminal_only(
    log: Log, log_format: str, is_terminal: bool, is_text: bool
) -> None:
    log.configure(Terminal() if is_terminal else io.StringIO(), log_format)
    ask(app_of(), "GET", "/health")
    (line,) = log.lines
    assert line.startswith("{") != is_text
    # Colours are for terminals, in whatever form they were asked for.
    assert ("\x1b[" in line) == (is_text and is_terminal)


def test_a_request_is_one_line_that_can_be_read_at_a_glance(log: Log) -> None:
    log.configure(io.StringIO(), "text")
    keyed = app_of(FakeEngine(Script(text="x" * 33)), api_keys=("k",))
    post(keyed, CHAT, HELLO, headers={"authorization": "Bearer k"})
    post(keyed, CHAT, {**HELLO, "temprature": 1}, headers={"authorization": "Bearer k"})
    post(keyed, CHAT, HELLO)
    answered, refused, unknown = log.lines
    asked = CLOCK + "POST /v1/chat/completions  "
    assert re.fullmatch(asked + r"200  \d\.\d\d s  34 tokens  key=key-\w{8}", answered)
    why = r"unknown_parameter \(temprature\)"
    assert re.fullmatch(asked + rf"400  \d\.\d\d s  {why}  key=key-\w{{8}}", refused)
    assert re.fullmatch(asked + r"401  \d\.\d\d s  invalid_api_key", unknown)


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("/a%0a12:00:00%20%20GET%20/fake%20%20200", "/a%0A12:00:00%20%20GET%20/fake%20%20200"),
        ("/%1b%5b2J%1b%5d0;title%07", "/%1B%5B2J%1B%5D0;title%07"),
        ("/%e2%80%ae%c2%9b31m", "/%E2%80%AE%C2%9B31m"),
        ("/%25%ff", "/%25%EF%BF%BD"),
    ],
)
def test_a_path_cannot_write_on_the_terminal(log: Log, sent: str, shown: str) -> None:
    log.configure(io.StringIO(), "text")
    ask(app_of(), "GET", sent)
    (line,) = log.lines
    assert re.fullmatch(CLOCK + re.escape(f"GET {shown}") + r"  404  \d\.\d\d s  not_found", line)


def test_a_name_in_a_body_cannot_either(log: Log) -> None:
    log.configure(io.StringIO(), "text")
    post(app_of(), CHAT, {**HELLO, "a\n\x1b[31m\u202eb": 1})
    (line,) = log.lines
    assert "unknown_parameter (a\\n\\x1b[31m\\u202eb)" in line
    assert line.isprintable()


def test_texts_are_there_only_if_asked_for_and_in_one_line(log: Log) -> None:
    log.configure(io.StringIO(), "text")
    body = {**HELLO, "messages": [{"role": "user", "content": "a secret\nquestion"}]}
    for log_text in (False, True):
        post(app_of(FakeEngine(Script(text="a secret\nanswer")), log_text=log_text), CHAT, body)
    silent, telling = log.lines
    assert "secret" not in silent
    assert r"a secret\nquestion" in telling
    assert r"a secret\nanswer" in telling


def test_failures_and_warnings_stand_out(log: Log) -> None:
    log.configure(Terminal())
    engine = FakeEngine(Script(text="x" * 40, fails_at=1, error=RuntimeError("secret")))
    post(app_of(engine), CHAT, HELLO, headers={"x-request-id": "my-id"})
    failed, *frames = log.lines
    assert "\x1b[31merror: POST /v1/chat/completions  500  " in failed
    assert "RuntimeError  id=my-id" in failed
    assert frames
    assert all(re.match(r" +at .+\.py:\d+ \w+", frame) for frame in frames)
    assert "secret" not in log.stream.getvalue()

    log.configure(Terminal())
    LOGGER.warning("mind this")
    ask(app_of(), "GET", "/nowhere")
    ask(app_of(), "GET", "/health")
    warned, refused, fine = log.lines
    assert "\x1b[33mwarning: mind this\x1b[0m" in warned
    assert "\x1b[33mGET /nowhere  404" in refused
    assert "\x1b[31m" not in fine
    assert "\x1b[33m" not in fine


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_can_be_refused(log: Log, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    log.configure(Terminal())
    LOGGER.error("mind this")
    (line,) = log.lines
    assert re.fullmatch(CLOCK + "error: mind this", line)


def test_uvicorns_troubles_go_the_same_way_and_its_greetings_nowhere(log: Log) -> None:
    log.configure(io.StringIO(), "text")
    uvicorn = logging.getLogger("uvicorn.error")
    uvicorn.info("Started server process [%d]", 7)
    try:
        raise ValueError("secret")
    except ValueError:
        uvicorn.exception("Something %s\n", "odd")
    head, *frames = log.lines
    assert re.fullmatch(CLOCK + r"error: Something odd\\n  failure=ValueError", head)
    assert frames
    assert "secret" not in log.stream.getvalue()
    log.configure(io.StringIO(), "json")
    uvicorn.info("Started server process [%d]", 7)
    assert json.loads(log.lines[0])["event"] == "Started server process [7]"


def test_the_first_line_says_where_to_go() -> None:
    record = logging.LogRecord("dgemma.server", logging.INFO, "", 0, "listening", (), None)
    record.facts = {"host": "::1", "port": 8000, "address": "http://[::1]:8000", "model": "bundled:text"}
    line = TextFormatter(colour=False).format(record)
    assert re.fullmatch(
        CLOCK + r"serving bundled:text at http://\[::1\]:8000  \(docs: /docs, Ctrl-C ends\)", line
    )


@pytest.mark.parametrize("event", ["request", "listening", "draining"])
def test_an_event_without_its_facts_is_told_as_it_is(event: str) -> None:
    record = logging.LogRecord("dgemma.server", logging.INFO, "", 0, event, (), None)
    assert re.fullmatch(CLOCK + event, TextFormatter(colour=False).format(record))
    record.facts = {"requests": 2}
    assert re.fullmatch(CLOCK + f"{event}  requests=2", TextFormatter(colour=False).format(record))


def test_a_client_that_left_has_words_for_it() -> None:
    facts: dict[str, Any] = {"method": "POST", "path": CHAT, "status": 499, "duration_s": 1.234}
    record = logging.LogRecord("dgemma.server", logging.INFO, "", 0, "request", (), None)
    record.facts = facts
    line = TextFormatter(colour=False).format(record)
    assert re.fullmatch(CLOCK + r"POST /v1/chat/completions  client left  1\.23 s", line)


def test_what_can_be_printed_is_not_changed() -> None:
    assert printable("ä € 日本 a/b?c") == "ä € 日本 a/b?c"
    assert printable("\x00\x7f\x9b\u2028\ud800") == r"\x00\x7f\x9b\u2028\ud800"


def test_an_unknown_form_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"log_format is 'yaml'; give one of auto, text, json\."):
        Settings(log_format="yaml")
