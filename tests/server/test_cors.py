"""Web pages: only of the origins that were allowed, over a real socket, as a browser asks."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest

from dgemma.errors import InputError
from dgemma.server.http.settings import Settings
from server.served import CHAT, HELLO, app_of, on_a_port

PAGE = "https://page.example"
KEY = {"authorization": "Bearer k"}
# What OpenAI's client sends from a browser.
ASKED_HEADERS = "authorization,content-type,x-stainless-lang,x-stainless-retry-count"


@pytest.fixture(scope="module")
def named() -> Iterator[str]:
    with on_a_port(app_of(api_keys=("k",), cors_origins=(PAGE, "http://localhost:5173"))) as address:
        yield address


@pytest.fixture(scope="module")
def any_page() -> Iterator[str]:
    with on_a_port(app_of(cors_origins=("*",))) as address:
        yield address


def preflight(address: str, origin: str, method: str = "POST") -> httpx2.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": ASKED_HEADERS,
    }
    return httpx2.options(f"{address}{CHAT}", headers=headers, timeout=60)


def varies_by_origin(response: httpx2.Response) -> bool:
    return "Origin" in [name.strip() for name in response.headers.get("vary", "").split(",")]


def test_a_preflight_of_an_allowed_origin_needs_no_key(named: str) -> None:
    response = preflight(named, PAGE)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == PAGE
    assert response.headers["access-control-allow-methods"] == "GET, POST, DELETE"
    assert response.headers["access-control-allow-headers"] == ASKED_HEADERS
    assert "access-control-allow-credentials" not in response.headers
    assert varies_by_origin(response)


@pytest.mark.parametrize(
    "origin",
    [
        "https://page.example.evil", "https://evil.page.example", "http://page.example", "null", "*",
        "https://page.example:444", "https://page.exampl", "https://PAGE.example", "http://localhost:51730",
    ],
)  # fmt: skip
def test_an_origin_is_compared_letter_by_letter(named: str, origin: str) -> None:
    refused = preflight(named, origin)
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers
    read = httpx2.get(f"{named}/v1/models", headers={**KEY, "origin": origin}, timeout=60)
    assert "access-control-allow-origin" not in read.headers
    assert varies_by_origin(read), "a cache must not give this to an allowed page"


def test_a_method_that_no_endpoint_has_is_refused(named: str) -> None:
    assert preflight(named, PAGE, "PUT").status_code == 400


@pytest.mark.parametrize("origin", [PAGE, "http://localhost:5173"])
def test_a_page_reads_answers_refusals_and_the_request_id(named: str, origin: str) -> None:
    for key, status in ((KEY, 200), ({}, 401)):
        response = httpx2.post(f"{named}{CHAT}", json=HELLO, headers={**key, "origin": origin}, timeout=60)
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == origin
        exposed = response.headers["access-control-expose-headers"].split(", ")
        assert set(exposed) == {"x-request-id", "retry-after"}
        assert response.headers["x-request-id"]
        assert varies_by_origin(response)


def test_a_request_without_an_origin_varies_too(named: str) -> None:
    assert varies_by_origin(httpx2.get(f"{named}/health", timeout=60))


def test_all_pages_only_if_asked_for_and_never_with_cookies(any_page: str) -> None:
    assert preflight(any_page, "https://whoever.example").headers["access-control-allow-origin"] == "*"
    headers = {"origin": "https://whoever.example", "cookie": "a=b"}
    response = httpx2.post(f"{any_page}{CHAT}", json=HELLO, headers=headers, timeout=60)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in response.headers


def test_without_the_flag_no_page_may(any_page: str) -> None:
    with on_a_port(app_of()) as address:
        assert preflight(address, PAGE).status_code == 405
        response = httpx2.get(f"{address}/health", headers={"origin": PAGE}, timeout=60)
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origin", ["page.example", "https://page.example/", "https://Page.example", "**"])
def test_what_no_browser_sends_as_an_origin_is_refused(origin: str) -> None:
    with pytest.raises(InputError, match="is not one; give it as https://name"):
        Settings(cors_origins=(origin,))
