"""Requests, replies and stream events of POST /v1/messages, in Anthropic's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from dgemma.errors import InputError
from dgemma.params import MAX_STOP_STRING_LEN, MAX_STOP_STRINGS
from dgemma.server.http.errors import invalid
from dgemma.server.messages.blocks import CacheControl, MessageInput, ReplyBlock, TextBlockInput
from dgemma.server.protocol import (
    MAX_INT,
    AnswerDetails,
    DraftInfo,
    OnlyFalse,
    ReplyFields,
    RequestModel,
    ResponseModel,
)
from dgemma.server.reply import check_tool_choice
from dgemma.server.validation import UNSUPPORTED_BY_ALL, Unsupported, read_fields
from dgemma.structured_output.response_format import JsonFormat, TextFormat, schema_text

_ALIKE = Unsupported("all requests are served alike")
UNSUPPORTED_IN_COUNTS: dict[str, Unsupported] = {
    "billing_policy": _ALIKE,
    "compaction": Unsupported("a conversation is not shortened"),
    "context_management": Unsupported("a conversation is not shortened"),
    "mcp_servers": Unsupported("this server runs no tools itself", ([],)),
    "speed": Unsupported("all requests are served alike", ("standard",)),
    "user_profile_id": _ALIKE,
    "workspace_id": _ALIKE,
}
UNSUPPORTED_IN_MESSAGES: dict[str, Unsupported] = {
    **UNSUPPORTED_BY_ALL,
    **UNSUPPORTED_IN_COUNTS,
    "container": Unsupported("this server runs no tools itself"),
    "diagnostics": Unsupported("the log and the metrics have them"),
    "fallback_credit_token": _ALIKE,
    "fallbacks": Unsupported("a request is answered by the model it names", ([],)),
    "inference_geo": _ALIKE,
    "service_tier": Unsupported("all requests are served alike", ("auto", "standard_only")),
    # The code tells the client's tool runner to send the whole conversation instead.
    "thread": Unsupported("this server keeps no conversations", (False,), code="thread_unsupported_request"),
    "trace": Unsupported("chat completions return traces", (False,)),
}


class MessageTool(RequestModel):
    type: Literal["custom"] | None = Field(None, description="Tools that a server runs are refused.")
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = Field(None, description="True: the input satisfies the schema; default: false.")
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = Field(None, description="Without effect: an input comes whole.")
    defer_loading: OnlyFalse | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class AutoChoice(RequestModel):
    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class AnyChoice(RequestModel):
    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(RequestModel):
    type: Literal["tool"]
    name: str = Field(min_length=1)
    disable_parallel_tool_use: bool | None = None


class NoChoice(RequestModel):
    type: Literal["none"]


_Display = Literal["summarized", "omitted"]


class ThinkingEnabled(RequestModel):
    type: Literal["enabled"]
    budget_tokens: int = Field(ge=1, le=MAX_INT, description="Without effect: max_tokens is the bound.")
    display: _Display | None = None


class ThinkingAdaptive(RequestModel):
    type: Literal["adaptive"]
    display: _Display | None = Field(None, description="omitted: the thought is not sent.")


class ThinkingDisabled(RequestModel):
    type: Literal["disabled"]


class JsonOutputFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] | bool = Field(alias="schema")


class OutputConfig(RequestModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Without effect: the levels are alike."
    )
    format: JsonOutputFormat | None = None


class MessageFields(RequestModel):
    """What the prompt is made of."""

    messages: list[MessageInput] = Field(
        min_length=1,
        description="The last one is the user's.",
        examples=[[{"role": "user", "content": "Hello"}]],
    )
    system: str | list[TextBlockInput] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: (
        Annotated[AutoChoice | AnyChoice | NamedChoice | NoChoice, Field(discriminator="type")] | None
    ) = None
    thinking: (
        Annotated[ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled, Field(discriminator="type")] | None
    ) = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    @property
    def thinks(self) -> bool | None:
        """None: the request does not say."""
        return (
            None if self.thinking is None else isinstance(self.thinking, ThinkingEnabled | ThinkingAdaptive)
        )

    @property
    def omits_thoughts(self) -> bool:
        options = self.thinking
        return isinstance(options, ThinkingEnabled | ThinkingAdaptive) and options.display == "omitted"

    @property
    def chat_tools(self) -> list[dict[str, Any]] | None:
        """The tools the model is shown, in the form of chat completions; none with tool_choice none."""
        if isinstance(self.tool_choice, NoChoice) or not self.tools:
            return None
        functions = [
            {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
                "strict": tool.strict,
            }
            for tool in self.tools
        ]
        return [
            {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}
            for function in functions
        ]

    @property
    def must_call(self) -> bool:
        return isinstance(self.tool_choice, AnyChoice | NamedChoice)

    @property
    def named_tool(self) -> str | None:
        return self.tool_choice.name if isinstance(self.tool_choice, NamedChoice) else None

    @property
    def has_parallel_calls(self) -> bool:
        choice = self.tool_choice
        return choice is None or isinstance(choice, NoChoice) or choice.disable_parallel_tool_use is not True

    @property
    def text_format(self) -> tuple[str, TextFormat] | None:
        """The format of the text, with the field that sets it."""
        if self.output_config is None or self.output_config.format is None:
            return None
        try:
            schema = schema_text(self.output_config.format.schema_, "output_config.format.schema")
        except InputError as error:
            raise invalid(str(error), "output_config") from None
        return "output_config", JsonFormat(schema)


class MessageMetadata(RequestModel):
    """Without effect."""

    user_id: str | None = None


_StopSequence = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_LEN)]


class MessagesRequest(ReplyFields, MessageFields):
    max_tokens: int = Field(ge=1, le=MAX_INT, description="Of the reply, thoughts included.")
    stop_sequences: list[_StopSequence] | None = Field(
        None, max_length=MAX_STOP_STRINGS, description="Texts that end a reply and are not part of it."
    )
    metadata: MessageMetadata | None = None  # type: ignore[assignment]

    @property
    def stop(self) -> list[str] | None:
        """The stop sequences under the name of the generation option."""
        return self.stop_sequences


class CountTokensRequest(MessageFields):
    model: str = Field(max_length=200)


def read_messages_request(body: Mapping[str, Any]) -> MessagesRequest:
    request = read_fields(MessagesRequest, body, UNSUPPORTED_IN_MESSAGES)
    check_tool_choice(request.must_call, request.named_tool, [tool.name for tool in request.tools or ()])
    return request


def read_count_request(body: Mapping[str, Any]) -> CountTokensRequest:
    request = read_fields(CountTokensRequest, body, UNSUPPORTED_IN_COUNTS)
    check_tool_choice(request.must_call, request.named_tool, [tool.name for tool in request.tools or ()])
    return request


# Replies

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class ThinkingTokens(ResponseModel):
    thinking_tokens: int = Field(description="Of the thought's text, encoded once more.")


class MessageUsage(ResponseModel):
    input_tokens: int = Field(description="Without those found in the prefix cache, once it is known.")
    cache_creation_input_tokens: int = Field(description="Always 0: nobody pays for the prefix cache.")
    cache_read_input_tokens: int = Field(description="Tokens of the prompt found in the prefix cache.")
    output_tokens: int
    output_tokens_details: ThinkingTokens | None = None
    denoising_steps: int | None = None
    canvases: int | None = None
    tokens_per_forward: float | None = None


class MessageObject(ResponseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ReplyBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    dgemma: AnswerDetails | None = Field(None, description="When it is finished.")


class CountTokensResponse(ResponseModel):
    input_tokens: int


class MessageErrorDetails(ResponseModel):
    error_code: str | None
    param: str | None = Field(description="The field that is wrong.")


class MessageErrorInfo(ResponseModel):
    type: str
    message: str
    details: MessageErrorDetails


class MessagesErrorResponse(ResponseModel):
    type: Literal["error"]
    error: MessageErrorInfo
    request_id: str | None


class MessageDelta(ResponseModel):
    """What a block grows by, or how a message ended."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"] | None = None
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    partial_json: str | None = None
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None


class MessageEvent(ResponseModel):
    """One event of a stream; `type` says which of the other fields it has."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
        "dgemma.draft",
    ]
    message: MessageObject | None = None
    index: int | None = None
    content_block: ReplyBlock | None = None
    delta: MessageDelta | None = None
    usage: MessageUsage | None = None
    dgemma: AnswerDetails | None = None
    error: MessageErrorInfo | None = None
    draft: DraftInfo | None = Field(
        default=None, description="With diffusing: the running canvas after one step."
    )

    @property
    def event_name(self) -> str:
        return self.type
