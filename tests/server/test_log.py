"""One line of JSON per request, with its id, and without its words unless they are asked for."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from dgemma.engine.service import EngineFailureError
from dgemma.server.http.log import LOGGER, configure_log
from server.fake_engine import FakeEngine, Script
from server.served import CHAT, HELLO, app_of, ask, post

PROMPT = [{"role": "user", "content": "a secret question"}]
ANSWER = Script(text="a secret answer")


@pytest.fixture
def lines() -> Iterator[Any]:
    """-> a function that gives the lines so far."""
    stream = io.StringIO()
    uvicorn = logging.getLogger("uvicorn.error")
    before = [(logger, logger.handlers, logger.propagate, logger.level) for logger in (LOGGER, uvicorn)]
    configure_log(stream)
    try:
        yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    finally:
        for logger, handlers, propagate, level in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)


def test_a_request_is_one_line_of_json(lines: Any) -> None:
    response = post(app_of(), CHAT, HELLO, headers={"x-request-id": "my-id.7"})
    assert response.headers["x-request-id"] == "my-id.7"
    (line,) = lines()
    assert line["time"].endswith("Z")
    assert line.pop("duration_s") >= line.pop("first_block_s") >= 0
    assert {name: value for name, value in line.items() if name != "time"} == {
        "level": "info",
        "event": "request",
        "request_id": "my-id.7",
        "method": "POST",
        "path": CHAT,
        "status": 200,
        "model": "dgemma",
        "stream": False,
        "choices": 1,
        "prompt_tokens": 14,
        "completion_tokens": 78,
        "finish_reasons": ["stop"],
    }


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, 'x"y', "ä".encode()])
def test_an_id_that_no_log_should_hold_is_replaced(lines: Any, given: Any) -> None:
    response = ask(app_of(), "GET", "/health", headers={"x-request-id": given})
    assert len(response.headers["x-request-id"]) == 32
    assert lines()[0]["request_id"] == response.headers["x-request-id"]


@pytest.mark.parametrize("stream", [False, True])
def test_words_are_in_the_log_only_if_asked_for(lines: Any, stream: bool) -> None:
    body = {**HELLO, "messages": PROMPT, "stream": stream}
    post(app_of(FakeEngine(ANSWER)), CHAT, body)
    post(app_of(FakeEngine(ANSWER), log_text=True), CHAT, body)
    post(app_of(FakeEngine(ANSWER), log_text=True), CHAT, {"model": body.pop("model"), "extra_body": body})
    silent, *telling = lines()
    assert "secret" not in json.dumps(silent)
    for line in telling:
        assert line["prompt"] == PROMPT
        assert line["answers"] == ["a secret answer"]


def test_a_refusal_names_the_field_and_not_its_value(lines: Any) -> None:
    post(app_of(), CHAT, {**HELLO, "temperature": "secret"})
    post(app_of(log_text=True), CHAT, {**HELLO, "temperature": "secret"})
    silent, telling = lines()
    assert (silent["status"], silent["error_code"], silent["error_param"]) == (
        400,
        "invalid_value",
        "temperature",
    )
    assert "secret" not in json.dumps(silent)
    assert "temperature is 'secret'" in telling["error_message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_says_where_and_not_what_of(lines: Any, stream: bool) -> None:
    engine = FakeEngine(Script(text="x" * 40, fails_at=1, error=RuntimeError("secret")))
    post(app_of(engine), CHAT, {**HELLO, "stream": stream})
    post(app_of(engine, log_text=True), CHAT, {**HELLO, "stream": stream})
    silent, telling = lines()
    assert silent["level"] == "error"
    assert silent["failure"] == "RuntimeError"
    assert any("fake_engine.py" in place for place in silent["at"])
    assert "secret" not in json.dumps(silent)
    assert telling["failure_message"] == "secret"


def test_a_failure_of_the_engine_is_told_by_its_cause(lines: Any) -> None:
    error = EngineFailureError("this request failed")
    try:
        raise ZeroDivisionError("secret")
    except ZeroDivisionError as cause:
        error.__cause__ = cause
    post(app_of(FakeEngine(Script(text="x" * 40, fails_at=1, error=error))), CHAT, HELLO)
    (line,) = lines()
    assert (line["error_code"], line["failure"]) == ("engine_failure", "ZeroDivisionError")
    assert [place.split()[-1] for place in line["at"]] == [
        "test_a_failure_of_the_engine_is_told_by_its_cause"
    ]


def test_lines_of_others_are_json_too(lines: Any) -> None:
    try:
        raise ValueError("secret")
    except ValueError:
        logging.getLogger("uvicorn.error").exception("Something %s", "odd")
    (line,) = lines()
    assert (line["event"], line["failure"]) == ("Something odd", "ValueError")
    assert "secret" not in json.dumps(line)
