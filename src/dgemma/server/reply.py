"""A reply to a conversation: what chat completions, responses and messages share.

Each of them reads a request of its own form into a `ChatTurn`. From there on all take one path: the chat
template, the format of text and tool calls, the plan of one engine request per answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dgemma.errors import InputError, suggestion
from dgemma.events import Answer
from dgemma.images.prompt import ImagePrompt
from dgemma.server.http.errors import invalid, shown
from dgemma.server.plan import ResponseWriter, ServingPlan
from dgemma.server.protocol import ReplyFields
from dgemma.server.response_format import RequestedFormat
from dgemma.server.serving import GenerationInfo, Prompts, ServingBase, check_end_tokens
from dgemma.structured_output.response_format import TextFormat, tool_call_format
from dgemma.text.messages import MAX_TOOLS

# Other servers' levels of effort: here thinking is on or off.
EFFORT_OFF = ("none", "instant")
EFFORT_ON = ("minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, kw_only=True)
class ChatTurn:
    """What a reply answers, in the form of chat completions."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None  # that the model is shown
    must_call: bool = False
    named_tool: str | None = None  # the tool that must be called; None: any
    parallel_calls: bool = True
    text_format: tuple[str, TextFormat] | None = None  # the field that sets it, and the format
    thinking: bool | None = None  # None: as this server does it
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    # The client's spelling of the fields that the chat template refuses; others are spelled alike.
    field_names: Mapping[str, str] = field(default_factory=dict)

    def spelled(self, name: str) -> str:
        return self.field_names.get(name, name)


class ReplyServing(ServingBase):
    """The base of the handlers that answer a conversation."""

    def reply_plan(
        self,
        request: ReplyFields,
        turn: ChatTurn,
        *,
        prefix: str,
        writer: Callable[[GenerationInfo], ResponseWriter[list[Answer]]],
        logprobs: int | None = None,
        num_prompt_logprobs: int | None = None,
    ) -> ServingPlan[list[Answer]]:
        self.adapter(request.model)  # refused before the template is rendered
        prompt = self.prompt(turn)
        prompts = Prompts(
            tokens=[prompt.tokens],
            images=prompt.images,
            field=turn.spelled("messages"),
            max_tokens=turn.max_tokens,
            max_tokens_field=turn.max_tokens_field,
        )
        response_format = reply_format(turn, thinks=self.context.thinking)
        check_end_tokens(request, response_format)
        info = self.generation_info(
            request, prompts, prefix=prefix, logprobs=logprobs, has_tools=turn.tools is not None
        )
        return self.generation_plan(
            request,
            prompts,
            info,
            writer(info),
            response_format,
            num_prompt_logprobs=num_prompt_logprobs,
        )

    def prompt(self, turn: ChatTurn) -> ImagePrompt:
        """The chat template's token ids, with the images among them."""
        messages = self.context.images.place(turn.messages, turn.spelled("messages"))
        thinking = self.context.thinking if turn.thinking is None else turn.thinking
        try:
            return self.text.render_chat(messages, tools=turn.tools, thinking=thinking)
        except InputError as error:
            raise invalid(str(error), turn.spelled(error.field or "messages"), error.code) from None


def reply_format(turn: ChatTurn, *, thinks: bool) -> RequestedFormat | None:
    """The format of the answer: of the text, of tool calls, or of either; None: unconstrained.

    thinks: whether a turn that does not say so may begin with a thought.
    """
    must_call, named = turn.must_call, turn.named_tool
    name, text_format = turn.text_format or (None, None)
    tools = [tool for tool in turn.tools or () if named in (None, tool["function"]["name"])]
    try:
        calls = tool_call_format(
            tools, required=must_call, parallel=turn.parallel_calls, text_format=text_format
        )
    except InputError as error:
        raise invalid(f"tools: {error}", "tools") from None
    response_format = calls or text_format
    if response_format is None:
        return None
    name = "tool_choice" if must_call else name or "tools"
    thinking = thinks if turn.thinking is None else turn.thinking
    return RequestedFormat(response_format=response_format, field=name, thinking=thinking)


def check_tool_choice(must_call: bool, named: str | None, tools: Sequence[str]) -> None:
    """Refuse a tool_choice that asks for a call which these tools do not allow."""
    if must_call and not tools:
        raise invalid("tool_choice asks for a call, but there are no tools; give tools.", "tool_choice")
    if named is not None:
        check_named_tool(named, tools)


def check_named_tool(name: str, known: Sequence[object]) -> None:
    """Refuse a tool_choice whose tool is not among `known`."""
    if name not in known:
        # The tools were not counted yet.
        hint = suggestion(name[:60], [each for each in known[:MAX_TOOLS] if isinstance(each, str)])
        raise invalid(
            f"tool_choice names the function {shown(name)}, which is not among tools{hint}", "tool_choice"
        )
