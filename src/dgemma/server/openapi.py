"""The description that clients and testing tools read: the same models and tables that the server uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from dgemma.server.chat_request import ChatRequest
from dgemma.server.completion_request import CompletionRequest
from dgemma.server.decision_request import DecisionRequest
from dgemma.server.edit_request import EditRequest
from dgemma.server.fields import (
    UNSUPPORTED_IN_CHAT,
    UNSUPPORTED_IN_COMPLETIONS,
    UNSUPPORTED_IN_DECISIONS,
    UNSUPPORTED_IN_EDIT,
    UNSUPPORTED_IN_FIM,
    UNSUPPORTED_IN_INFILL,
    Unsupported,
)
from dgemma.server.fim_request import FimRequest
from dgemma.server.infill_request import InfillRequest
from dgemma.server.keys import OPEN_PATHS
from dgemma.server.metrics import CONTENT_TYPE
from dgemma.server.replies import REPLIES
from dgemma.server.request_fields import CommonFields
from dgemma.server.state import ServerState
from dgemma.server.state_request import StateRequest
from dgemma.server.work_replies import WORK_REPLIES

Json = dict[str, Any]
REQUESTS: dict[type[CommonFields], Mapping[str, Unsupported]] = {
    ChatRequest: UNSUPPORTED_IN_CHAT,
    CompletionRequest: UNSUPPORTED_IN_COMPLETIONS,
    FimRequest: UNSUPPORTED_IN_FIM,
    InfillRequest: UNSUPPORTED_IN_INFILL,
    EditRequest: UNSUPPORTED_IN_EDIT,
    DecisionRequest: UNSUPPORTED_IN_DECISIONS,
    StateRequest: UNSUPPORTED_IN_DECISIONS,
}
_REF = "#/components/schemas/{model}"
_MEANING = {
    400: "The request is malformed, or asks for what cannot be honoured; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "The model is not served here.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON in UTF-8.",
    429: "Too many requests; Retry-After says when to ask again.",
    500: "An error inside the server.",
    503: "The server is shutting down; Retry-After says when to ask again.",
    504: "The engine did not end in time.",
}
GENERATING_ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)


def ref(name: str) -> Json:
    return {"$ref": _REF.format(model=name)}


def errors(*statuses: int) -> dict[int | str, Json]:
    return {status: _response(_MEANING[status], "ErrorReply") for status in statuses}


def reply(name: str, *more_errors: int) -> dict[int | str, Json]:
    return {200: _response("As asked.", name), **errors(*more_errors)}


def generated(name: str, chunk: str, *others: str, ends: str = "[DONE]") -> dict[int | str, Json]:
    answer = _response(f"The answer; with `stream` as server-sent events, ended by {ends}.", name, *others)
    # As FastAPI and OpenAPI 3.2 describe streams: event by event.
    told = f"A {chunk} or an ErrorReply as JSON" + (", or [DONE]." if ends == "[DONE]" else ".")
    data = {"type": "string", "description": told}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    answer["content"]["text/event-stream"] = {"itemSchema": event}
    return {200: answer, **errors(*GENERATING_ERRORS)}


def whole(*names: str) -> dict[int | str, Json]:
    return {200: _response("The answer.", *names), **errors(*GENERATING_ERRORS)}


def metrics_reply() -> dict[int | str, Json]:
    content = {CONTENT_TYPE: {"schema": {"type": "string"}}}
    return {200: {"description": "Prometheus' text form.", "content": content}, **errors(401, 500)}


def request_body(*names: str) -> Json:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _one_of(names)}}}}


def complete(schema: Json, state: ServerState) -> Json:
    """Add our components to what the router says of itself, and take away what is not true of it."""
    has_keys = bool(state.settings.api_keys)
    kinds = [(kind, "validation") for kind in (*REQUESTS, *REPLIES, *WORK_REPLIES)]
    _, definitions = models_json_schema(kinds, ref_template=_REF)  # type: ignore[arg-type]
    schemas: Json = definitions["$defs"]
    for kind, unsupported in REQUESTS.items():
        properties = schemas[kind.__name__]["properties"]
        _narrow(properties, state)
        properties |= _unsupported_fields(unsupported)
    components: Json = {"schemas": schemas}
    if has_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}]
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # the router's own form of a refusal, never used here
            if not has_keys:
                operation["responses"].pop("401", None)
            elif path in OPEN_PATHS:
                operation["security"] = []
    schema["components"] = components
    return schema


def _narrow(properties: Json, state: ServerState) -> None:
    """The limits of this server, where they are narrower than those of the request's model."""
    served, settings = state.engine.model, state.settings
    names = [settings.served_model_name, *served.adapters]
    properties["model"] = {"type": "string", "enum": names}
    if "input_prefix" in properties:  # plugins of editors name no model
        properties["model"] = {"enum": [*names, "", None]}
    properties["extra_body"] = {
        "anyOf": [{"type": "object"}, {"type": "null"}],
        "description": "More fields, as Mercury's client sends them.",
    }
    limits = {
        "n": settings.max_choices,
        "max_tokens": served.room_behind(1),
        "max_completion_tokens": served.room_behind(1),
        "deadline_s": settings.request_timeout_s,
    }
    for name, most in limits.items():
        if name in properties:
            properties[name]["anyOf"][0]["maximum"] = most
    if "logit_bias" in properties:
        properties["logit_bias"]["anyOf"][0]["propertyNames"] = {"pattern": "^(0|[1-9][0-9]{0,8})$"}
    if "end_tokens" in properties:
        properties["end_tokens"]["anyOf"][0]["items"]["maximum"] = served.vocab_size - 1


def _unsupported_fields(unsupported: Mapping[str, Unsupported]) -> Json:
    return {
        name: {"enum": [*rule.usual, None], "description": f"Not supported beyond the usual: {rule.why}."}
        for name, rule in unsupported.items()
    }


def _response(description: str, *names: str) -> Json:
    return {"description": description, "content": {"application/json": {"schema": _one_of(names)}}}


def _one_of(names: Sequence[str]) -> Json:
    return ref(names[0]) if len(names) == 1 else {"anyOf": [ref(name) for name in names]}
