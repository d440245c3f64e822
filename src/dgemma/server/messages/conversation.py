"""From Anthropic's messages to those that the chat template takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dgemma.server.http.errors import ApiError, invalid, shown
from dgemma.server.images import NO_IMAGES, LoadedImages
from dgemma.server.messages.blocks import (
    BlockInput,
    ImageBlockInput,
    MessageInput,
    TextBlockInput,
    ThinkingBlockInput,
    ToolResultBlockInput,
    ToolUseBlockInput,
    text_block,
)

Message = dict[str, Any]


class MessageReader:
    """Splits messages of blocks: each result of a tool is a message of its own."""

    def __init__(
        self, system: str | Sequence[TextBlockInput] | None, images: LoadedImages = NO_IMAGES
    ) -> None:
        self._images = images
        self._system = [] if system is None else [_joined(system)]
        self._messages: list[Message] = []
        self._calls: set[str] = set()  # of the last message of the assistant's

    def add(self, message: MessageInput, where: str) -> None:
        match message.role:
            case "system":
                self._add_system(message, where)
            case "user":
                self._add_user(message, where)
            case "assistant":
                self._add_assistant(message, where)

    def messages(self) -> list[Message]:
        if not self._messages or self._messages[-1]["role"] == "assistant":
            raise invalid(
                "messages ends without a message of the user's; a reply that has begun is not continued.",
                "messages",
            )
        system = [{"role": "system", "content": "\n\n".join(self._system)}] if self._system else []
        return [*system, *self._messages]

    def _add_system(self, message: MessageInput, where: str) -> None:
        if self._messages:
            raise invalid(
                f"{where}.role is 'system' after the conversation began; a chat template has one place for "
                "instructions, at the beginning. Give it as system, or as a user's message.",
                f"{where}.role",
                "unsupported_parameter",
            )
        for number, block in enumerate(message.blocks):
            if not isinstance(block, TextBlockInput):
                raise _misplaced(block, f"{where}.content.{number}", "a system message")
        self._system.append("".join(b.text for b in message.blocks if isinstance(b, TextBlockInput)))

    def _add_user(self, message: MessageInput, where: str) -> None:
        parts: list[dict[str, Any]] = []
        for number, block in enumerate(message.blocks):
            place = f"{where}.content.{number}"
            match block:
                case ToolResultBlockInput() if parts:
                    raise invalid(f"{place} is a tool_result after other content; results come first.", place)
                case ToolResultBlockInput():
                    self._add_result(block, place)
                case TextBlockInput() | ImageBlockInput():
                    parts.append(self._part(block, place))
                case _:
                    raise _misplaced(block, place, "a user's message")
        if parts or not message.blocks:
            self._messages.append({"role": "user", "content": _content(parts)})
            self._calls = set()

    def _add_result(self, block: ToolResultBlockInput, place: str) -> None:
        if block.tool_use_id not in self._calls:
            raise invalid(
                f"{place}.tool_use_id is {shown(block.tool_use_id)}, but the assistant's message before it "
                "has no tool_use with this id; give the call too.",
                f"{place}.tool_use_id",
            )
        given = block.content
        blocks = [text_block(given)] if isinstance(given, str) else given
        content = _content(
            [self._part(part, f"{place}.content.{number}") for number, part in enumerate(blocks)]
        )
        self._messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})

    def _part(self, block: TextBlockInput | ImageBlockInput, place: str) -> dict[str, Any]:
        if isinstance(block, ImageBlockInput):
            return self._images.part({"type": "image_url", "image_url": {"url": block.url}}, place)
        return {"type": "text", "text": block.text}

    def _add_assistant(self, message: MessageInput, where: str) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for number, block in enumerate(message.blocks):
            match block:
                case TextBlockInput():
                    texts.append(block.text)
                case ThinkingBlockInput():
                    thoughts.append(block.thinking)
                case ToolUseBlockInput():
                    function = {"name": block.name, "arguments": block.input}
                    calls.append({"id": block.id, "type": "function", "function": function})
                case _:
                    raise _misplaced(block, f"{where}.content.{number}", "the assistant's message")
        self._calls = {call["id"] for call in calls}
        reply: Message = {"role": "assistant", "content": "".join(texts)}
        if thoughts:
            reply["reasoning_content"] = "".join(thoughts)
        if calls:
            reply["tool_calls"] = calls
        self._messages.append(reply)


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """The content of a message: a text, or with images the parts that the chat template takes."""
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _joined(system: str | Sequence[TextBlockInput]) -> str:
    return system if isinstance(system, str) else "\n\n".join(block.text for block in system)


def _misplaced(block: BlockInput, place: str, message: str) -> ApiError:
    return invalid(f"{place} is of type {block.type!r}, which {message} cannot hold.", f"{place}.type")
