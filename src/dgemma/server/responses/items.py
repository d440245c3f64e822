"""Items of the Responses API: those of an input, and those of an output."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from dgemma.server.protocol import RequestModel, ResponseModel

Status = Literal["in_progress", "completed", "incomplete"]
_ID = Field(None, max_length=200, description="Without effect.")
_STATUS = Field(None, description="Without effect.")
CallId = Annotated[str, Field(min_length=1, max_length=200)]

# Input


class InputTextPart(RequestModel):
    type: Literal["input_text"]
    text: str


class InputImagePart(RequestModel):
    type: Literal["input_image"]
    image_url: str
    detail: Literal["low", "high", "auto"] | None = None


class OutputTextPart(RequestModel):
    """A text of the assistant's, as it was sent."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = Field(None, max_length=0)
    logprobs: list[Any] | None = Field(None, max_length=0)


class RefusalPart(RequestModel):
    type: Literal["refusal"]
    refusal: str


ContentPart = Annotated[
    InputTextPart | InputImagePart | OutputTextPart | RefusalPart, Field(discriminator="type")
]
OutputPart = Annotated[InputTextPart | InputImagePart, Field(discriminator="type")]


class InputMessage(RequestModel):
    """A message of any side; `type` may be absent."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ContentPart]
    id: str | None = _ID
    status: Status | None = _STATUS
    phase: Literal["commentary", "final_answer"] | None = Field(None, description="Without effect.")


class FunctionCallInput(RequestModel):
    """A call of the assistant's."""

    type: Literal["function_call"]
    call_id: CallId
    name: str = Field(min_length=1)
    arguments: str = Field(description="A JSON object as text.")
    id: str | None = _ID
    status: Status | None = _STATUS
    namespace: None = None
    caller: None = None


class FunctionCallOutputInput(RequestModel):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: str | list[OutputPart]
    id: str | None = _ID
    name: str | None = Field(None, description="Without effect: call_id says which call it is.")
    status: Status | None = _STATUS
    namespace: None = None
    caller: None = None


class SummaryTextPart(RequestModel):
    type: Literal["summary_text"]
    text: str


class ReasoningTextPart(RequestModel):
    type: Literal["reasoning_text"]
    text: str


class ReasoningInput(RequestModel):
    """A thought, as it was sent: its content, or else its summary, is given to the chat template."""

    type: Literal["reasoning"]
    summary: list[SummaryTextPart] | None = None
    content: list[ReasoningTextPart] | None = None
    encrypted_content: Literal[""] | None = Field(None, description="This server encrypts none.")
    id: str | None = _ID
    status: Status | None = _STATUS


def user_message(text: str) -> InputMessage:
    return InputMessage.model_validate({"type": "message", "role": "user", "content": text})


def _kind(item: Any) -> str | None:
    """The type of an item; that of a message may be absent."""
    if isinstance(item, dict):
        kind = item.get("type")
        return "message" if kind is None else str(kind)[:60]
    return str(getattr(item, "type", None) or "message") if isinstance(item, RequestModel) else None


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCallInput, Tag("function_call")]
    | Annotated[FunctionCallOutputInput, Tag("function_call_output")]
    | Annotated[ReasoningInput, Tag("reasoning")],
    Discriminator(_kind),
]

INPUT_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])

# Output


class OutputTextContent(ResponseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[None] = Field(max_length=0)
    logprobs: list[None] = Field(max_length=0)


class OutputMessage(ResponseModel):
    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputTextContent]


class OutputFunctionCall(ResponseModel):
    type: Literal["function_call"]
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str = Field(description="A JSON object as text.")


class OutputReasoningText(ResponseModel):
    type: Literal["reasoning_text"]
    text: str


class OutputSummaryText(ResponseModel):
    type: Literal["summary_text"]
    text: str


class OutputReasoning(ResponseModel):
    """A thought: in `content`, or with `reasoning.summary` in `summary`. It is whole in either."""

    type: Literal["reasoning"]
    id: str
    status: Status
    summary: list[OutputSummaryText]
    content: list[OutputReasoningText] | None = None


OutputItem = OutputReasoning | OutputMessage | OutputFunctionCall
EventPart = OutputTextContent | OutputReasoningText | OutputSummaryText
