"""Requests and responses of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from dgemma.errors import suggestion
from dgemma.params import MAX_LOGPROBS
from dgemma.server.http.errors import invalid, shown
from dgemma.server.images import DETAILS
from dgemma.server.outputs import ChatLogprobs, PromptLogprobs
from dgemma.server.protocol import (
    MAX_INT,
    AnswerDetails,
    DraftInfo,
    FinishReasonName,
    RequestModel,
    ResponseModel,
    TracedResponse,
    UsageInfo,
)
from dgemma.server.reply import EFFORT_OFF, EFFORT_ON, check_named_tool
from dgemma.server.response_format import ResponseFormatFields
from dgemma.server.validation import UNSUPPORTED_BY_ALL, UNSUPPORTED_GRAMMARS, Unsupported, read_fields

UNSUPPORTED_IN_CHAT: dict[str, Unsupported] = {
    **UNSUPPORTED_BY_ALL,
    **UNSUPPORTED_GRAMMARS,
    "audio": Unsupported("this model writes text only"),
    "function_call": Unsupported("it is replaced by tool_choice"),
    "functions": Unsupported("it is replaced by tools", ([],)),
    "modalities": Unsupported("this model writes text only", (["text"],)),
    "moderation": Unsupported("this server does not moderate"),
    "prediction": Unsupported("predicted outputs are not used yet"),
    "prompt_cache_options": Unsupported("the prefix cache keeps prompts as memory allows"),
    "prompt_cache_retention": Unsupported("the prefix cache keeps prompts as memory allows", ("in_memory",)),
    "realtime": Unsupported("all requests are served alike", (False,)),
    "reasoning_summary": Unsupported("the reasoning itself is in reasoning_content", (False,)),
    "reasoning_summary_wait": Unsupported("the reasoning itself is in reasoning_content", (False,)),
    "service_tier": Unsupported("all requests are served alike", ("auto", "default")),
    "store": Unsupported("this server stores no answers", (False,)),
    "verbosity": Unsupported("state the length in a message", ("medium",)),
    "web_search_options": Unsupported("this server does not search"),
}

# dgemma.text checks messages and tools; these schemas only describe what it accepts.
_NULL = {"type": "null"}
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CALL = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "arguments": {"type": "string", "description": "A JSON object as text."},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        },
    },
    "required": ["function"],
}
_URL = {
    "type": "string",
    "description": "A data URL in base64, or an address of http(s) where those are allowed.",
}
_DETAIL = {"detail": {"enum": [*DETAILS, None]}}
_IMAGE_PARTS = [
    {
        "type": "object",
        "properties": {"type": {"const": kind}, "image_url": url, **more},
        "required": ["type", "image_url"],
        "additionalProperties": False,
    }
    for kind, url, more in (
        (
            "image_url",
            {
                "type": "object",
                "properties": {"url": _URL, **_DETAIL},
                "required": ["url"],
                "additionalProperties": False,
            },
            {},
        ),
        ("input_image", _URL, _DETAIL),
    )
]
_CONTENT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"anyOf": [_TEXT_PART, *_IMAGE_PARTS]}, "minItems": 1},
    ]
}


def _message(roles: list[str], required: list[str], **more: Any) -> dict[str, Any]:
    entries = {"content": _CONTENT, "name": {"type": "string"}, **more}
    # null means absent: clients send their whole message objects back.
    described = {
        name: entry if name in required else {"anyOf": [entry, _NULL]} for name, entry in entries.items()
    }
    properties = {"role": {"enum": roles}, **described}
    return {"type": "object", "properties": properties, "required": ["role", *required]}


MessageField = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "anyOf": [
                _message(["system", "developer", "user"], ["content"]),
                _message(
                    ["assistant", "model"],
                    [],
                    tool_calls={"type": "array", "items": _CALL},
                    reasoning_content={"type": "string"},
                ),
                _message(["tool"], ["content"], tool_call_id={"type": "string"}),
            ],
            "description": "A system message is the first; the last is the user's or a tool's; a tool's "
            "answers a call of the assistant's before it.",
        }
    ),
]
ToolField = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string", "minLength": 1},
                        "description": {"type": "string"},
                        "parameters": {"anyOf": [{"type": "object"}, _NULL]},
                        "strict": {"anyOf": [{"type": "boolean"}, _NULL]},
                    },
                    "required": ["name"],
                    "additionalProperties": False,
                },
            },
            "required": ["function"],
            "additionalProperties": False,
        }
    ),
]
_NAMED_TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string", "minLength": 1}},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "function"],
    "additionalProperties": False,
}
_ToolChoice = Annotated[
    Any, WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required", None]}, _NAMED_TOOL]})
]
_Effort = Annotated[str, WithJsonSchema({"type": "string", "enum": [*EFFORT_OFF, *EFFORT_ON]})]
_FUNCTION_KEYS = ("name", "description", "parameters", "strict")


class ChatTemplateKwargs(RequestModel):
    enable_thinking: bool | None = None


class ChatCompletionRequest(ResponseFormatFields):
    messages: list[MessageField] = Field(min_length=1, examples=[[{"role": "user", "content": "Hello"}]])
    tools: list[ToolField] | None = Field(None, description="Functions that the model may call.")
    tool_choice: _ToolChoice = Field(None, description="Whether a tool is called, or which; default: auto.")
    parallel_tool_calls: bool | None = Field(None, description="False: one call at most.")
    max_completion_tokens: int | None = Field(
        None, ge=1, le=MAX_INT, description="As max_tokens; the smaller one applies."
    )
    logprobs: bool | None = Field(None, description="Return log-probabilities of the tokens.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="With logprobs: so many of the most likely tokens too."
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="vLLM's: list so many likely tokens for each of the prompt."
    )
    reasoning_effort: _Effort | None = Field(None, description="Whether to think; the levels are alike.")
    chat_template_kwargs: ChatTemplateKwargs | None = None

    @property
    def thinking(self) -> bool | None:
        """None: the request does not say."""
        if self.chat_template_kwargs is not None and self.chat_template_kwargs.enable_thinking is not None:
            return self.chat_template_kwargs.enable_thinking
        return None if self.reasoning_effort is None else self.reasoning_effort not in EFFORT_OFF

    @property
    def token_limit(self) -> int | None:
        """Both names are upper bounds: the smaller one satisfies both."""
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(limits, default=None)

    @property
    def token_limit_field(self) -> str:
        return "max_tokens" if self.max_tokens == self.token_limit else "max_completion_tokens"

    @property
    def thinking_field(self) -> str:
        """The field that a refusal of thinking is about."""
        return "chat_template_kwargs" if self.reasoning_effort is None else "reasoning_effort"

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools the model is shown; none with tool_choice "none"."""
        return None if self.tool_choice == "none" else self.tools or None

    @property
    def must_call(self) -> bool:
        return self.tool_choice not in (None, "auto", "none")

    @property
    def named_tool(self) -> str | None:
        """The tool that must be called; None: any."""
        choice = self.tool_choice
        return str(choice["function"]["name"]) if isinstance(choice, dict) else None

    @property
    def num_logprobs(self) -> int | None:
        """Top-k entries to list per token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


def read_chat_request(body: Mapping[str, Any]) -> ChatCompletionRequest:
    request = read_fields(ChatCompletionRequest, body, UNSUPPORTED_IN_CHAT)
    check_tools(request.tools or ())
    _check_tool_choice(request.tool_choice, request.tools or ())
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs is given without logprobs; set logprobs to true.", "top_logprobs")
    effort = request.reasoning_effort
    if effort is not None and effort not in (*EFFORT_OFF, *EFFORT_ON):
        hint = suggestion(effort, (*EFFORT_OFF, *EFFORT_ON))
        raise invalid(
            f"reasoning_effort is {shown(effort)}{hint} Known: {', '.join((*EFFORT_OFF, *EFFORT_ON))}.",
            "reasoning_effort",
        )
    if effort is not None and (effort not in EFFORT_OFF) != request.thinking:
        raise invalid(
            f"reasoning_effort is {effort!r}, but chat_template_kwargs.enable_thinking is "
            f"{str(request.thinking).lower()}; give one of them.",
            "reasoning_effort",
        )
    return request


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what dgemma.text would leave out of a tool."""
    for number, tool in enumerate(tools):
        function = tool.get("function")
        if not isinstance(function, dict):
            continue  # dgemma.text refuses it
        where = f"tools.{number}.function"
        _check_names(tool, ("type", "function"), f"tools.{number}")
        _check_names(function, _FUNCTION_KEYS, where)
        description = function.get("description", "")
        if not isinstance(description, str):
            raise invalid(
                f"{where}.description is {shown(description)}; give a text.", f"{where}.description"
            )
        strict = function.get("strict")
        if strict is not None and not isinstance(strict, bool):
            raise invalid(f"{where}.strict is {shown(strict)}; give true or false.", f"{where}.strict")


