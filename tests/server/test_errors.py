"""Whatever goes wrong, the client hears of it in OpenAI's form, and nobody else is harmed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from dgemma.engine.service import BusyError, DrainingError, EngineDeadError, EngineFailureError
from dgemma.errors import InputError
from dgemma.server.app import create_app
from dgemma.server.http.errors import to_api_error
from dgemma.server.http.middleware import RequestMiddleware
from dgemma.server.http.settings import Settings
from server.fake_engine import FakeEngine, FakeText, Script, by_seed
from server.served import (
    CHAT,
    COMPLETIONS,
    HELLO,
    ONCE,
    app_of,
    ask,
    client_of,
    error_of,
    post,
    run,
    run_unhurried,
)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/", 405),
        ("GET", "/v1", 404),
        ("POST", "/v1/chat/completion", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/nobody", 404),
        ("GET", "/redoc", 404),
        ("POST", "/docs", 405),
        ("GET", CHAT, 405),
        ("DELETE", COMPLETIONS, 405),
        ("OPTIONS", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("POST", "/health", 405),
    ],
)
def test_wrong_addresses_and_methods_have_the_same_form(method: str, path: str, status: int) -> None:
    response = ask(app_of(), method, path)
    assert response.status_code == status
    assert error_of(response)["type"] == "invalid_request_error"
    assert ("allow" in response.headers) == (status == 405)


# Keys


KEYED = app_of(api_keys=("one", "two"))


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer three"},
        {"authorization": "Bearer on"},
        {"authorization": "Bearer onee"},
        {"authorization": "Basic one"},
        {"authorization": "one"},
        {"authorization": "Bearer"},
        {"authorization": b"Bearer \xff\xfe"},
        {"api-key": "one"},
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/metrics", "/openapi.json", "/docs", "/v1/models", "/nowhere"])
def test_without_a_key_everything_is_closed(path: str, headers: dict[str, Any]) -> None:
    response = ask(KEYED, "GET", path, headers=headers)
    assert response.status_code == 401
    assert error_of(response)["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


def test_with_any_of_the_keys_everything_is_open() -> None:
    for key in ("one", "two"):
        headers = {"authorization": f"Bearer {key}"}
        assert post(KEYED, CHAT, HELLO, headers=headers).status_code == 200
        assert ask(KEYED, "GET", "/metrics", headers=headers).status_code == 200


def test_two_keys_at_once_are_no_key() -> None:
    headers = [("authorization", "Bearer one"), ("authorization", "Bearer two")]
    assert ask(KEYED, "GET", "/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_health_checks_need_no_key(path: str) -> None:
    assert ask(KEYED, "GET", path).status_code == 200


# Load


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_429_with_a_time_to_come_back(stream: bool) -> None:
    engine = FakeEngine()
    engine.busy_for_s = 2.3
    response = post(app_of(engine), CHAT, {**HELLO, "stream": stream})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert error_of(response) == {
        "message": "the queue is full",
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limit_exceeded",
    }


@pytest.mark.parametrize("stream", [False, True])
def test_if_one_of_n_answers_finds_no_place_none_is_written(stream: bool) -> None:
    engine = FakeEngine()
    engine.busy_after = 2
    response = post(app_of(engine), CHAT, {**HELLO, "n": 3, "stream": stream})
    assert response.status_code == 429
    assert len(engine.cancelled) == 2
    assert engine.running == 0


def test_more_requests_than_allowed_at_once_are_429() -> None:
    app = app_of(max_concurrent_requests=1)
    with app.state.admission.admit():
        response = post(app, CHAT, HELLO)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert "1 requests are being answered" in error_of(response)["message"]
    assert post(app, CHAT, HELLO).status_code == 200


def test_an_engine_that_drains_is_503_with_a_time_to_come_back() -> None:
    engine = FakeEngine()
    engine.is_draining = True
    response = post(app_of(engine), CHAT, HELLO)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    assert error_of(response)["code"] == "draining"


def test_an_engine_that_is_down_is_not_healthy() -> None:
    engine = FakeEngine()
    engine.failure = "its thread ended"
    for path in ("/health", "/ready"):
        response = ask(app_of(engine), "GET", path)
        assert response.status_code == 503
        assert error_of(response)["code"] == "engine_down"


# Failures


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineFailureError("a step failed on secret words"), 500),
        (EngineDeadError("the engine has stopped: secret words"), 503),
        (ZeroDivisionError("secret words"), 500),
        (InputError("the prompt holds token 7"), 400),
    ],
)
def test_a_failure_before_the_first_event_has_a_status(error: Exception, status: int) -> None:
    engine = FakeEngine(Script(text="x", fails_at=0, error=error))
    response = post(app_of(engine), CHAT, HELLO)
    assert response.status_code == status
    told = error_of(response)
    assert "secret" not in told["message"]
    assert engine.running == 0


@pytest.mark.parametrize("error", [EngineFailureError("secret"), ZeroDivisionError("secret")])
def test_a_failure_within_a_stream_is_its_last_event(error: Exception) -> None:
    engine = FakeEngine(Script(text="x" * 40, fails_at=1, error=error))
    response = post(app_of(engine), CHAT, {**HELLO, "stream": True})
    assert response.status_code == 200
    events = [line for line in response.text.split("\n\n") if line]
    assert "x" * 16 in events[-2]
    last = json.loads(events[-1].removeprefix("data: "))
    assert last["error"]["type"] == "server_error"
    assert "secret" not in response.text
    assert "[DONE]" not in response.text


def test_one_of_n_answers_that_fails_ends_the_others() -> None:
    def second_fails(request: Any) -> Script:
        return Script(text="x" * 99, holds_at=3) if request.seed == 7 else Script(text="x" * 40, fails_at=1)

    engine = FakeEngine(second_fails)
    assert post(app_of(engine), CHAT, {**HELLO, "n": 2}).status_code == 500
    assert engine.running == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_ends_without_a_finish_is_a_failure(stream: bool) -> None:
    response = post(app_of(FakeEngine(Script(text="x", ends_early=True))), CHAT, {**HELLO, "stream": stream})
    assert response.status_code == (200 if stream else 500)
    assert "engine_failure" in response.text


def test_an_exception_of_our_own_is_a_500_in_the_same_form_and_the_next_request_is_served() -> None:
    class Broken(FakeText):
        def render_chat(
            self,
            messages: Sequence[Mapping[str, Any]],
            *,
            tools: Sequence[Mapping[str, Any]] | None = None,
            thinking: bool = False,
        ) -> tuple[int, ...]:
            raise KeyError("secret words")

    app = create_app(Settings(), FakeEngine(), Broken())
    response = post(app, CHAT, HELLO)
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert "secret" not in response.text
    assert response.headers["x-request-id"]
    assert post(app, COMPLETIONS, ONCE).status_code == 200


def test_a_failing_request_harms_no_other() -> None:
    def odd_ones_fail(request: Any) -> Script:
        return Script(text="x" * 40, fails_at=1) if request.seed % 2 else by_seed(request)

    async def many(app: RequestMiddleware) -> list[int]:
        import asyncio

        async with client_of(app) as client:
            asked = [client.post(CHAT, json={**HELLO, "seed": seed}) for seed in range(20)]
            return [response.status_code for response in await asyncio.gather(*asked)]

    assert run(many(app_of(FakeEngine(odd_ones_fail)))) == [200, 500] * 10


# Time


def test_an_answer_that_takes_too_long_ends_with_what_there_is() -> None:
    engine = FakeEngine(Script(text="x" * 40, holds_at=1))
    choice = post(app_of(engine, request_timeout_s=0.05), CHAT, HELLO, by=run_unhurried).json()["choices"][0]
    assert choice["message"]["content"] == "x" * 16
    assert choice["dgemma"]["finish_reason"] == "deadline"


@pytest.mark.parametrize("hold", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_ignores_the_deadline_is_given_up(stream: bool, hold: int) -> None:
    script = Script(text="x" * 40, delay_s=3600) if hold == 0 else Script(text="x" * 400, delay_s=0.08)
    engine = FakeEngine(script)
    app = app_of(engine, request_timeout_s=0.1, timeout_grace_s=0.15)
    response = post(app, CHAT, {**HELLO, "stream": stream}, by=run_unhurried)
    assert response.status_code == (200 if stream else 504)
    assert '"timeout"' in response.text
    if not stream:
        assert response.headers["x-should-retry"] == "false"
    assert engine.running == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_does_not_even_accept_is_given_up(stream: bool) -> None:
    engine = FakeEngine(Script(accepts=False))
    app = app_of(engine, request_timeout_s=0.05, timeout_grace_s=0.05)
    response = post(app, CHAT, {**HELLO, "stream": stream}, by=run_unhurried)
    assert response.status_code == 504, "no status was sent before"
    assert error_of(response)["code"] == "timeout"
    assert engine.running == 0


# Names


def test_an_input_error_keeps_its_field_and_code() -> None:
    named = to_api_error(InputError.about("stop", "is 3; it must be text.", code="unsupported_parameter"))
    assert (named.status, named.param, named.code) == (400, "stop", "unsupported_parameter")
    unnamed = to_api_error(InputError("stop is no field here"))
    assert (unnamed.param, unnamed.code) == (None, "invalid_value")


def test_every_error_of_the_engine_has_a_status() -> None:
    assert to_api_error(BusyError("full", retry_after_s=float("inf"))).headers == {"retry-after": "60"}
    assert to_api_error(BusyError("full", retry_after_s=0)).headers == {"retry-after": "1"}
    assert to_api_error(DrainingError("x")).status == 503
    assert to_api_error(RuntimeError("x")).status == 500
