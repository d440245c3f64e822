"""Requests, responses and stream events of POST /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from dgemma.errors import InputError
from dgemma.server.http.errors import invalid
from dgemma.server.protocol import (
    MAX_INT,
    AnswerDetails,
    DraftInfo,
    InputTokensDetails,
    OnlyFalse,
    OutputTokensDetails,
    ReplyFields,
    RequestModel,
    ResponseModel,
)
from dgemma.server.reply import EFFORT_OFF, check_tool_choice
from dgemma.server.responses.items import EventPart, InputItem, OutputItem
from dgemma.server.validation import UNSUPPORTED_BY_ALL, Unsupported, read_fields
from dgemma.structured_output.response_format import JsonFormat, TextFormat, schema_text

_NO_HOSTED_TOOLS = "this server runs no tools itself"
UNSUPPORTED_IN_INPUT_TOKENS: dict[str, Unsupported] = {
    "conversation": Unsupported("this server keeps no conversations; give previous_response_id or the items"),
    "truncation": Unsupported("a conversation is not shortened", ("disabled",)),
}
UNSUPPORTED_IN_RESPONSES: dict[str, Unsupported] = {
    **UNSUPPORTED_BY_ALL,
    **UNSUPPORTED_IN_INPUT_TOKENS,
    "access_programs": Unsupported("all requests are served alike"),
    "background": Unsupported("a response is written while its request is open", (False,)),
    "context_management": Unsupported("a conversation is not shortened"),
    "image": Unsupported("images are not compressed"),
    "max_tool_calls": Unsupported(_NO_HOSTED_TOOLS),
    "moderation": Unsupported("this server does not moderate"),
    "prompt": Unsupported("this server keeps no prompt templates"),
    "prompt_cache_options": Unsupported("the prefix cache keeps prompts as memory allows"),
    "prompt_cache_retention": Unsupported("the prefix cache keeps prompts as memory allows", ("in_memory",)),
    "service_tier": Unsupported("all requests are served alike", ("auto", "default")),
    "top_logprobs": Unsupported("chat completions return log-probabilities", (0,)),
    "trace": Unsupported("chat completions return traces", (False,)),
}


class FunctionTool(RequestModel):
    type: Literal["function"] = Field(description="Hosted and custom tools are refused.")
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="True: the arguments satisfy the schema; default: false.")
    defer_loading: OnlyFalse | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class NamedFunction(RequestModel):
    type: Literal["function"]
    name: str = Field(min_length=1)


class PlainTextFormat(RequestModel):
    type: Literal["text"]


class JsonObjectTextFormat(RequestModel):
    type: Literal["json_object"]


class JsonSchemaTextFormat(RequestModel):
    type: Literal["json_schema"]
    name: str | None = Field(None, max_length=200, description="Without effect.")
    description: str | None = Field(None, description="Without effect.")
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = Field(None, description="The answer satisfies the schema, whatever the value.")


class TextOptions(RequestModel):
    format: (
        Annotated[PlainTextFormat | JsonObjectTextFormat | JsonSchemaTextFormat, Field(discriminator="type")]
        | None
    ) = None
    verbosity: Literal["medium"] | None = Field(None, description="State the length in a message.")


Effort = Literal["none", "instant", "minimal", "low", "medium", "high", "xhigh", "max"]
Summary = Literal["auto", "concise", "detailed"]


class ReasoningOptions(RequestModel):
    effort: Effort | None = Field(None, description="Whether to think; the levels are alike.")
    summary: Summary | None = Field(
        None, description="The thought is sent as a summary, whole; without effort it also switches it on."
    )
    generate_summary: Summary | None = Field(None, description="The older name of summary.")
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(RequestModel):
    include_obfuscation: OnlyFalse | None = None


class ItemFields(RequestModel):
    """What the prompt is made of."""

    input: str | list[InputItem] = Field(
        description="A text of the user's, or the items of a conversation.", examples=["Hello"]
    )
    instructions: str | None = Field(None, description="Goes before the conversation, as a system message.")
    tools: list[FunctionTool] | None = Field(None, description="Functions that the model may call.")
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = Field(
        None, description="Whether a tool is called, or which; default: auto."
    )
    parallel_tool_calls: bool | None = Field(None, description="False: one call at most.")
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    previous_response_id: str | None = Field(
        None, max_length=200, description="A kept response; its conversation goes before the input."
    )

    @property
    def thinking(self) -> bool | None:
        """None: the request does not say."""
        options = self.reasoning
        if options is None:
            return None
        return self.has_summary if options.effort is None else options.effort not in EFFORT_OFF

    @property
    def has_summary(self) -> bool:
        """Whether thoughts are sent as summaries."""
        options = self.reasoning
        return options is not None and (options.summary or options.generate_summary) is not None

    @property
    def chat_tools(self) -> list[dict[str, Any]] | None:
        """The tools the model is shown, in the form of chat completions; none with tool_choice "none"."""
        if self.tool_choice == "none" or not self.tools:
            return None
        names = ("name", "description", "parameters", "strict")
        functions = [{name: getattr(tool, name) for name in names} for tool in self.tools]
        return [
            {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}
            for function in functions
        ]

    @property
    def named_tool(self) -> str | None:
        return self.tool_choice.name if isinstance(self.tool_choice, NamedFunction) else None

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or self.named_tool is not None

    @property
    def text_format(self) -> tuple[str, TextFormat] | None:
        """The format of the text, with the field that sets it."""
        match self.text and self.text.format:
            case JsonObjectTextFormat():
                return "text", JsonFormat()
            case JsonSchemaTextFormat(schema_=schema):
                try:
                    return "text", JsonFormat(schema_text(schema, "text.format.schema"))
                except InputError as error:
                    raise invalid(str(error), "text") from None
        return None


class ResponseRequest(ReplyFields, ItemFields):
    max_output_tokens: int | None = Field(
        None, ge=1, le=MAX_INT, description="Thoughts included; default: 1024, or the rest of the context."
    )
    include: list[Literal["reasoning.encrypted_content"]] | None = Field(
        None, description="Without effect: thoughts are sent as they are."
    )
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = Field(None, description="Keep the response in memory for a while; default: true.")


class InputTokensRequest(ItemFields):
    model: str = Field(max_length=200)


def read_response_request(body: Mapping[str, Any]) -> ResponseRequest:
    request = read_fields(ResponseRequest, body, UNSUPPORTED_IN_RESPONSES)
    check_tool_choice(request.must_call, request.named_tool, [tool.name for tool in request.tools or ()])
    return request


def read_input_tokens_request(body: Mapping[str, Any]) -> InputTokensRequest:
    request = read_fields(InputTokensRequest, body, UNSUPPORTED_IN_INPUT_TOKENS)
    check_tool_choice(request.must_call, request.named_tool, [tool.name for tool in request.tools or ()])
    return request


# Responses


class ResponseUsageInfo(ResponseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    denoising_steps: int
    canvases: int
    tokens_per_forward: float


class InputTokensResponse(ResponseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class IncompleteDetails(ResponseModel):
    reason: Literal["max_output_tokens"] = Field(description="Also of a deadline; `dgemma` has which.")


class ResponseFailure(ResponseModel):
    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class ResponseObject(ResponseModel):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponseUsageInfo | None
    user: str | None
    system_fingerprint: str
    dgemma: AnswerDetails | None = Field(None, description="When it is finished.")


class ResponseEvent(ResponseModel):
    """One event of a stream; `type` says which of the other fields it has."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.output_item.done",
        "response.content_part.added",
        "response.content_part.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_part.done",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "dgemma.draft",
    ]
    sequence_number: int
    response: ResponseObject | None = None
    output_index: int | None = None
    item_id: str | None = None
    item: OutputItem | None = None
    content_index: int | None = None
    summary_index: int | None = None
    part: EventPart | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: list[None] | None = Field(None, max_length=0)
    draft: DraftInfo | None = Field(None, description="With diffusing: the running canvas after one step.")

    @property
    def event_name(self) -> str:
        return self.type
