"""From the items of an input to the messages that the chat template takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dgemma.server.http.errors import ApiError, invalid, shown
from dgemma.server.responses.items import (
    ContentPart,
    FunctionCallInput,
    FunctionCallOutputInput,
    InputImagePart,
    InputItem,
    InputMessage,
    ReasoningInput,
    RefusalPart,
)

Message = dict[str, Any]


class ItemReader:
    """Joins items to messages: a thought, a text and calls of the assistant's are one message."""

    def __init__(self, instructions: str | None) -> None:
        self._system = [] if instructions is None else [instructions]
        self._messages: list[Message] = []
        self._reply: Message | None = None  # of the assistant, still growing
        self._calls: set[str] = set()

    def add(self, item: InputItem, where: str) -> None:
        match item:
            case InputMessage(role="system" | "developer"):
                self._add_system(item, where)
            case InputMessage(role="user"):
                self._append({"role": "user", "content": _content(item.content)})
            case InputMessage():
                self._grow("content", _plain_text(item.content, where))
            case ReasoningInput():
                self._grow("reasoning_content", _thought(item))
            case FunctionCallInput():
                self._calls.add(item.call_id)
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                self._begun_reply().setdefault("tool_calls", []).append(call)
            case FunctionCallOutputInput():
                if item.call_id not in self._calls:
                    raise invalid(
                        f"{where}.call_id is {shown(item.call_id)}, but no function_call before it has this "
                        "call_id; give the call too.",
                        f"{where}.call_id",
                    )
                self._append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})

    def messages(self) -> list[Message]:
        self._end_reply()
        if not self._messages or self._messages[-1]["role"] == "assistant":
            raise invalid(
                "input does not end with what a reply follows: a message of the user's or a "
                "function_call_output.",
                "input",
            )
        system = [{"role": "system", "content": "\n\n".join(self._system)}] if self._system else []
        return [*system, *self._messages]

    def _add_system(self, item: InputMessage, where: str) -> None:
        if self._messages or self._reply is not None:
            raise invalid(
                f"{where}.role is {item.role!r} after the conversation began; a chat template has one place "
                "for instructions, at the beginning. Move it there, or give it as a user's message.",
                f"{where}.role",
                "unsupported_parameter",
            )
        self._system.append(_plain_text(item.content, where))

    def _append(self, message: Message) -> None:
        self._end_reply()
        self._messages.append(message)

    def _begun_reply(self) -> Message:
        if self._reply is None:
            self._reply = {"role": "assistant", "content": ""}
        return self._reply

    def _grow(self, field: str, text: str) -> None:
        reply = self._begun_reply()
        reply[field] = reply.get(field, "") + text

    def _end_reply(self) -> None:
        if self._reply is not None:
            self._messages.append(self._reply)
            self._reply = None


def _content(content: str | Sequence[ContentPart]) -> str | list[dict[str, Any]]:
    """The content of a message: a text, or with images the parts of chat completions."""
    if isinstance(content, str):
        return content
    parts = [_chat_part(part) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _chat_part(part: ContentPart) -> dict[str, Any]:
    match part:
        case InputImagePart():
            detail = {} if part.detail is None else {"detail": part.detail}
            return {"type": "image_url", "image_url": {"url": part.image_url, **detail}}
        case RefusalPart():
            return {"type": "text", "text": part.refusal}
    return {"type": "text", "text": part.text}


def _plain_text(content: str | Sequence[ContentPart], where: str) -> str:
    found = _content(content)
    if isinstance(found, str):
        return found
    raise _misplaced_image(where)


def _misplaced_image(where: str) -> ApiError:
    return invalid(f"{where}.content holds an image; only messages of the user's may.", f"{where}.content")


def _thought(item: ReasoningInput) -> str:
    return "".join(part.text for part in item.content or item.summary or ())
