"""The routes of text completions: OpenAI's, and Mercury's fill in the middle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dgemma.server.completions.protocol import (
    UNSUPPORTED_IN_COMPLETIONS,
    UNSUPPORTED_IN_FIM,
    CompletionRequest,
    CompletionResponse,
    FimRequest,
    read_completion_request,
    read_fim_request,
)
from dgemma.server.completions.serving import CompletionServing
from dgemma.server.pipeline import Endpoint
from dgemma.server.plan import AnyServingPlan
from dgemma.server.serving import ServingContext


def create_completion(context: ServingContext, body: Mapping[str, Any]) -> AnyServingPlan:
    return CompletionServing(context).create_completion(read_completion_request(body))


def create_fim_completion(context: ServingContext, body: Mapping[str, Any]) -> AnyServingPlan:
    return CompletionServing(context).create_completion(read_fim_request(body))


COMPLETIONS = Endpoint(
    path="/v1/completions",
    summary="Continue a text",
    create=create_completion,
    prompt_fields=("prompt", "suffix"),
    requests={CompletionRequest: UNSUPPORTED_IN_COMPLETIONS},
    responses=(CompletionResponse,),
    example={"prompt": "Once upon a time", "max_tokens": 64},
    chunk=CompletionResponse,
)
FIM_COMPLETIONS = Endpoint(
    path="/v1/fim/completions",
    summary="Fill a gap, as Mercury does",
    create=create_fim_completion,
    prompt_fields=("prompt", "suffix"),
    requests={FimRequest: UNSUPPORTED_IN_FIM},
    responses=(CompletionResponse,),
    example={"prompt": "def add(a, b):\n    ret", "suffix": " + b\n", "max_tokens": 4},
    chunk=CompletionResponse,
)
