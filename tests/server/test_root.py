"""/ says what the server is: to people and to programs, and to nobody more than he may know."""

from __future__ import annotations

import httpx2
import pytest

from dgemma import __version__
from dgemma.server.http.html_page import HEADERS
from dgemma.server.http.root import prefers_html
from server.fake_engine import FakeEngine
from server.served import app_of, ask, error_of, on_a_port

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
LINKS = ["/docs", "/openapi.json", "/health", "/v1/models"]


def test_programs_get_json_and_browsers_a_page_over_a_socket() -> None:
    with on_a_port(app_of(served_model_name="bundled:text", playground=False)) as address:
        told = httpx2.get(f"{address}/", timeout=60)
        assert told.headers["content-type"] == "application/json"
        assert told.json() == {
            "status": "ok",
            "name": "dgemma",
            "version": __version__,
            "model": "bundled:text",
            "links": dict(zip(("docs", "openapi", "health", "models"), LINKS, strict=True)),
        }
        shown = httpx2.get(f"{address}/", headers=BROWSER, timeout=60)
        assert shown.headers["content-type"] == "text/html; charset=utf-8"
        assert shown.headers["content-security-policy"] == HEADERS["content-security-policy"]
        assert "<h1>dgemma" in shown.text
        assert __version__ in shown.text
        assert "<code>bundled:text</code>" in shown.text
        for link in LINKS:
            assert f'<a href="{link}">' in shown.text
            assert httpx2.get(f"{address}{link}", timeout=60).status_code == 200
        assert all("Accept" in response.headers["vary"] for response in (told, shown))


@pytest.mark.parametrize("headers", [{}, BROWSER])
def test_without_a_key_it_says_what_health_says(headers: dict[str, str]) -> None:
    keyed = app_of(api_keys=("k",), served_model_name="secret-model", playground=False)
    response = ask(keyed, "GET", "/", headers=headers)
    assert response.status_code == 200
    if headers:
        assert "Status: ok" in response.text
    else:
        assert response.json() == ask(keyed, "GET", "/health").json()
    for word in ("secret-model", __version__, "dgemma", *LINKS):
        assert word not in response.text.replace("system-ui", ""), word


def test_with_a_key_it_says_all_and_with_a_wrong_one_nothing() -> None:
    keyed = app_of(api_keys=("k",))
    known = ask(keyed, "GET", "/", headers={"authorization": "Bearer k"})
    assert known.json()["version"] == __version__
    refused = ask(keyed, "GET", "/", headers={"authorization": "Bearer wrong"})
    assert refused.status_code == 401
    assert error_of(refused)["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", ["//", "/%2e", "/?", "/.", "/index.html"])
def test_only_the_root_itself_is_open(path: str) -> None:
    keyed = app_of(api_keys=("k",))
    response = ask(keyed, "GET", path)
    assert response.status_code == 401 or response.json() == {"status": "ok"}
    assert ask(keyed, "POST", "/", json={}).status_code == 405


def test_an_engine_that_has_stopped_is_told_here_too() -> None:
    engine = FakeEngine()
    engine.failure = "gone"
    response = ask(app_of(engine), "GET", "/", headers=BROWSER)
    assert (response.status_code, error_of(response)["code"]) == (503, "engine_down")


@pytest.mark.parametrize(
    ("accept", "html"),
    [
        ("", False), ("*/*", False), ("application/json", False), ("text/html", True), ("TEXT/HTML", True),
        (BROWSER["accept"], True), ("text/html;q=0", False), ("text/html;q=0.5, application/json", False),
        ("application/json;q=0.5, text/html;q=0.6", True), ("application/json, text/html", False),
        ("text/html;level=1", True), ("text/html;q=x", False), ("text/*", False), (",;,", False),
    ],
)  # fmt: skip
def test_html_is_for_those_who_ask_for_it(accept: str, html: bool) -> None:
    assert prefers_html(accept) is html
