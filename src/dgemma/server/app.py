"""The application: the routes of all endpoint families, wrapped in the request middleware."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route

from dgemma import __version__
from dgemma.engine.service import EngineService
from dgemma.errors import DgemmaError
from dgemma.server.chat.router import CHAT_COMPLETIONS
from dgemma.server.completions.router import COMPLETIONS, FIM_COMPLETIONS
from dgemma.server.decisions.router import DECISIONS, SYSTEM_ONE
from dgemma.server.edit.router import EDIT_COMPLETIONS
from dgemma.server.http import health, models, openapi
from dgemma.server.http.docs_page import DOCS_PATH, render_docs, with_address
from dgemma.server.http.errors import ApiError, error_response
from dgemma.server.http.html_page import html_response
from dgemma.server.http.log import note_error, record_of
from dgemma.server.http.metrics import CONTENT_TYPE
from dgemma.server.http.middleware import RequestMiddleware
from dgemma.server.http.response import ComputedResponse, GeneratedResponse
from dgemma.server.http.root import OPENAPI_PATH, ROOT_PATH, show_root
from dgemma.server.http.settings import Settings
from dgemma.server.http.web_files import FILES_PATH, file_response, web_files
from dgemma.server.infill.router import INFILL
from dgemma.server.messages.router import COUNT_TOKENS, MESSAGES
from dgemma.server.pipeline import Endpoint, TextEndpoint
from dgemma.server.playground import FACTS_PATH, PlaygroundFacts, facts_response
from dgemma.server.protocol import ResponseModel
from dgemma.server.responses import kept
from dgemma.server.responses.protocol import ResponseObject
from dgemma.server.responses.router import RESPONSE_INPUT_TOKENS, RESPONSES
from dgemma.server.state import ServerState
from dgemma.server.text import TextService
from dgemma.server.tokenize.router import DETOKENIZE, TOKENIZE

ENDPOINTS: tuple[Endpoint | TextEndpoint, ...] = (
    CHAT_COMPLETIONS,
    RESPONSES,
    RESPONSE_INPUT_TOKENS,
    MESSAGES,
    COUNT_TOKENS,
    COMPLETIONS,
    FIM_COMPLETIONS,
    INFILL,
    EDIT_COMPLETIONS,
    DECISIONS,
    SYSTEM_ONE,
    TOKENIZE,
    DETOKENIZE,
)
_OTHER_PATHS = (
    models.MODELS_PATH, health.HEALTH_PATH, health.READY_PATH, health.METRICS_PATH, OPENAPI_PATH, DOCS_PATH,
    ROOT_PATH, FACTS_PATH,
)  # fmt: skip


def create_app(
    settings: Settings, engine: EngineService, text: TextService, facts: PlaygroundFacts | None = None
) -> RequestMiddleware:
    """An ASGI application that serves one engine. facts: for the playground; None: it has no modes."""
    state = ServerState(settings=settings, engine=engine, text=text)
    app = FastAPI(
        title="dgemma",
        version=__version__,
        openapi_url=OPENAPI_PATH,
        # FastAPI's own pages are off: they would load their scripts from other hosts.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # Its own telemetry is off: it records messages of errors, which may quote a prompt.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    for endpoint in ENDPOINTS:
        _add_endpoint(app, state, endpoint)
    _add_get_routes(app, state)
    _add_kept_responses(app, state)
    _add_pages(app, state)
    if settings.playground:
        _add_playground(app, facts or PlaygroundFacts(models=()))
    for kind in (DgemmaError, Exception):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(HTTPException, _on_routing_error)
    app.openapi = lambda: _schema(app, state)  # type: ignore[method-assign]
    paths = (*(endpoint.path for endpoint in ENDPOINTS), *_OTHER_PATHS)
    return RequestMiddleware(app, state, paths)


def _add_endpoint(app: FastAPI, state: ServerState, endpoint: Endpoint | TextEndpoint) -> None:
    @app.post(
        endpoint.path,
        summary=endpoint.summary,
        operation_id=endpoint.path.strip("/").replace("/", "_"),
        response_class=Response,
        responses=openapi.endpoint_responses(endpoint),
        openapi_extra=openapi.request_body(endpoint, state.settings.served_model_name),
    )
    async def answer() -> Response:
        if isinstance(endpoint, TextEndpoint):
            return ComputedResponse(state, endpoint)
        return GeneratedResponse(state, endpoint)


def _add_get_routes(app: FastAPI, state: ServerState) -> None:
    get = partial(app.get, response_class=Response)

    @get(
        models.MODELS_PATH,
        summary="The served models",
        responses=openapi.whole(models.ModelList, 401, 500),
    )
    async def list_models() -> Response:
        return _json_response(models.list_models(state))

    @get(
        models.MODELS_PATH + "/{model:path}",
        summary="One model",
        responses=openapi.whole(models.ModelCard, 401, 404, 500),
    )
    async def show_model(model: str) -> Response:
        return _json_response(models.show_model(state, model))

    @get(
        health.HEALTH_PATH,
        summary="Whether the server is alive",
        responses=openapi.whole(health.StatusResponse, 503),
    )
    async def is_healthy() -> Response:
        return _json_response(health.health(state))

    @get(
        health.READY_PATH,
        summary="Whether it admits requests",
        responses=openapi.whole(health.StatusResponse, 503),
    )
    async def is_ready() -> Response:
        return _json_response(health.ready(state))

    @get(health.METRICS_PATH, summary="Prometheus metrics", responses=openapi.metrics_response())
    async def metrics() -> Response:
        return Response(await health.metrics(state), headers={"content-type": CONTENT_TYPE})


def _add_kept_responses(app: FastAPI, state: ServerState) -> None:
    @app.get(
        kept.RESPONSE_PATH,
        summary="A kept response",
        response_class=Response,
        responses=openapi.whole(ResponseObject, 400, 401, 404, 500),
    )
    async def show_response(request: Request, response_id: str) -> Response:
        return kept.show_response(state, request, response_id)

    @app.delete(
        kept.RESPONSE_PATH,
        summary="Forget a kept response",
        response_class=Response,
        responses=openapi.whole(kept.DeletedResponse, 401, 404, 500),
    )
    async def delete_response(request: Request, response_id: str) -> Response:
        return kept.delete_response(state, request, response_id)

    @app.get(
        kept.INPUT_ITEMS_PATH,
        summary="The items that a kept response answered",
        response_class=Response,
        responses=openapi.whole(kept.InputItemList, 400, 401, 404, 500),
        openapi_extra={"parameters": kept.LIST_PARAMETERS},
    )
    async def list_input_items(request: Request, response_id: str) -> Response:
        return kept.list_input_items(state, request, response_id)


def _add_pages(app: FastAPI, state: ServerState) -> None:
    """For people; the description is for programs and does not list them."""

    @cache
    def rendered() -> str:
        return render_docs(app.openapi())

    @app.get(DOCS_PATH, include_in_schema=False)
    async def docs(request: Request) -> Response:
        host = request.headers.get("host", "")
        return html_response(with_address(rendered(), request.url.scheme, host))

    @app.get(ROOT_PATH, include_in_schema=False)
    async def root(request: Request) -> Response:
        return show_root(state, request)


def _add_playground(app: FastAPI, facts: PlaygroundFacts) -> None:
    """The page itself is the root's. The facts name the model, and so need a key where keys are needed."""

    @app.get(FACTS_PATH, include_in_schema=False)
    async def tell() -> Response:
        return facts_response(facts)

    @app.get(FILES_PATH + "{name}", include_in_schema=False)
    async def send_file(request: Request, name: str) -> Response:
        if FILES_PATH + name not in web_files():
            raise HTTPException(404)
        return file_response(request, FILES_PATH + name)


