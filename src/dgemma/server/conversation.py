"""The input of a decision as messages that a chat template takes: calls and their results as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dgemma.server.api_error import refused, shown
from dgemma.server.decision_request import (
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCallItem,
    FunctionCallOutput,
    Item,
    Message,
    text_of,
)

Role = Literal["system", "user", "assistant"]


def messages_of(items: Sequence[Item]) -> list[dict[str, str]]:
    """One message per turn. Instructions come first; what a template has no place for is told in words."""
    turns: list[tuple[Role, str]] = []
    called: dict[str, str] = {}  # names by the id of their call
    for number, item in enumerate(items):
        where = f"input.{number}"
        match item:
            case Message():
                turns.append(_spoken(item, where, is_first=all(role == "system" for role, _ in turns)))
            case FunctionCallItem() | CustomToolCall():
                called[item.call_id] = item.name
                given = item.arguments if isinstance(item, FunctionCallItem) else item.input
                turns.append(("assistant", f"Calls {item.name}: {given}"))
            case FunctionCallOutput() | CustomToolCallOutput():
                if item.call_id not in called:
                    raise refused(
                        f"{where}.call_id is {shown(item.call_id)}; no call before it has this id.",
                        f"{where}.call_id",
                    )
                result = text_of(item.output, f"{where}.output")
                turns.append(("user", f"Result of {called[item.call_id]}: {result}"))
    messages: list[dict[str, str]] = []
    for role, text in turns:
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += f"\n\n{text}"
        else:
            messages.append({"role": role, "content": text})
    return messages


def _spoken(message: Message, where: str, *, is_first: bool) -> tuple[Role, str]:
    text = text_of(message.content, f"{where}.content")
    if message.role in ("system", "developer"):
        return ("system", text) if is_first else ("user", f"{message.role}: {text}")
    return ("assistant" if message.role == "assistant" else "user"), text
