"""Requests and responses of POST /v1/edit/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from dgemma.server.protocol import (
    MAX_INT,
    RequestModel,
    ResponseModel,
    SamplingFields,
    TracedResponse,
    UsageInfo,
)
from dgemma.server.validation import NO_STREAM, UNSUPPORTED_BY_ALL, Unsupported, read_fields

UNSUPPORTED_IN_EDIT: dict[str, Unsupported] = {
    **UNSUPPORTED_BY_ALL,
    "n": Unsupported("there is one rewritten region", (1,)),
    "stop": Unsupported("the region is rewritten as a whole", ([],)),
    "stream": NO_STREAM,
}

EXAMPLE = (
    "Mend the typo.\n<|current_file_content|>\n<|code_to_edit|>\ndef greet<|cursor|>(nmae):\n"
    "    print(name)\n<|/code_to_edit|>\n<|/current_file_content|>"
)


class TextPart(RequestModel):
    type: Literal["text"]
    text: str


class UserMessage(RequestModel):
    role: Literal["user"]
    content: str | list[TextPart] = Field(
        description="With <|code_to_edit|> around the region, usually in <|current_file_content|>; it may "
        "have <|edit_diff_history|> and <|recently_viewed_code_snippets|> beside it, and <|cursor|> in it, "
        "which is without effect: it is removed, and all of the region is examined.",
        examples=[EXAMPLE],
    )

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class EditRequest(SamplingFields):
    messages: list[UserMessage] = Field(min_length=1, max_length=1)
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT)

    @property
    def text(self) -> str:
        return self.messages[0].text


def read_edit_request(body: Mapping[str, Any]) -> EditRequest:
    return read_fields(EditRequest, body, UNSUPPORTED_IN_EDIT)


# Responses


class EditChange(ResponseModel):
    """Characters `start` to `stop` of the old region, without the cursor, and their replacement."""

    start: int
    stop: int
    old: str
    new: str
    gain: float = Field(description="Gain in log-probability, in nats, less the cost of the change.")


class EditDetails(ResponseModel):
    """How a region was rewritten."""

    seed: int
    finish_reason: Literal["stop", "deadline"]
    changes: list[EditChange]
    num_windows: int = Field(description="Places that were examined: the model finds their tokens unlikely.")
    denoising_steps: int


class EditResponseMessage(ResponseModel):
    role: Literal["assistant"]
    content: str


class EditChoice(ResponseModel):
    index: int
    message: EditResponseMessage
    finish_reason: Literal["stop", "length"]
    dgemma: EditDetails


class EditCompletionResponse(TracedResponse):
    id: str
    object: Literal["edit.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[EditChoice]
    usage: UsageInfo
