"""Requests and responses of POST /v1/completions and POST /v1/fim/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from dgemma.params import MAX_LOGPROBS, MAX_TOP_K
from dgemma.server.http.errors import invalid, shown
from dgemma.server.outputs import CompletionLogprobs, PromptLogprobs
from dgemma.server.protocol import (
    MAX_INT,
    AnswerDetails,
    DraftInfo,
    ResponseModel,
    TracedResponse,
    UsageInfo,
)
from dgemma.server.response_format import ResponseFormatFields
from dgemma.server.validation import (
    PENALTY,
    UNSUPPORTED_BY_ALL,
    UNSUPPORTED_GRAMMARS,
    Unsupported,
    read_fields,
)

UNSUPPORTED_IN_COMPLETIONS: dict[str, Unsupported] = {
    **UNSUPPORTED_BY_ALL,
    **UNSUPPORTED_GRAMMARS,
    "best_of": Unsupported("all answers are returned, see n", (1,)),
}
UNSUPPORTED_IN_FIM: dict[str, Unsupported] = {
    **UNSUPPORTED_IN_COMPLETIONS,
    "repetition_penalty": Unsupported(PENALTY.why, (1,)),
}
NO_CUTOFF = -1

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]


class CompletionRequest(ResponseFormatFields):
    prompt: _Prompt = Field(
        description="Text, or token ids, which are used unchanged; or a list of these.",
        examples=["Once upon a time"],
    )
    suffix: str | None = Field(
        None, description="The text after a gap, with prompt before it; empty: no gap."
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = Field(
        None, description="Return the prompt before its answer, with logprobs also those of its tokens."
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="vLLM's: list so many likely tokens for each of the prompt."
    )
    max_tokens: int | None = Field(
        None,
        ge=0,
        le=MAX_INT,
        description="Of one answer; default: 1024, or the rest of the context. 0 with echo or "
        "prompt_logprobs: none is written.",
    )

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several, each a text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(map(_is_id, prompt))):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if all(isinstance(item, str) for item in prompt):
                return list(prompt)
            if all(isinstance(item, list) and item and all(map(_is_id, item)) for item in prompt):
                return list(prompt)
        found = "an empty list" if prompt == [] else shown(prompt)
        raise invalid(f"prompt is {found}; give a text, token ids, or a list of either.", "prompt")


class FimRequest(CompletionRequest):
    prompt: str = Field(description="The text before the gap.", examples=["def add(a, b):\n    return "])
    top_k: int | None = Field(None, ge=NO_CUTOFF, le=MAX_TOP_K, description="-1: no cutoff.")


def read_completion_request(body: Mapping[str, Any]) -> CompletionRequest:
    return read_fields(CompletionRequest, body, UNSUPPORTED_IN_COMPLETIONS)


def read_fim_request(body: Mapping[str, Any]) -> FimRequest:
    request = read_fields(FimRequest, body, UNSUPPORTED_IN_FIM)
    if request.top_k == NO_CUTOFF:
        return request.model_copy(update={"top_k": None})
    return request


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


# Responses


class FillDetails(ResponseModel):
    """How a gap was filled."""

    seed: int
    finish_reason: Literal["stop", "length", "deadline"]
    log_likelihood: float | None = Field(
        description="Of the gap and the text after it; null: the deadline came first."
    )
    candidates: int = Field(description="Complete texts that were compared.")
    denoising_steps: int
    stop_string: str | None = None


class CompletionChoice(ResponseModel):
    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    reasoning_content: str | None = None
    draft: DraftInfo | None = None
    dgemma: AnswerDetails | FillDetails | None = None


class CompletionResponse(TracedResponse):
    """Whole, or one chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageInfo | None = None
