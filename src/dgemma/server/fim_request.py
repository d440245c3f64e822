"""What POST /v1/fim/completions takes: a completion's fields, but for what Mercury has otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from dgemma.params import MAX_TOP_K
from dgemma.server.completion_request import CompletionRequest
from dgemma.server.fields import UNSUPPORTED_IN_FIM
from dgemma.server.request_fields import read_fields

NO_CUTOFF = -1


class FimRequest(CompletionRequest):
    prompt: str = Field(description="The text before the gap.", examples=["def add(a, b):\n    return "])
    top_k: int | None = Field(None, ge=NO_CUTOFF, le=MAX_TOP_K, description="-1: no cutoff.")


def read_fim_request(body: Mapping[str, Any]) -> FimRequest:
    request = read_fields(FimRequest, body, UNSUPPORTED_IN_FIM)
    if request.top_k == NO_CUTOFF:
        return request.model_copy(update={"top_k": None})
    return request