def _check_names(entries: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in entries:
        if name not in known:
            path = f"{where}.{name[:60]}"
            raise invalid(f"unknown field '{path}'{suggestion(name[:60], known)}", path, "unknown_parameter")


def _check_tool_choice(choice: object, tools: Sequence[Mapping[str, Any]]) -> None:
    if choice in (None, "none", "auto"):
        return
    match choice:
        case "required" if not tools:
            raise invalid("tool_choice is 'required', but there are no tools; give tools.", "tool_choice")
        case "required":
            return
        case {"type": "function", "function": {"name": str(name), **others}, **more} if not (others or more):
            functions = [tool.get("function") for tool in tools]
            check_named_tool(name, [found.get("name") for found in functions if isinstance(found, dict)])
            return
        case {"type": str(kind)} if kind != "function":
            raise invalid(
                f"tool_choice.type is {shown(kind)}, which is not supported. Give 'function', or 'auto', "
                "'none' or 'required' as tool_choice.",
                "tool_choice.type",
                "unsupported_parameter",
            )
    raise invalid(
        f"tool_choice is {shown(choice)}; give 'auto', 'none', 'required' or "
        '{"type": "function", "function": {"name": ...}}.',
        "tool_choice",
    )


# Responses


class FunctionCall(ResponseModel):
    name: str
    arguments: str = Field(description="A JSON object as text.")


class ChatToolCall(ResponseModel):
    index: int | None = None  # in a stream
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(ResponseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ChatToolCall] | None = None


class ChatChoice(ResponseModel):
    index: int
    message: ChatMessage
    finish_reason: FinishReasonName
    logprobs: ChatLogprobs | None = None
    dgemma: AnswerDetails


class ChatCompletionResponse(TracedResponse):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_logprobs: PromptLogprobs | None = None


class DeltaMessage(ResponseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ChatToolCall] | None = None


class ChatStreamChoice(ResponseModel):
    index: int
    delta: DeltaMessage
    finish_reason: FinishReasonName | None
    logprobs: ChatLogprobs | None = None
    draft: DraftInfo | None = None
    dgemma: AnswerDetails | None = None


class ChatCompletionStreamResponse(ResponseModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatStreamChoice]
    usage: UsageInfo | None = None
