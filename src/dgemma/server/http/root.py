"""GET /: what this server is, for browsers as a page and for programs as JSON."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from dgemma import __version__
from dgemma.server.http.docs_page import DOCS_PATH
from dgemma.server.http.health import HEALTH_PATH, health
from dgemma.server.http.html_page import escaped, html_response, whole_page
from dgemma.server.http.log import record_of
from dgemma.server.http.models import MODELS_PATH
from dgemma.server.http.web_files import file_response
from dgemma.server.protocol import ResponseModel
from dgemma.server.state import ServerState

ROOT_PATH = "/"
OPENAPI_PATH = "/openapi.json"
_LINKS = {"docs": DOCS_PATH, "openapi": OPENAPI_PATH, "health": HEALTH_PATH, "models": MODELS_PATH}
_VARY = {"vary": "Accept, Authorization"}


class ServerInfo(ResponseModel):
    """Without a key, where keys are needed: only the status, as /health."""

    status: str
    name: str | None = None
    version: str | None = None
    model: str | None = None
    links: dict[str, str] | None = None


def show_root(state: ServerState, request: Request) -> Response:
    """What this is. A client without a key learns what /health says, where keys are needed."""
    info = _describe(state, is_known=not state.settings.has_keys or bool(record_of(request.scope).key.name))
    if prefers_html(request.headers.get("accept", "")):
        if state.settings.playground:
            return file_response(request, ROOT_PATH, vary="Accept, Accept-Encoding, Authorization")
        return html_response(_page(info), **_VARY)
    return Response(info.to_json(), media_type="application/json", headers=_VARY)


def _describe(state: ServerState, *, is_known: bool) -> ServerInfo:
    status = health(state).status
    if not is_known:
        return ServerInfo(status=status)
    model = state.settings.served_model_name
    return ServerInfo(status=status, name="dgemma", version=__version__, model=model, links=_LINKS)


def _page(info: ServerInfo) -> str:
    if info.name is None:
        return whole_page(
            "Server",
            f"<main>\n<h1>Server</h1>\n<p>Status: {escaped(info.status)}. An API key is needed: "
            "<code>Authorization: Bearer KEY</code>.</p>\n</main>",
        )
    rows = "".join(
        f'<li><a href="{escaped(path)}">{escaped(path)}</a></li>\n' for path in (info.links or {}).values()
    )
    return whole_page(
        info.name,
        f"<main>\n<h1>{escaped(info.name)} {escaped(info.version)}</h1>\n"
        "<p>A server of a block-diffusion language model. OpenAI's clients work unchanged, with the base URL "
        "<code>/v1</code>; it also fills gaps, edits in place and decides.</p>\n"
        f"<p>This server answers as <code>{escaped(info.model)}</code>. Status: {escaped(info.status)}.</p>\n"
        f"<ul>\n{rows}</ul>\n</main>",
    )


def prefers_html(accept: str) -> bool:
    """Whether an Accept header names HTML, and JSON not as much. Programs that take anything get JSON."""
    weights = {"text/html": 0.0, "application/json": 0.0}
    for part in accept.split(","):
        kind, *parameters = (word.strip().lower() for word in part.split(";"))
        if kind in weights:
            weights[kind] = max(weights[kind], _weight(parameters))
    return weights["text/html"] > weights["application/json"]


def _weight(parameters: list[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
