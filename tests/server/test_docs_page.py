"""/docs shows the whole description, its examples work, and it needs nothing but itself."""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import re
import shlex
from html.parser import HTMLParser
from typing import Any

import httpx2
import pytest

from dgemma.server.http.docs_page import render_docs, with_address
from server.canvas_bodies import DECISIONS, INFILL
from server.fake_engine import FakeEngine
from server.served import CHAT, app_of, ask, on_a_port

VOID = ("meta", "link", "br", "hr", "img", "input")
KEY = {"authorization": "Bearer k"}


class Page(HTMLParser):
    """What a browser finds: elements in order and their texts. One that is not closed is an error."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []  # (innermost element, text)
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open[-1] if self._open else "", data))

    def all(self, tag: str) -> list[str]:
        return [text for inner, text in self.texts if inner == tag]


def docs_of(app: Any = None, **options: Any) -> httpx2.Response:
    response = ask(app or app_of(), "GET", "/docs", **options)
    assert response.status_code == 200
    return response


def commands_of(page: str) -> list[str]:
    parsed = Page(page)
    return [text for text in parsed.all("code") if text.startswith("curl ")]


def test_the_page_loads_nothing_and_runs_nothing_and_its_policy_says_so() -> None:
    response = docs_of()
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    page = Page(response.text)
    loading = {"script", "link", "img", "iframe", "object", "embed", "base", "form", "svg"}
    assert loading.isdisjoint(tag for tag, _ in page.elements)
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name in ("style", "src")]
        assert re.fullmatch(r"#[\w-]+|/[\w./]*|", attributes.get("href") or "")
    assert "@import" not in response.text
    assert "url(" not in response.text

    (style,) = page.all("style")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = response.headers["content-security-policy"].split("; ")
    assert dict(part.split(" ", 1) for part in policy) == {
        "default-src": "'none'",
        "style-src": f"'sha256-{digest}'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert response.headers["x-content-type-options"] == "nosniff"


def test_the_page_is_for_light_and_dark_and_narrow_windows() -> None:
    page = Page(docs_of().text)
    (style,) = page.all("style")
    assert "prefers-color-scheme:dark" in style
    assert "color-scheme:light dark" in style
    assert "overflow-wrap:anywhere" in style
    assert not re.search(r"[^-]width:\d+px", style)
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.elements
    assert ("html", {"lang": "en"}) in page.elements


def test_headings_are_in_order_and_links_lead_somewhere() -> None:
    page = Page(docs_of().text)
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(below <= above + 1 for above, below in itertools.pairwise(levels))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    inner = {attributes["href"] for tag, attributes in page.elements if tag == "a"}
    assert {link[1:] for link in inner if link and link.startswith("#")} <= set(ids)


def test_every_endpoint_has_its_summary_fields_and_answers() -> None:
    app = app_of(FakeEngine(adapters=("sums",)))
    described = ask(app, "GET", "/openapi.json").json()
    sections = docs_of(app).text.split("<section ")
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            head = f"<h2><code>{method.upper()} {path}</code></h2>"
            (section,) = [section for section in sections if head in section]
            assert f"<p>{operation['summary']}</p>" in section
            for status in operation["responses"]:
                assert f"<dt><code>{status}</code>" in section
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            kinds = body.get("schema", {}).get("anyOf", [body.get("schema", {})])
            for name in [kind["$ref"].rpartition("/")[2] for kind in kinds if kind]:
                for field in described["components"]["schemas"][name]["properties"]:
                    assert f"<dt><code>{field}</code>" in section, (path, field)


@pytest.mark.parametrize(
    ("path", "field", "line"),
    [
        (CHAT, "model", '"dgemma" · required'),
        (CHAT, "temperature", "number (0 to 100) · optional"),
        (CHAT, "n", "integer (1 to 16) · optional"),
        (CHAT, "top_p", "number (above 0, at most 1) · optional"),
        (CHAT, "accept_per_step", "integer (at least 1) · optional"),
        (CHAT, "choice", "list of string (not empty) (1 to 10000 entries) · optional"),
        (CHAT, "stream_options", "StreamOptions · optional"),
        (CHAT, "diffusing", "boolean · optional"),
        (CHAT, "end_tokens", "list of integer (0 to 260) (at most 64 entries) · optional"),
        (INFILL, "model", '"dgemma" | "" · optional'),
        ("/tokenize", "prompt", "string · required"),
        ("/detokenize", "tokens", "list of integer (0 to 260) (at most 4096 entries) · required"),
    ],
)
def test_a_field_has_its_type_limits_and_whether_it_is_required(path: str, field: str, line: str) -> None:
    page = docs_of().text
    (section,) = [part for part in page.split("<section ") if f"<h2><code>POST {path}</code></h2>" in part]
    found = re.search(rf"<dt><code>{field}</code>(.*?)</dt><dd>(.*?)</dd>", section)
    assert found is not None
    assert html.unescape(re.sub(r"<[^>]+>", "", found[1])).strip() == line


def test_descriptions_and_defaults_are_shown() -> None:
    page = docs_of().text
    drafts = "<dd>With stream: also send drafts of the running canvas.</dd>"
    assert f'<dt><code>diffusing</code> <span class="facts">boolean · optional</span></dt>{drafts}' in page
    assert "integer · optional · default: <code>0</code>" in page
    assert "(<code>&lt;bos&gt;</code>)" in page


def test_every_example_is_answered() -> None:
    """Each curl line, read as a shell would, sent over a socket."""
    app = app_of(api_keys=("k",))
    with on_a_port(app) as address:
        page = httpx2.get(f"{address}/docs", headers=KEY, timeout=60).text
        described = httpx2.get(f"{address}/openapi.json", headers=KEY, timeout=60).json()
        commands = commands_of(page)
        assert len(commands) == sum(map(len, described["paths"].values()))
        asked = {"model": "dgemma", "input": "Hello"}
        for command in commands:
            kept = httpx2.post(f"{address}/v1/responses", json=asked, headers=KEY, timeout=60).json()["id"]
            command, method = command.replace("resp_0123", kept), "GET"
            if " -X DELETE" in command:
                command, method = command.replace(" -X DELETE", ""), "DELETE"
            words = shlex.split(command.replace("\\\n", " ").replace("$DGEMMA_API_KEY", "k"))
            url, options = words[1], list(zip(words[2::2], words[3::2], strict=True))
            assert url.startswith(f"{address}/")
            headers = dict(word.split(": ") for flag, word in options if flag == "-H")
            body = dict(options).get("-d")
            response = (
                httpx2.request(method, url, headers=headers, timeout=60)
                if body is None
                else httpx2.post(url, headers=headers, content=body.encode(), timeout=60)
            )
            assert response.status_code == 200, (command, response.text)
            assert ("authorization" in headers) == (not url.endswith(("/health", "/ready")))


def test_the_page_needs_the_key_that_the_description_needs() -> None:
    keyed = app_of(api_keys=("k",))
    assert ask(keyed, "GET", "/docs").status_code == ask(keyed, "GET", "/openapi.json").status_code == 401
    assert ask(keyed, "GET", "/docs", headers=KEY).status_code == 200
    assert "authorization" not in "".join(commands_of(docs_of().text))


HOSTILE = "</code><script>alert(1)</script>\"'&"


def test_all_texts_of_a_description_are_escaped() -> None:
    field = {"type": HOSTILE, "description": HOSTILE, "default": HOSTILE, "maximum": HOSTILE}
    body = {"schema": {"$ref": "#/x/" + "Kind"}, "example": {HOSTILE: HOSTILE}}
    schema = {
        "info": {"title": HOSTILE, "version": HOSTILE},
        "paths": {
            f"/{HOSTILE}": {
                "post": {
                    "summary": HOSTILE,
                    "parameters": [{"name": HOSTILE, "schema": {"enum": [HOSTILE]}, "example": HOSTILE}],
                    "requestBody": {"content": {"application/json": body}},
                    "responses": {HOSTILE: {"description": HOSTILE}},
                }
            }
        },
        "components": {
            "schemas": {
                "Kind": {
                    "description": HOSTILE,
                    "properties": {HOSTILE: field, "inner": {"type": "object", "properties": {HOSTILE: {}}}},
                }
            }
        },
    }
    page = render_docs(schema)
    assert "<script" not in page
    assert "script" not in [tag for tag, _ in Page(page).elements]
    assert json.dumps({HOSTILE: HOSTILE}) in shlex.split(commands_of(page)[0].replace("\\\n", " "))


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("models.example:81", "http://models.example:81/"),
        ("[::1]:8000", "http://[::1]:8000/"),
        ('"><script>alert(1)</script>', "http://127.0.0.1:8000/"),
        ("a b; rm -rf ~", "http://127.0.0.1:8000/"),
        ("", "http://127.0.0.1:8000/"),
    ],
)
def test_examples_have_the_address_that_was_asked_unless_it_is_none(host: str, shown: str) -> None:
    described = ask(app_of(), "GET", "/openapi.json").json()
    page = with_address(render_docs(described), "http", host)
    assert shown in page
    assert "<script" not in page
    assert "rm -rf" not in page
    assert "address.invalid" not in page


def test_one_page_serves_all_addresses() -> None:
    app = app_of(host="0.0.0.0")  # noqa: S104
    for host in ("one.example", "two.example:81"):
        assert f"curl http://{host}{DECISIONS} " in docs_of(app, headers={"host": host}).text
