"""What POST /v1/chat/completions takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from dgemma.errors import suggestion
from dgemma.params import MAX_LOGPROBS
from dgemma.server.api_error import refused, shown
from dgemma.server.fields import UNSUPPORTED_IN_CHAT
from dgemma.server.request_fields import MAX_INT, Fields, GenerationFields, read_fields

# The other names are other servers' levels of effort: here thinking is on or off.
EFFORT_OFF = ("none", "instant")
EFFORT_ON = ("minimal", "low", "medium", "high", "xhigh", "max")

# dgemma.text checks messages and tools; here stands only what it takes.
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
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART, "minItems": 1}]}


def _message(roles: list[str], required: list[str], **more: Any) -> dict[str, Any]:
    entries = {"content": _CONTENT, "name": {"type": "string"}, **more}
    # A null says no more than an absent entry: clients send their whole message objects back.
    described = {
        name: entry if name in required else {"anyOf": [entry, _NULL]} for name, entry in entries.items()
    }
    properties = {"role": {"enum": roles}, **described}
    return {"type": "object", "properties": properties, "required": ["role", *required]}


Message = Annotated[
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
Tool = Annotated[
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
                        "parameters": {"type": "object"},
                        "strict": {"const": False},
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
_ToolChoice = Annotated[Any, WithJsonSchema({"enum": ["none", "auto", None]})]
_Effort = Annotated[str, WithJsonSchema({"type": "string", "enum": [*EFFORT_OFF, *EFFORT_ON]})]
_FUNCTION_KEYS = ("name", "description", "parameters", "strict")


class TemplateOptions(Fields):
    enable_thinking: bool | None = None


class ChatRequest(GenerationFields):
    messages: list[Message] = Field(min_length=1, examples=[[{"role": "user", "content": "Hello"}]])
    tools: list[Tool] | None = None
    tool_choice: _ToolChoice = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    reasoning_effort: _Effort | None = None
    chat_template_kwargs: TemplateOptions | None = None

    @property
    def thinking(self) -> bool:
        if self.chat_template_kwargs is not None and self.chat_template_kwargs.enable_thinking is not None:
            return self.chat_template_kwargs.enable_thinking
        return self.reasoning_effort is not None and self.reasoning_effort not in EFFORT_OFF

    @property
    def token_limit(self) -> int | None:
        """Both names are upper bounds, so the smaller one keeps both."""
        given = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(given, default=None)

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """A tool that must not be called is not shown to the model."""
        return None if self.tool_choice == "none" else self.tools or None

    @property
    def logprobs_wanted(self) -> int | None:
        """Likeliest words to list per token; None: no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None


def read_chat_request(body: Mapping[str, Any]) -> ChatRequest:
    request = read_fields(ChatRequest, body, UNSUPPORTED_IN_CHAT)
    _check_tools(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise refused("top_logprobs is given without logprobs; set logprobs to true.", "top_logprobs")
    effort = request.reasoning_effort
    if effort is not None and effort not in (*EFFORT_OFF, *EFFORT_ON):
        hint = suggestion(effort, (*EFFORT_OFF, *EFFORT_ON))
        raise refused(
            f"reasoning_effort is {shown(effort)}{hint} Known: {', '.join((*EFFORT_OFF, *EFFORT_ON))}.",
            "reasoning_effort",
        )
    if effort is not None and (effort not in EFFORT_OFF) != request.thinking:
        raise refused(
            f"reasoning_effort is {effort!r}, but chat_template_kwargs.enable_thinking is "
            f"{str(request.thinking).lower()}; give one of them.",
            "reasoning_effort",
        )
    return request


def _check_tools(request: ChatRequest) -> None:
    choice = request.tool_choice
    if choice not in (None, "none", "auto"):
        named = isinstance(choice, dict) or choice == "required"
        why = ": that a tool is called cannot be promised yet" if named else ""
        raise refused(
            f"tool_choice is {shown(choice)}, which is not supported{why}. Give 'auto' or 'none'.",
            "tool_choice",
            "unsupported_parameter" if named else "invalid_value",
        )
    if request.parallel_tool_calls is False and request.offered_tools:
        raise refused(
            "parallel_tool_calls is false, which is not supported: the model writes as many calls as it "
            "likes. Leave it out.",
            "parallel_tool_calls",
            "unsupported_parameter",
        )
    for number, tool in enumerate(request.tools or []):
        function = tool.get("function")
        if not isinstance(function, dict):
            continue  # dgemma.text says what a tool looks like
        where = f"tools.{number}.function"
        for name in function:
            if name not in _FUNCTION_KEYS:
                raise refused(
                    f"unknown field '{where}.{name[:60]}'{suggestion(name[:60], _FUNCTION_KEYS)}",
                    f"{where}.{name[:60]}",
                    "unknown_parameter",
                )
        if function.get("strict"):
            raise refused(
                f"{where}.strict is true, which is not supported: that arguments keep to a schema cannot be "
                "promised yet. Leave it out.",
                f"{where}.strict",
                "unsupported_parameter",
            )
