"""The description of the API is true of it."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from dgemma.server.chat.protocol import (
    UNSUPPORTED_IN_CHAT,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
)
from dgemma.server.completions.protocol import CompletionResponse
from dgemma.server.decisions.protocol import DecisionResponse, NamedDecisionResponse
from dgemma.server.edit.protocol import EditCompletionResponse
from dgemma.server.http.models import ModelList
from dgemma.server.http.openapi import GENERATING_ERRORS, TEXT_ERRORS
from dgemma.server.images import image_url
from dgemma.server.infill.protocol import InfillChunk, InfillResponse
from dgemma.server.protocol import ErrorResponse
from server.canvas_bodies import (
    DECIDE,
    DECIDE_BY_NAME,
    DECISIONS,
    EDIT,
    EDIT_ASKED,
    FIM,
    GAP,
    INFILL,
    SYSTEM_ONE,
    VSCODE,
)
from server.fake_engine import FakeEngine
from server.served import CHAT, COMPLETIONS, HELLO, ONCE, app_of, ask, events_of, post
from server.test_images import chat_part


def schema_of(**settings: Any) -> dict[str, Any]:
    response = ask(
        app_of(FakeEngine(adapters=("sums",)), **settings),
        "GET",
        "/openapi.json",
        headers={"authorization": "Bearer k"},
    )
    assert response.status_code == 200
    return dict(response.json())


def test_every_endpoint_is_described_with_its_errors() -> None:
    schema = schema_of()
    asking = {CHAT, "/v1/responses", "/v1/messages", COMPLETIONS, FIM, INFILL, EDIT, DECISIONS, SYSTEM_ONE}
    counting = {"/v1/responses/input_tokens", "/v1/messages/count_tokens", "/tokenize", "/detokenize"}
    watching = {"/v1/models", "/v1/models/{model}", "/health", "/ready", "/metrics"}
    kept = {"/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items"}
    assert set(schema["paths"]) == asking | counting | watching | kept
    names = [operation["operationId"] for path in schema["paths"].values() for operation in path.values()]
    assert len(set(names)) == len(names)
    for path in asking | counting:
        responses = schema["paths"][path]["post"]["responses"]
        statuses = GENERATING_ERRORS if path in asking else TEXT_ERRORS
        assert set(responses) == {"200", *(str(status) for status in statuses if status != 401)}
    for operations in schema["paths"].values():
        for operation in operations.values():
            assert "422" not in operation["responses"]


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        found = {value["$ref"]} if "$ref" in value else set()
        return found.union(*(references(inner) for inner in value.values()))
    return set().union(*(references(inner) for inner in value)) if isinstance(value, list) else set()


def test_every_reference_leads_somewhere() -> None:
    schema = schema_of()
    for reference in references(schema):
        assert reference.rpartition("/")[2] in schema["components"]["schemas"]


def test_requests_are_closed_and_know_this_servers_limits() -> None:
    request = schema_of(max_choices=5)["components"]["schemas"]["ChatCompletionRequest"]
    assert request["additionalProperties"] is False
    assert request["required"] == ["model", "messages"]
    properties = request["properties"]
    assert properties["model"]["enum"] == ["dgemma", "sums"]
    assert properties["n"]["anyOf"][0]["maximum"] == 5
    assert properties["max_tokens"]["anyOf"][0]["maximum"] == 4080
    assert UNSUPPORTED_IN_CHAT.keys() < properties.keys()


def test_a_message_may_hold_the_image_parts_that_are_read() -> None:
    field = schema_of()["components"]["schemas"]["ChatCompletionRequest"]["properties"]["messages"]
    user = jsonschema.Draft202012Validator(field["items"])
    for part in (chat_part("data:,"), {"type": "input_image", "image_url": "data:,", "detail": "low"}):
        assert user.is_valid({"role": "user", "content": [part]})
        assert not user.is_valid({"role": "user", "content": [{**part, "fps": 1}]})
        assert image_url(part) == "data:,"


def test_keys_are_described_where_they_are_needed() -> None:
    assert "security" not in schema_of()
    keyed = schema_of(api_keys=("k",))
    assert keyed["security"] == [{"key": []}]
    assert keyed["paths"]["/health"]["get"]["security"] == []
    assert "401" in keyed["paths"]["/metrics"]["get"]["responses"]


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "n": 2, "reasoning_effort": "high"}])
def test_replies_are_what_they_are_said_to_be(more: dict[str, Any]) -> None:
    """The models forbid unknown fields, so what is not described cannot be sent."""
    app = app_of()
    ChatCompletionResponse.model_validate_json(post(app, CHAT, {**HELLO, **more}).content, strict=True)
    streaming = {"stream": True, "diffusing": True, "stream_options": {"include_usage": True}}
    for chunk in events_of(post(app, CHAT, {**HELLO, **more, **streaming})):
        ChatCompletionStreamResponse.model_validate(chunk, strict=True)
    CompletionResponse.model_validate_json(
        post(app, COMPLETIONS, {**ONCE, "logprobs": 3}).content, strict=True
    )
    ModelList.model_validate_json(ask(app, "GET", "/v1/models").content, strict=True)
    ErrorResponse.model_validate_json(post(app, CHAT, {}).content, strict=True)


def test_replies_of_work_are_what_they_are_said_to_be() -> None:
    app = app_of()
    infill = {**VSCODE, "n_predict": 4}
    for path, body, kind in (
        (COMPLETIONS, GAP, CompletionResponse),
        (FIM, GAP, CompletionResponse),
        (INFILL, infill, InfillResponse),
        (EDIT, EDIT_ASKED, EditCompletionResponse),
        (DECISIONS, DECIDE, DecisionResponse),
        (DECISIONS, DECIDE_BY_NAME, NamedDecisionResponse),
        (SYSTEM_ONE, DECIDE_BY_NAME, NamedDecisionResponse),
    ):
        kind.model_validate_json(post(app, path, body).content, strict=True)
    for chunk in events_of(post(app, FIM, {**GAP, "stream": True})):
        CompletionResponse.model_validate(chunk, strict=True)
    first, last = post(app, INFILL, {**infill, "stream": True}).text.strip().split("\n\n")
    InfillChunk.model_validate_json(first.removeprefix("data: "), strict=True)
    InfillResponse.model_validate_json(last.removeprefix("data: "), strict=True)


def test_requests_of_work_know_this_servers_limits_and_what_they_cannot_have() -> None:
    schemas = schema_of()["components"]["schemas"]
    assert schemas["InfillRequest"]["properties"]["model"]["enum"] == ["dgemma", "sums", "", None]
    assert schemas["EditRequest"]["properties"]["stream"]["enum"] == [False, None]
    assert schemas["DecisionRequest"]["required"] == ["model", "input", "questions"]
    assert schemas["StateRequest"]["properties"]["questions"]["maxProperties"] == 400
    assert schemas["TokenizePromptRequest"]["properties"]["model"]["enum"] == ["dgemma", "sums", "", None]
    assert schemas["DetokenizeRequest"]["properties"]["tokens"]["items"]["maximum"] == 260
    closed = ("InfillRequest", "EditRequest", "DecisionRequest", "StateRequest", "FimRequest")
    for name in (*closed, "DetokenizeRequest", "TokenizeChatRequest"):
        assert schemas[name]["additionalProperties"] is False
