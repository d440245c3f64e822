"""The routes of tokens: of a text or a chat, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dgemma.server.pipeline import TextEndpoint
from dgemma.server.protocol import ResponseModel
from dgemma.server.serving import ServingContext
from dgemma.server.tokenize.protocol import (
    UNSUPPORTED_IN_DETOKENIZE,
    UNSUPPORTED_WITH_CONTENT,
    UNSUPPORTED_WITH_MESSAGES,
    UNSUPPORTED_WITH_PROMPT,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeContentRequest,
    TokenizePromptRequest,
    TokenizeResponse,
    read_detokenize_request,
    read_tokenize_request,
)
from dgemma.server.tokenize.serving import TokenizeServing


def tokenize(context: ServingContext, body: Mapping[str, Any]) -> tuple[str, ResponseModel]:
    return TokenizeServing(context).tokenize(read_tokenize_request(body))


def detokenize(context: ServingContext, body: Mapping[str, Any]) -> tuple[str, ResponseModel]:
    return TokenizeServing(context).detokenize(read_detokenize_request(body))


TOKENIZE = TextEndpoint(
    path="/tokenize",
    summary="The tokens of a text or a chat",
    answer=tokenize,
    prompt_fields=("prompt", "content", "messages"),
    requests={
        TokenizePromptRequest: UNSUPPORTED_WITH_PROMPT,
        TokenizeContentRequest: UNSUPPORTED_WITH_CONTENT,
        TokenizeChatRequest: UNSUPPORTED_WITH_MESSAGES,
    },
    responses=(TokenizeResponse,),
    example={"prompt": "Once upon a time"},
)
DETOKENIZE = TextEndpoint(
    path="/detokenize",
    summary="The text of tokens",
    answer=detokenize,
    prompt_fields=("tokens",),
    requests={DetokenizeRequest: UNSUPPORTED_IN_DETOKENIZE},
    responses=(DetokenizeResponse,),
    example={"tokens": [72, 101]},
)
