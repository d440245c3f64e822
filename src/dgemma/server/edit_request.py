"""What POST /v1/edit/completions takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from dgemma.server.fields import UNSUPPORTED_IN_EDIT
from dgemma.server.request_fields import MAX_INT, Fields, SamplingFields, read_fields

_EXAMPLE = (
    "Mend the typo.\n<|current_file_content|>\n<|code_to_edit|>\ndef greet<|cursor|>(nmae):\n"
    "    print(name)\n<|/code_to_edit|>\n<|/current_file_content|>"
)


class TextPart(Fields):
    type: Literal["text"]
    text: str


class UserMessage(Fields):
    role: Literal["user"]
    content: str | list[TextPart] = Field(
        description="With <|code_to_edit|> around the region, usually in <|current_file_content|>; it may "
        "have <|cursor|> in it, <|edit_diff_history|> and <|recently_viewed_code_snippets|> beside it.",
        examples=[_EXAMPLE],
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
