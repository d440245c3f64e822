"""The OpenAPI description of the endpoints: the same models and tables that the server validates with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from dgemma.server.http.auth import OPEN_PATHS
from dgemma.server.http.health import StatusResponse
from dgemma.server.http.metrics import CONTENT_TYPE
from dgemma.server.http.models import ModelCard, ModelList
from dgemma.server.pipeline import DescribedEndpoint, TextEndpoint
from dgemma.server.protocol import ErrorResponse, RequestModel, ResponseModel
from dgemma.server.responses.kept import DeletedResponse, InputItemList
from dgemma.server.state import ServerState
from dgemma.server.validation import Unsupported

Json = dict[str, Any]
Responses = dict[int | str, Json]
_REF = "#/components/schemas/{model}"
_MEANING = {
    400: "The request is malformed, or asks for what cannot be honoured; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "The model is not served here.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON in UTF-8.",
    429: "Too many requests; Retry-After gives the time to retry.",
    500: "An error inside the server.",
    503: "The server is shutting down; Retry-After gives the time to retry.",
    504: "The engine did not end in time.",
}
_PATH_EXAMPLES = {"response_id": "resp_0123"}
TEXT_ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 503)
GENERATING_ERRORS = (*TEXT_ERRORS, 504)


def reference(name: str) -> Json:
    return {"$ref": _REF.format(model=name)}


def errors(*statuses: int, kind: type[ResponseModel] = ErrorResponse) -> Responses:
    return {status: _response(_MEANING[status], kind) for status in statuses}


def whole(kind: type[ResponseModel], *error_statuses: int) -> Responses:
    return {200: _response("The response.", kind), **errors(*error_statuses)}


def endpoint_responses(endpoint: DescribedEndpoint) -> Responses:
    statuses = TEXT_ERRORS if isinstance(endpoint, TextEndpoint) else GENERATING_ERRORS
    if endpoint.chunk is None:
        return {
            200: _response("The answer.", *endpoint.responses),
            **errors(*statuses, kind=endpoint.errors),
        }
    has_done = bool(endpoint.end_of_stream)
    answer = _response(
        f"The answer; with `stream` as server-sent events, ended by {endpoint.last_event}.",
        *endpoint.responses,
    )
    # As FastAPI and OpenAPI 3.2 describe streams: event by event.
    description = f"A {endpoint.chunk.__name__} or an {endpoint.errors.__name__} as JSON" + (
        ", or [DONE]." if has_done else "."
    )
    data = {"type": "string", "description": description}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    answer["content"]["text/event-stream"] = {"itemSchema": event}
    return {200: answer, **errors(*statuses, kind=endpoint.errors)}


def metrics_response() -> Responses:
    content = {CONTENT_TYPE: {"schema": {"type": "string"}}}
    return {200: {"description": "Prometheus' text format.", "content": content}, **errors(401, 500)}


def request_body(endpoint: DescribedEndpoint, model: str) -> Json:
    schema = _any_of([kind.__name__ for kind in endpoint.requests])
    needs_model = all(kind.model_fields["model"].is_required() for kind in endpoint.requests)
    example = {**({"model": model} if needs_model else {}), **endpoint.example}
    content = {"application/json": {"schema": schema, "example": example}}
    return {"requestBody": {"required": True, "content": content}}


def request_models(
    endpoints: Sequence[DescribedEndpoint],
) -> dict[type[RequestModel], Mapping[str, Unsupported]]:
    """Every request model with its unsupported fields."""
    return {kind: table for endpoint in endpoints for kind, table in endpoint.requests.items()}


def complete(schema: Json, state: ServerState, endpoints: Sequence[DescribedEndpoint]) -> Json:
    """Add the components to the routes' schema, and remove what does not apply to this server."""
    has_keys = state.settings.has_keys
    requests = request_models(endpoints)
    responses = {kind for endpoint in endpoints for kind in (*endpoint.responses, endpoint.chunk) if kind}
    responses |= {endpoint.errors for endpoint in endpoints}
    responses |= {DeletedResponse, InputItemList, ModelCard, ModelList, StatusResponse, ErrorResponse}
    ordered = (*requests, *sorted(responses, key=lambda kind: kind.__name__))
    kinds = [(kind, "validation") for kind in ordered]
    _, definitions = models_json_schema(kinds, ref_template=_REF)  # type: ignore[arg-type]
    schemas: Json = definitions["$defs"]
    for kind, unsupported in requests.items():
        properties = schemas[kind.__name__]["properties"]
        _narrow(properties, state, needs_model=kind.model_fields["model"].is_required())
        properties |= _unsupported_fields(unsupported)
    components: Json = {"schemas": schemas}
    if has_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}]
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's own validation error, never used here
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path":
                    parameter["example"] = _PATH_EXAMPLES.get(
                        parameter["name"], state.settings.served_model_name
                    )
            if not has_keys:
                operation["responses"].pop("401", None)
            elif path in OPEN_PATHS:
                operation["security"] = []
    schema["components"] = components
    return schema


def _narrow(properties: Json, state: ServerState, *, needs_model: bool) -> None:
    """Set this server's limits, where they are narrower than those of the request's model."""
    served, settings = state.engine.model, state.settings
    names = [settings.served_model_name, *served.adapters]
    properties["model"] = {"type": "string", "enum": names}
    if not needs_model:  # editor plugins name none
        properties["model"] = {"enum": [*names, "", None]}
    properties["extra_body"] = {
        "anyOf": [{"type": "object"}, {"type": "null"}],
        "description": "More fields, as Mercury's client sends them.",
    }
    limits = {
        "n": settings.max_choices,
        "max_tokens": served.max_new_tokens(1),
        "max_completion_tokens": served.max_new_tokens(1),
        "max_output_tokens": served.max_new_tokens(1),
        "deadline_s": settings.request_timeout_s,
        "canvas_len": served.canvas_len,
    }
    for name, most in limits.items():
        if name in properties:
            ways = properties[name].get("anyOf", [properties[name]])
            ways[0]["maximum"] = most
    if "logit_bias" in properties:
        properties["logit_bias"]["anyOf"][0]["propertyNames"] = {"pattern": "^(0|[1-9][0-9]{0,8})$"}
    if "end_tokens" in properties:
        properties["end_tokens"]["anyOf"][0]["items"]["maximum"] = served.vocab_size - 1
    if "tokens" in properties:
        properties["tokens"]["items"]["maximum"] = served.vocab_size - 1
        properties["tokens"]["maxItems"] = served.max_positions


def _unsupported_fields(unsupported: Mapping[str, Unsupported]) -> Json:
    return {
        name: {"enum": [*rule.usual, None], "description": f"Not supported beyond the usual: {rule.why}."}
        for name, rule in unsupported.items()
    }


def _response(description: str, *kinds: type[ResponseModel]) -> Json:
    schema = _any_of([kind.__name__ for kind in kinds])
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _any_of(names: Sequence[str]) -> Json:
    return reference(names[0]) if len(names) == 1 else {"anyOf": [reference(name) for name in names]}
