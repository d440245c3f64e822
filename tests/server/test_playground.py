"""The playground over HTTP: a page under a strict policy, its files and no others, and what it is told."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from typing import Any

import httpx2
import pytest

from dgemma import __version__
from dgemma.cli.play import BUNDLED, has_display
from dgemma.cli.playground_facts import bundled_facts, playground_facts
from dgemma.engine.service import ServedModel
from dgemma.errors import CheckpointError
from dgemma.server.app import create_app
from dgemma.server.http.middleware import RequestMiddleware
from dgemma.server.http.settings import Settings
from dgemma.server.http.web_files import FILES_PATH, PAGE_HEADERS, takes_gzip, web_files
from dgemma.server.playground import PlaygroundFacts, PlaygroundModel
from dgemma.server.several_models import SeveralModels
from dgemma.sudoku.tokens import VOCABULARY
from server.fake_engine import FakeEngine, FakeText
from server.served import CHAT, HELLO, app_of, ask, client_of, error_of, run

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
FACTS = PlaygroundFacts(
    models=(PlaygroundModel(base="", name="dgemma", modes=("chat",), traces=False, canvas_len=8),)
)


def policy_of(response: httpx2.Response) -> dict[str, str]:
    parts = response.headers["content-security-policy"].split("; ")
    return {name: rest for name, _, rest in (part.partition(" ") for part in parts)}


def test_a_browser_gets_the_page_under_a_policy_without_inline_script_or_style() -> None:
    response = ask(app_of(), "GET", "/", headers=BROWSER)
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert "Accept" in response.headers["vary"]
    policy = policy_of(response)
    assert policy["default-src"] == "'none'"
    for name in ("script-src", "style-src", "connect-src", "img-src"):
        assert policy[name] == "'self'"
    assert not re.search(r"unsafe|http:|https:|data:|blob:|\*", response.headers["content-security-policy"])
    assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]* src=\"/playground/)", response.text)


def test_the_page_names_only_files_that_are_there_and_no_other_host() -> None:
    page = ask(app_of(), "GET", "/", headers=BROWSER).text
    named = set(re.findall(r'(?:src|href)="([^"]+)"', page))
    assert {name for name in named if name.startswith("/playground/")} == set(web_files()) - {"/"}
    assert not re.search(r"https?://", page)


@pytest.mark.parametrize("accept", [{}, {"accept": "application/json"}, {"accept": "*/*"}])
def test_programs_get_the_json_of_before(accept: dict[str, str]) -> None:
    told = ask(app_of(), "GET", "/", headers=accept).json()
    assert told == ask(app_of(playground=False), "GET", "/", headers=accept).json()
    assert (told["name"], told["version"]) == ("dgemma", __version__)


def test_without_the_playground_there_is_neither_page_nor_file() -> None:
    app = app_of(playground=False)
    assert "<script" not in ask(app, "GET", "/", headers=BROWSER).text
    for path in ("/playground.json", *(set(web_files()) - {"/"})):
        assert ask(app, "GET", path).status_code == 404, path


@pytest.mark.parametrize("path", sorted(set(web_files()) - {"/"}))
def test_files_have_their_type_and_are_kept_for_ever(path: str) -> None:
    types = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "svg": "image/svg+xml"}
    response = ask(app_of(), "GET", path, headers={"accept-encoding": "identity"})
    assert response.content == web_files()[path].content
    assert response.headers["content-type"] == types[path.rpartition(".")[2]]
    assert "immutable" in response.headers["cache-control"]
    assert response.headers["x-content-type-options"] == "nosniff"
    packed = ask(app_of(), "GET", path, headers={"accept-encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.content == response.content
    again = ask(app_of(), "GET", path, headers={"if-none-match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    ("accepted", "takes"),
    [("", False), ("gzip", True), ("br, GZIP;q=0.5", True), ("gzip;q=0", False), ("gzip; q=0.0", False)],
)
def test_gzip_is_for_those_who_take_it(accepted: str, takes: bool) -> None:
    assert takes_gzip(accepted) is takes


@pytest.mark.parametrize(
    "name",
    [
        "", "../index.html", "..%2findex.html", "%2e%2e/index.html", "..%5c..%5cgolden", "index.html",
        "/etc/passwd", "%2fetc%2fpasswd", "icon.svg%00.js", "icon.svg/", "ICON.SVG", "trace.js",
    ],
)  # fmt: skip
def test_no_other_file_can_be_reached(name: str) -> None:
    assert ask(app_of(), "GET", FILES_PATH + name).status_code == 404


def test_the_whole_page_is_small() -> None:
    assert sum(len(file.packed) for file in web_files().values()) < 80_000


def test_no_source_of_the_page_makes_html_of_text() -> None:
    for path, file in web_files().items():
        if path.endswith(".js"):
            assert b"insertAdjacentHTML" not in file.content
            assert b"document.write" not in file.content


def test_where_keys_are_needed_the_page_is_open_and_says_nothing_of_the_server() -> None:
    keyed = create_app(
        Settings(api_keys=("k",), served_model_name="secret-model"), FakeEngine(), FakeText(), FACTS
    )
    page = ask(keyed, "GET", "/", headers=BROWSER)
    assert page.status_code == 200
    assert page.content == web_files()["/"].content
    for path in set(web_files()) - {"/"}:
        assert ask(keyed, "GET", path).status_code == 200
        assert b"secret-model" not in web_files()[path].content
    for path in ("/playground.json", "/playground/", "/playground/x", "/playground", "/v1/models"):
        assert ask(keyed, "GET", path).status_code == 401, path
    told = ask(keyed, "GET", "/playground.json", headers={"authorization": "Bearer k"})
    assert told.json()["models"][0]["name"] == "dgemma"


def test_the_page_is_told_the_models_and_what_they_can_be_asked() -> None:
    app = create_app(Settings(), FakeEngine(), FakeText(), FACTS)
    response = ask(app, "GET", "/playground.json")
    assert response.headers["cache-control"] == "no-store"
    assert response.json() == {
        "version": __version__,
        "models": [
            {"base": "", "name": "dgemma", "modes": ["chat"], "traces": False, "canvas_len": 8, "note": ""}
        ],
        "record_types": {},
        "trained_on_record_types": False,
        "puzzles": [],
    }


class SudokuText(FakeText):
    has_chat_template = False

    def token_text(self, token: int) -> Any:
        from dgemma.server.text import TokenText

        return TokenText(text=VOCABULARY[token], raw=None)


class ChatText(FakeText):
    has_chat_template = True


def facts_of(model: str, vocab_size: int, text: Any, **settings: Any) -> PlaygroundFacts:
    served = ServedModel(max_positions=512, canvas_len=91, vocab_size=vocab_size)
    return playground_facts(model, Settings(**settings), served, text)


def test_sudoku_is_offered_by_a_model_of_its_vocabulary_alone() -> None:
    sudoku = facts_of("bundled:sudoku", len(VOCABULARY), SudokuText(), traces=True)
    assert sudoku.models[0].modes == ("sudoku", "canvas", "race")
    assert sudoku.models[0].traces
    assert {puzzle["band"] for puzzle in sudoku.puzzles} == {"easy", "medium", "hard"}
    other = facts_of("bundled:text", 6144, ChatText())
    assert "sudoku" not in other.models[0].modes
    assert "chat" in other.models[0].modes
    assert other.puzzles == ()


def test_the_record_types_are_those_of_the_checkpoint() -> None:
    assert facts_of("bundled:forms", 6144, ChatText()).trained_on_record_types
    other = facts_of("bundled:text", 6144, ChatText())
    assert not other.trained_on_record_types
    assert "appointment" in other.record_types


# Several models


def several(**loads: Any) -> SeveralModels:
    made = {f"/{name}": load for name, load in loads.items()}
    return SeveralModels(Settings(traces=True), made, bundled_facts(BUNDLED))


def one(name: str) -> RequestMiddleware:
    return app_of(served_model_name=name, playground=False)


def asked(app: SeveralModels, method: str, path: str, **options: Any) -> httpx2.Response:
    async def sent() -> httpx2.Response:
        async with client_of(app) as client:  # type: ignore[arg-type]
            return await client.request(method, path, **options)

    return run(sent())


def test_each_base_is_a_server_of_its_own_model() -> None:
    app = several(text=lambda: one("text"), sudoku=lambda: one("sudoku"))
    for name in ("text", "sudoku"):
        assert asked(app, "GET", f"/{name}/v1/models").json()["data"][0]["id"] == name
        answer = asked(app, "POST", f"/{name}{CHAT}", json={**HELLO, "model": name})
        assert answer.status_code == 200
    wrong = asked(app, "POST", f"/text{CHAT}", json={**HELLO, "model": "sudoku"})
    assert wrong.status_code == 404
    for path in ("/v1/models", "/text", "/texts/v1/models", "/other/v1/models", "/text/playground.json"):
        assert asked(app, "GET", path).status_code == 404, path
    assert asked(app, "POST", "/", json={}).status_code == 405


def test_the_page_is_there_before_any_model_is_loaded() -> None:
    def fails() -> RequestMiddleware:
        raise AssertionError("nobody asked for it")

    app = several(text=fails)
    page = asked(app, "GET", "/")
    assert page.content == web_files()["/"].content
    assert page.headers["content-security-policy"] == PAGE_HEADERS["content-security-policy"]
    told = asked(app, "GET", "/playground.json").json()
    assert [model["base"] for model in told["models"]] == ["/text", "/sudoku", "/forms"]
    assert set().union(*(model["modes"] for model in told["models"])) == {
        "chat", "fill", "edit", "decide", "forms", "sudoku", "canvas", "race",
    }  # fmt: skip
    assert asked(app, "GET", "/health").json() == {"status": "ok"}


def test_a_model_is_loaded_once_however_many_ask_at_once() -> None:
    loads = []

    def load() -> RequestMiddleware:
        loads.append(1)
        return one("text")

    app = several(text=load)

    async def many() -> None:
        async with client_of(app) as client:  # type: ignore[arg-type]
            app.load_all()
            answers = await asyncio.gather(*(client.get("/text/v1/models") for _ in range(5)))
            assert [answer.status_code for answer in answers] == [200] * 5

    run(many())
    assert loads == [1]


def test_a_model_that_cannot_be_loaded_is_named_and_the_others_work() -> None:
    def broken() -> RequestMiddleware:
        raise CheckpointError("the weights are gone.")

    app = several(text=broken, forms=lambda: one("forms"))
    response = asked(app, "GET", "/text/v1/models")
    assert (response.status_code, error_of(response)["code"]) == (503, "not_loaded")
    assert "the weights are gone" in error_of(response)["message"]
    assert asked(app, "GET", "/forms/v1/models").status_code == 200


def test_another_host_s_name_is_refused_for_the_page_too() -> None:
    app = several(text=lambda: one("text"))
    for path in ("/", "/playground.json", "/text/v1/models"):
        response = asked(app, "GET", path, headers={"host": "evil.example"})
        assert (response.status_code, error_of(response)["code"]) == (421, "wrong_host")


def test_draining_ends_all_models() -> None:
    app = several(text=lambda: one("text"))

    async def drained() -> None:
        async with client_of(app) as client:  # type: ignore[arg-type]
            await client.get("/text/v1/models")
            assert app.state.num_active == 0
            assert app.state.failure is None
            assert await app.state.drain()
            refused = await client.post(f"/text{CHAT}", json={**HELLO, "model": "text"})
            assert refused.status_code == 503
            assert (await client.get("/health")).status_code == 503

    run(drained())


def test_no_text_browser_takes_over_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert not has_display()
    monkeypatch.setenv("DISPLAY", ":0")
    assert has_display()


def test_packing_is_the_same_every_time() -> None:
    for file in web_files().values():
        assert gzip.decompress(file.packed) == file.content
        assert file.packed == gzip.compress(file.content, mtime=0)
    assert json.loads(bundled_facts(BUNDLED).to_json())["models"]
