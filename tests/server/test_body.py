"""Bodies that are no JSON, not in UTF-8, too large or too slow are refused in the one form of errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from starlette.requests import Request

from dgemma.server.http import body as body_module
from dgemma.server.http.body import parse_object, read_object
from dgemma.server.http.errors import ApiError
from server.served import CHAT, app_of, ask, client_of, error_of, run

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not valid JSON"),
        (b"{", "the body is not valid JSON"),
        (b'{"a": 1,}', "the body is not valid JSON"),
        (b"[]", "the body is not a JSON object"),
        (b'"text"', "the body is not a JSON object"),
        (b'{"temperature": NaN}', "the body holds NaN, which JSON does not have."),
        (b'{"temperature": -Infinity}', "the body holds -Infinity"),
        (b'{"temperature": 1e999}', "the body holds the number 1e999, which is out of range."),
        (b'{"seed": ' + b"9" * 5000 + b"}", "the body holds a number of too many digits."),
        (b'{"seed": ' + b"9" * 400 + b"}", "seed holds an integer of"),
        (b'{"a": ' * 50_000 + b"1" + b"}" * 50_000, "the body is nested too deeply"),
        (b'{"a": ' * 60 + b"1" + b"}" * 60, "a is nested deeper than 32 levels"),
        (b'{"model": "\xff"}', "the body is not UTF-8: byte 0xff at position 11."),
        ('{"model": "ä"}'.encode("utf-16"), "the body is not UTF-8: byte 0xff at position 0."),
        ('{"model": "ä"}'.encode("latin-1"), "the body is not UTF-8: byte 0xe4"),
        (b'{"model": "\\ud800"}', "model holds the lone surrogate U+D800"),
        (b'{"\\udfff": 1}', "the body holds the lone surrogate U+DFFF"),
        (b'{"n": 1, "n": 2}', "the name 'n' stands twice in one object"),
        (b'{"tools": [{"a": 1, "a": 2}]}', "the name 'a' stands twice"),
        (b"\xef\xbb\xbf{}", "the body is not valid JSON"),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else "",
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_object(body)
    assert caught.value.status == 400
    assert message in str(caught.value)


def test_the_refusal_of_a_broken_character_is_itself_valid_utf8() -> None:
    response = ask(app_of(), "POST", CHAT, content=b'{"\\udfff": 1}', headers=JSON)
    assert response.status_code == 400
    assert error_of(response)["param"] == "\udfff"


def test_a_null_is_an_absent_field() -> None:
    assert parse_object(b'{"a": null, "b": [null]}') == {"b": [None]}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=utf-16"},
        {**JSON, "content-encoding": "gzip"},
    ],
)
def test_only_json_in_utf8_is_read(headers: dict[str, str]) -> None:
    response = ask(app_of(), "POST", CHAT, content=b"{}", headers=headers)
    assert response.status_code == 415
    assert error_of(response)["code"] == "unsupported_media_type"


def test_a_charset_that_says_utf8_is_fine() -> None:
    headers = {"content-type": 'Application/JSON; charset="UTF-8"'}
    assert error_of(ask(app_of(), "POST", CHAT, content=b"{}", headers=headers))["param"] == "model"


def test_a_body_is_bounded_while_it_is_read() -> None:
    """An endless body ends soon: nobody waits for its end before looking at its size."""
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1 << 16
            yield b" " * (1 << 16)

    async def asked() -> httpx2.Response:
        async with client_of(app_of(max_body_bytes=1000)) as client:
            return await client.post(CHAT, content=endless(), headers=JSON)

    response = run(asked())
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"
    assert sent < 8 << 20


def test_a_body_that_is_declared_too_large_is_refused_unread() -> None:
    headers = {**JSON, "content-length": "9" * 30}
    assert ask(app_of(), "POST", CHAT, content=b"{}", headers=headers).status_code == 413


def test_the_largest_allowed_body_is_read() -> None:
    body = b'{"model": "nobody"}'
    app = app_of(max_body_bytes=len(body))
    assert ask(app, "POST", CHAT, content=body, headers=JSON).status_code == 400
    assert ask(app, "POST", CHAT, content=body + b" ", headers=JSON).status_code == 413


def test_a_body_that_does_not_arrive_is_not_waited_for() -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(3600)

    async def asked() -> httpx2.Response:
        async with client_of(app_of(body_timeout_s=0.05)) as client:
            return await client.post(CHAT, content=slow(), headers=JSON)

    response = run(asked())
    assert response.status_code == 408
    assert error_of(response)["code"] == "body_timeout"


def request_of(parts: list[bytes], headers: dict[str, str]) -> tuple[Request, list[bytes]]:
    """A request whose body arrives in these parts, and the parts that nobody has read yet."""
    left = list(parts)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "path": CHAT, "headers": raw}, receive), left


def test_of_a_body_that_is_too_large_four_more_mebibytes_are_discarded() -> None:
    parts = [b"x" * 1000, *[b" " * (1 << 20)] * 4, b" ", b" " * 10]
    request, left = request_of(parts, JSON)
    with pytest.raises(ApiError) as caught:
        asyncio.run(read_object(request, max_bytes=1000, timeout_s=60))
    assert caught.value.status == 413
    assert left == [b" " * 10]


@pytest.mark.parametrize("size", [(64 << 10) - 1, 64 << 10])
def test_a_body_of_64_kib_is_parsed_in_a_thread(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def parse(raw: bytes) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return {}

    monkeypatch.setattr(body_module, "parse_object", parse)
    request, _ = request_of([b" " * size], JSON)
    asyncio.run(read_object(request, max_bytes=1 << 20, timeout_s=60))
    assert (threads[0] is threading.current_thread()) == (size < 64 << 10)


@pytest.mark.parametrize(("digits", "is_read"), [(18, True), (19, False)])
def test_a_length_of_more_than_18_digits_is_refused_unread(digits: int, is_read: bool) -> None:
    request, left = request_of([b"{}"], {**JSON, "content-length": "1" * digits})
    if is_read:
        assert asyncio.run(read_object(request, max_bytes=10, timeout_s=60)) == {}
    else:
        with pytest.raises(ApiError, match="more than 10 bytes"):
            asyncio.run(read_object(request, max_bytes=10, timeout_s=60))
    assert bool(left) is not is_read


@pytest.mark.parametrize("body", ['{"%s": 1, "%s": 2}', '{"%s": "\\ud800"%.0s}'])
def test_a_refusal_shows_100_characters_of_a_long_name(body: str) -> None:
    name = "n" * 200
    with pytest.raises(ApiError) as caught:
        parse_object((body % (name, name)).encode())
    assert caught.value.param == "n" * 100


def test_a_body_of_the_most_bytes_is_read_whole() -> None:
    request, _ = request_of([b'{"a"', b": 1}"], JSON)
    assert asyncio.run(read_object(request, max_bytes=8, timeout_s=60)) == {"a": 1}
