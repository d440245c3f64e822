"""The application: endpoints on a router, behind the front door."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.responses import Response

from dgemma import __version__
from dgemma.engine.service import EngineService
from dgemma.errors import DgemmaError
from dgemma.server import chat, completions, decisions, edit, fim, health, infill, models, openapi
from dgemma.server.api_error import ApiError, error_response
from dgemma.server.asked import Form
from dgemma.server.front_door import FrontDoor
from dgemma.server.generating import GeneratedResponse
from dgemma.server.metrics import CONTENT_TYPE
from dgemma.server.record import note_error, record_of
from dgemma.server.replies import Reply
from dgemma.server.settings import Settings
from dgemma.server.state import ServerState
from dgemma.server.text import TextService


def create_app(settings: Settings, engine: EngineService, text: TextService) -> FrontDoor:
    """An ASGI application that serves one engine."""
    state = ServerState(settings=settings, engine=engine, text=text)
    # The pages for browsers would load their scripts from elsewhere.
    app = FastAPI(title="dgemma", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_generating(app, state)
    _add_reading(app, state)
    for kind in (DgemmaError, Exception):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(HTTPException, _on_routing_error)
    app.openapi = lambda: _schema(app, state)  # type: ignore[method-assign]
    return FrontDoor(app, state)


def _add_generating(app: FastAPI, state: ServerState) -> None:
    generated, whole = openapi.generated, openapi.whole
    add = partial(_add_form, app, state)
    add(
        chat.PATH,
        chat.CHAT,
        "Answer a conversation",
        ["ChatRequest"],
        generated("ChatCompletion", "ChatChunk"),
    )
    completed = generated("Completion", "Completion")
    add(completions.PATH, completions.COMPLETIONS, "Continue a text", ["CompletionRequest"], completed)
    add(fim.PATH, fim.FIM, "Fill a gap, as Mercury does", ["FimRequest"], completed)
    infilled = generated("Infill", "InfillChunk", "InfillParts", ends="a chunk whose stop is true")
    add(infill.PATH, infill.INFILL, "Fill a gap, as llama.cpp does", ["InfillRequest"], infilled)
    add(edit.PATH, edit.EDIT, "Rewrite a region", ["EditRequest"], whole("EditCompletion"))
    both = ["DecisionRequest", "StateRequest"]
    decided, named = whole("Decision", "NamedDecision"), whole("NamedDecision")
    add(decisions.PATH, decisions.DECISIONS, "Answer questions with probabilities", both, decided)
    add(decisions.SYSTEM_ONE_PATH, decisions.SYSTEM_ONE, "The same of a state", ["StateRequest"], named)


def _add_form(
    app: FastAPI,
    state: ServerState,
    path: str,
    form: Form,
    summary: str,
    requests: list[str],
    responses: Mapping[int | str, dict[str, Any]],
) -> None:
    @app.post(
        path,
        summary=summary,
        operation_id=path.strip("/").replace("/", "_"),
        response_class=Response,
        responses=dict(responses),
        openapi_extra=openapi.request_body(*requests),
    )
    async def answered() -> Response:
        return GeneratedResponse(state, form)


def _add_reading(app: FastAPI, state: ServerState) -> None:
    get = partial(app.get, response_class=Response)

    @get(models.PATH, summary="What is served", responses=openapi.reply("ModelList", 401, 500))
    async def list_models() -> Response:
        return _reply(models.list_models(state))

    @get(
        models.PATH + "/{model:path}",
        summary="One model",
        responses=openapi.reply("Model", 401, 404, 500),
    )
    async def one_model(model: str) -> Response:
        return _reply(models.one_model(state, model))

    @get(health.HEALTH_PATH, summary="Is it alive?", responses=openapi.reply("Status", 503))
    async def is_healthy() -> Response:
        return _reply(health.health(state))

    @get(health.READY_PATH, summary="Does it take requests?", responses=openapi.reply("Status", 503))
    async def is_ready() -> Response:
        return _reply(health.ready(state))

    @get(health.METRICS_PATH, summary="Numbers for Prometheus", responses=openapi.metrics_reply())
    async def metrics() -> Response:
        return Response(health.metrics(state), headers={"content-type": CONTENT_TYPE})


def _schema(app: FastAPI, state: ServerState) -> dict[str, Any]:
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, routes=app.routes)
        app.openapi_schema = openapi.complete(found, state)
    return app.openapi_schema


def _reply(reply: Reply) -> Response:
    return Response(reply.to_json(), media_type="application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(note_error(error, record_of(request.scope)))


async def _on_routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message, code = str(error.detail), None
    if error.status_code == 404:
        message, code = "there is nothing at this address; /openapi.json lists what there is.", "not_found"
    elif error.status_code == 405:
        message, code = "this address does not take this method; Allow names those it does.", "wrong_method"
    told = ApiError(message, status=error.status_code, code=code, headers=error.headers)
    return await _on_error(request, told)
