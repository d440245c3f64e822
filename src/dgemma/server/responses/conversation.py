"""From the items of an input to the messages that the chat template takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dgemma.server.http.errors import invalid, shown
from dgemma.server.images import NO_IMAGES, LoadedImages
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
_TEXTS = ("content", "reasoning_content")  # of a reply


class ItemReader:
    """Joins items to messages: a thought, a text and calls of the assistant's are one message."""

    def __init__(self, instructions: str | None, images: LoadedImages = NO_IMAGES) -> None:
        self._images = images
        self._system = [] if instructions is None else [instructions]
        self._messages: list[Message] = []
        self._reply: Message | None = None  # of the assistant, still growing: its texts are lists of parts
        self._calls: set[str] = set()

    def add(self, item: InputItem, where: str) -> None:
        match item:
            case InputMessage(role="system" | "developer"):
                self._add_system(item, where)
            case InputMessage(role="user"):
                self._append({"role": "user", "content": self._content(item.content, f"{where}.content")})
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
                content = self._content(item.output, f"{where}.output")
                self._append({"role": "tool", "tool_call_id": item.call_id, "content": content})

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

    def _content(self, content: str | Sequence[ContentPart], where: str) -> str | list[dict[str, Any]]:
        """The content of a message: a text, or with images the parts that the chat template takes."""
        if isinstance(content, str) or not any(isinstance(part, InputImagePart) for part in content):
            return _joined(content)
        return [
            self._images.part(_image(part), f"{where}.{number}")
            if isinstance(part, InputImagePart)
            else {"type": "text", "text": _joined([part])}
            for number, part in enumerate(content)
        ]

    def _append(self, message: Message) -> None:
        self._end_reply()
        self._messages.append(message)

    def _begun_reply(self) -> Message:
        if self._reply is None:
            self._reply = {"role": "assistant", "content": []}
        return self._reply

    def _grow(self, field: str, text: str) -> None:
        self._begun_reply().setdefault(field, []).append(text)

    def _end_reply(self) -> None:
        if self._reply is not None:
            joined = {name: "".join(self._reply[name]) for name in _TEXTS if name in self._reply}
            self._messages.append({**self._reply, **joined})
            self._reply = None


def _joined(content: str | Sequence[ContentPart]) -> str:
    """The texts of a content, without its images."""
    if isinstance(content, str):
        return content
    texts = [
        part.refusal if isinstance(part, RefusalPart) else part.text
        for part in content
        if not isinstance(part, InputImagePart)
    ]
    return "".join(texts)


def _image(part: InputImagePart) -> dict[str, Any]:
    detail = {} if part.detail is None else {"detail": part.detail}
    return {"type": "image_url", "image_url": {"url": part.image_url, **detail}}


def _plain_text(content: str | Sequence[ContentPart], where: str) -> str:
    if any(isinstance(part, InputImagePart) for part in content):
        raise invalid(f"{where}.content holds an image; only messages of the user's may.", f"{where}.content")
    return _joined(content)


def _thought(item: ReasoningInput) -> str:
    return "".join(part.text for part in item.content or item.summary or ())
