"""What the server answers, as types: OpenAI's fields, and dgemma's beside them under names of their own.

A reply is written with the fields that were set, so that an absent one is not the same as a null.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReasonName = Literal["stop", "length", "tool_calls"]


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")

    def to_json(self) -> bytes:
        return self.model_dump_json(exclude_unset=True).encode()


class ErrorBody(Reply):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Reply):
    error: ErrorBody


class Status(Reply):
    status: str


class PromptTokensDetails(Reply):
    cached_tokens: int = Field(description="Of the prompt, not read again: an earlier request had read them.")


class Usage(Reply):
    prompt_tokens: int = Field(description="Each prompt once, however many answers it has.")
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    denoising_steps: int = Field(description="Denoise forwards of all answers.")
    canvases: int
    tokens_per_forward: float


class UnreadToolCall(Reply):
    name: str
    error: str


class AnswerDetails(Reply):
    """How an answer came about."""

    seed: int
    decode: str
    finish_reason: Literal["stop", "length", "deadline"]
    steps: list[int] = Field(description="Denoise forwards per canvas.")
    tokens_per_forward: float
    stop_string: str | None = None
    provisional_tokens: int = Field(0, description="At the end: a best guess that the deadline cut short.")
    unread_tool_calls: list[UnreadToolCall] = Field(
        default_factory=list, description="Calls that cannot be read, or that nobody offered a tool for."
    )


class FillDetails(Reply):
    """How a gap was filled."""

    seed: int
    finish_reason: Literal["stop", "length", "deadline"]
    log_likelihood: float | None = Field(
        description="Of the gap and the text behind it; null: the deadline came first."
    )
    candidates: int = Field(description="Texts that were written to their end and compared.")
    denoising_steps: int
    stop_string: str | None = None


class Draft(Reply):
    """The running canvas after one step. Nothing of it is final."""

    canvas: int
    step: int
    text: str
    entropy: float = Field(description="Mean over its tokens, in nats: how unsure the canvas is.")


class FunctionCall(Reply):
    name: str
    arguments: str = Field(description="A JSON object as text.")


class ToolCallReply(Reply):
    index: int | None = None  # in a stream
    id: str
    type: Literal["function"]
    function: FunctionCall


class TopLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    content: list[TokenLogprob]


class ChatMessage(Reply):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallReply] | None = None


class ChatChoice(Reply):
    index: int
    message: ChatMessage
    finish_reason: FinishReasonName
    logprobs: ChatLogprobs | None = None
    dgemma: AnswerDetails


class ChatCompletion(Reply):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(Reply):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallReply] | None = None


class ChatChunkChoice(Reply):
    index: int
    delta: ChatDelta
    finish_reason: FinishReasonName | None
    logprobs: ChatLogprobs | None = None
    draft: Draft | None = None
    dgemma: AnswerDetails | None = None


class ChatChunk(Reply):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionLogprobs(Reply):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Reply):
    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None
    logprobs: CompletionLogprobs | None = None
    reasoning_content: str | None = None
    draft: Draft | None = None
    dgemma: AnswerDetails | FillDetails | None = None


class Completion(Reply):
    """Whole, or one chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Pricing(Reply):
    prompt: str
    completion: str


class Model(Reply):
    """OpenAI's entries first, then those of Mercury's client."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str = Field(description="The model behind an adapter, or the model itself.")
    name: str
    context_length: int
    max_output_length: int
    input_modalities: list[str]
    output_modalities: list[str]
    supported_endpoints: list[str]
    supported_features: list[str]
    supported_sampling_parameters: list[str]
    pricing: Pricing
    canvas_length: int


class ModelList(Reply):
    object: Literal["list"]
    data: list[Model]


REPLIES: tuple[type[BaseModel], ...] = (
    ChatCompletion, ChatChunk, Completion, Model, ModelList, Status, ErrorReply,
)  # fmt: skip


def said(**fields: Any) -> dict[str, Any]:
    """The fields that say something; the others are left out of a reply."""
    return {name: value for name, value in fields.items() if value}
