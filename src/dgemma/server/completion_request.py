"""What POST /v1/completions takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from dgemma.params import MAX_LOGPROBS
from dgemma.server.api_error import refused, shown
from dgemma.server.fields import UNSUPPORTED_IN_COMPLETIONS
from dgemma.server.form_fields import FormFields
from dgemma.server.request_fields import read_fields

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


class CompletionRequest(FormFields):
    prompt: _Prompt = Field(
        description="Text, or token ids, which are taken as they are; or a list of these.",
        examples=["Once upon a time"],
    )
    suffix: str | None = Field(
        None, description="The text behind a gap, of which prompt is the text before; empty: no gap."
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

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
        what = "an empty list" if prompt == [] else shown(prompt)
        raise refused(f"prompt is {what}; give a text, token ids, or a list of either.", "prompt")


def read_completion_request(body: Mapping[str, Any]) -> CompletionRequest:
    return read_fields(CompletionRequest, body, UNSUPPORTED_IN_COMPLETIONS)


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)