def _schema(app: FastAPI, state: ServerState) -> dict[str, Any]:
    if app.openapi_schema is None:
        routes = get_openapi(title=app.title, version=app.version, routes=app.routes)
        app.openapi_schema = openapi.complete(routes, state, ENDPOINTS)
    return app.openapi_schema


def _json_response(response: ResponseModel) -> Response:
    return Response(response.to_json(), media_type="application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    record = record_of(request.scope)
    return error_response(note_error(error, record), record.path, record.id)


async def _on_routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message, code = str(error.detail), None
    if error.status_code == 404:
        message, code = "there is nothing at this address; /openapi.json lists what there is.", "not_found"
    elif error.status_code == 405:
        message, code = "this address does not take this method; Allow names those it does.", "wrong_method"
        methods = sorted(_methods_of(request))
        error.headers = {**(error.headers or {}), "Allow": ", ".join(methods)}
    api_error = ApiError(message, status=error.status_code, code=code, headers=error.headers)
    return await _on_error(request, api_error)


def _methods_of(request: Request) -> set[str]:
    """The methods of all routes of an address; each of them alone knows only its own."""
    routes = [
        route
        for route in request.app.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
    ]
    # /v1/responses/input_tokens is not the response of that id.
    named = [route for route in routes if route.path == request.url.path]
    return {method for route in named or routes for method in route.methods or ()}
