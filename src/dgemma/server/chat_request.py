"""What POST /v1/chat/completions takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from dgemma.errors import suggestion
from dgemma.params import MAX_LOGPROBS
from dgemma.server.api_error import refused, shown
from dgemma.server.fields import UNSUPPORTED_IN_CHAT
from dgemma.server.form_fields import FormFields
from dgemma.server.request_fields import MAX_INT, Fields, read_fields

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


class TemplateOptions(Fields):
    enable_thinking: bool | None = None


class ChatRequest(FormFields):
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
    def must_call(self) -> bool:
        return self.tool_choice not in (None, "auto", "none")

    @property
    def named_tool(self) -> str | None:
        """The one that is to be called; None: any."""
        choice = self.tool_choice
        return str(choice["function"]["name"]) if isinstance(choice, dict) else None

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
    for number, tool in enumerate(request.tools or []):
        function = tool.get("function")
        if not isinstance(function, dict):
            continue  # dgemma.text says what a tool looks like
        where = f"tools.{number}.function"
        _check_names(tool, ("type", "function"), f"tools.{number}")
        _check_names(function, _FUNCTION_KEYS, where)
        told = function.get("description", "")
        if not isinstance(told, str):
            raise refused(f"{where}.description is {shown(told)}; give a text.", f"{where}.description")
        strict = function.get("strict")
        if strict is not None and not isinstance(strict, bool):
            raise refused(f"{where}.strict is {shown(strict)}; give true or false.", f"{where}.strict")
    _check_tool_choice(request.tool_choice, request.tools or [])


def _check_names(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in given:
        if name not in known:
            path = f"{where}.{name[:60]}"
            raise refused(f"unknown field '{path}'{suggestion(name[:60], known)}", path, "unknown_parameter")


def _check_tool_choice(choice: object, tools: Sequence[Mapping[str, Any]]) -> None:
    if choice in (None, "none", "auto"):
        return
    match choice:
        case "required" if not tools:
            raise refused("tool_choice is 'required', but there are no tools; give tools.", "tool_choice")
        case "required":
            return
        case {"type": "function", "function": {"name": str(name), **others}, **more} if not (others or more):
            functions = [tool.get("function") for tool in tools]
            known = [found.get("name") for found in functions if isinstance(found, dict)]
            if name not in known:
                hint = suggestion(name[:60], [each for each in known if isinstance(each, str)])
                raise refused(
                    f"tool_choice names the function {shown(name)}, which is not among tools{hint}",
                    "tool_choice",
                )
            return
        case {"type": str(kind)} if kind != "function":
            raise refused(
                f"tool_choice.type is {shown(kind)}, which is not supported. Give 'function', or 'auto', "
                "'none' or 'required' as tool_choice.",
                "tool_choice.type",
                "unsupported_parameter",
            )
    raise refused(
        f"tool_choice is {shown(choice)}; give 'auto', 'none', 'required' or "
        '{"type": "function", "function": {"name": ...}}.',
        "tool_choice",
    )
