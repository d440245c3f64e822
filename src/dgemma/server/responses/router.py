"""The route of responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dgemma.server.pipeline import Endpoint, TextEndpoint
from dgemma.server.plan import AnyServingPlan
from dgemma.server.protocol import ResponseModel
from dgemma.server.responses.protocol import (
    UNSUPPORTED_IN_INPUT_TOKENS,
    UNSUPPORTED_IN_RESPONSES,
    InputTokensRequest,
    InputTokensResponse,
    ResponseEvent,
    ResponseObject,
    ResponseRequest,
    read_input_tokens_request,
    read_response_request,
)
from dgemma.server.responses.serving import ResponseServing
from dgemma.server.serving import ServingContext


def create_response(context: ServingContext, body: Mapping[str, Any]) -> AnyServingPlan:
    return ResponseServing(context).create_response(read_response_request(body))


def count_input_tokens(context: ServingContext, body: Mapping[str, Any]) -> tuple[str, ResponseModel]:
    request = read_input_tokens_request(body)
    return request.model, ResponseServing(context).count_input_tokens(request)


def kept_inputs(context: ServingContext, body: Mapping[str, Any]) -> list[Any]:
    return ResponseServing(context).kept_inputs(body)


RESPONSES = Endpoint(
    path="/v1/responses",
    summary="Answer a conversation of items",
    create=create_response,
    prompt_fields=("instructions", "input"),
    kept_inputs=kept_inputs,
    requests={ResponseRequest: UNSUPPORTED_IN_RESPONSES},
    responses=(ResponseObject,),
    example={"input": "Why is the sea salty?", "max_output_tokens": 64},
    chunk=ResponseEvent,
    end_of_stream=b"",
    last_event="the event response.completed, response.incomplete or response.failed",
)
RESPONSE_INPUT_TOKENS = TextEndpoint(
    path="/v1/responses/input_tokens",
    summary="The number of tokens that a response would read",
    answer=count_input_tokens,
    prompt_fields=("instructions", "input"),
    kept_inputs=kept_inputs,
    requests={InputTokensRequest: UNSUPPORTED_IN_INPUT_TOKENS},
    responses=(InputTokensResponse,),
    example={"input": "Why is the sea salty?"},
)
