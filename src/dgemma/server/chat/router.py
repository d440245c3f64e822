"""The route of chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dgemma.server.chat.protocol import (
    UNSUPPORTED_IN_CHAT,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
    read_chat_request,
)
from dgemma.server.chat.serving import ChatServing
from dgemma.server.pipeline import Endpoint
from dgemma.server.plan import AnyServingPlan
from dgemma.server.serving import ServingContext


def create_chat_completion(context: ServingContext, body: Mapping[str, Any]) -> AnyServingPlan:
    return ChatServing(context).create_chat_completion(read_chat_request(body))


CHAT_COMPLETIONS = Endpoint(
    path="/v1/chat/completions",
    summary="Answer a conversation",
    create=create_chat_completion,
    prompt_fields=("messages",),
    requests={ChatCompletionRequest: UNSUPPORTED_IN_CHAT},
    responses=(ChatCompletionResponse,),
    example={"messages": [{"role": "user", "content": "Why is the sea salty?"}], "max_tokens": 64},
    chunk=ChatCompletionStreamResponse,
)
