"""The routes of messages, and of counting their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dgemma.server.messages.protocol import (
    UNSUPPORTED_IN_COUNTS,
    UNSUPPORTED_IN_MESSAGES,
    CountTokensRequest,
    CountTokensResponse,
    MessageEvent,
    MessageObject,
    MessagesErrorResponse,
    MessagesRequest,
    read_count_request,
    read_messages_request,
)
from dgemma.server.messages.serving import MessagesServing
from dgemma.server.pipeline import Endpoint, TextEndpoint
from dgemma.server.plan import AnyServingPlan
from dgemma.server.protocol import ResponseModel
from dgemma.server.serving import ServingContext


def create_message(context: ServingContext, body: Mapping[str, Any]) -> AnyServingPlan:
    return MessagesServing(context).create_message(read_messages_request(body))


def count_tokens(context: ServingContext, body: Mapping[str, Any]) -> tuple[str, ResponseModel]:
    request = read_count_request(body)
    return request.model, MessagesServing(context).count_tokens(request)


_EXAMPLE: dict[str, Any] = {"messages": [{"role": "user", "content": "Why is the sea salty?"}]}
MESSAGES = Endpoint(
    path="/v1/messages",
    summary="Answer a conversation of content blocks",
    create=create_message,
    prompt_fields=("system", "messages"),
    requests={MessagesRequest: UNSUPPORTED_IN_MESSAGES},
    responses=(MessageObject,),
    example={**_EXAMPLE, "max_tokens": 64},
    chunk=MessageEvent,
    end_of_stream=b"",
    last_event="the event message_stop",
    errors=MessagesErrorResponse,
)
COUNT_TOKENS = TextEndpoint(
    path="/v1/messages/count_tokens",
    summary="The number of tokens of such a conversation",
    answer=count_tokens,
    prompt_fields=("system", "messages"),
    requests={CountTokensRequest: UNSUPPORTED_IN_COUNTS},
    responses=(CountTokensResponse,),
    example=_EXAMPLE,
    errors=MessagesErrorResponse,
)
