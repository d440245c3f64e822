"""The messages and tool declarations of a chat, validated and normalized for templates."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from dgemma.errors import InputError, error_field, suggestion
from dgemma.images.decode import RgbImage
from dgemma.images.preprocess import ImagePatches
from dgemma.text.json_value import JsonReader

MAX_MESSAGES = 10_000
MAX_TOOLS = 1024
# Role names of other APIs.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_KEYS = {
    "system": ("role", "content", "name"),
    "user": ("role", "content", "name"),
    "assistant": ("role", "content", "name", "tool_calls", *_REASONING),
    "tool": ("role", "content", "name", "tool_call_id"),
}
MessageImage = RgbImage | ImagePatches
"""The image of a content part: decoded, or cut into patches already."""
_MEDIA = ("image", "audio", "video", "file")
_ROLES_WITH_IMAGES = ("user", "tool")


@error_field("messages")
def read_messages(
    messages: object, reader: JsonReader, *, for_reply: bool, images: list[MessageImage] | None = None
) -> list[dict[str, Any]]:
    """Checked copies: roles are system, user, assistant or tool, `content` is a string.

    images: takes the images of all messages, in order; None: they are refused. The content of a message with
      images is a list of parts, of which those of type "image" hold nothing.
    for_reply: the model answers next, so the last message must not be the assistant's.
    """
    if not isinstance(messages, list | tuple):
        raise InputError(f"messages is of type {type(messages).__name__}; give a list of messages.")
    if not messages:
        raise InputError("messages is empty; give at least one message.")
    if len(messages) > MAX_MESSAGES:
        raise InputError(f"messages has {len(messages)} messages; at most {MAX_MESSAGES} are allowed.")
    chat: list[dict[str, Any]] = []
    calls: dict[str | None, str] | None = None  # the calls a tool message may answer: name by id
    for number, raw in enumerate(messages, start=1):
        message = _read_message(raw, reader, images, f"message {number}")
        match message["role"]:
            case "system" if number > 1:
                raise InputError(f"message {number} has role 'system'; only the first message may have it.")
            case "tool":
                message["name"] = _answered_tool(message, calls, f"message {number}")
            case "assistant" if "tool_calls" in message:
                calls = {call.get("id"): call["function"]["name"] for call in message["tool_calls"]}
            case _:
                calls = None
        chat.append(message)
    if for_reply and chat[-1]["role"] not in ("user", "tool"):
        raise InputError(
            f"message {len(chat)}, the last, has role {chat[-1]['role']!r}; a reply follows a user or tool "
            "message."
        )
    return chat


def holds_images(messages: object) -> bool:
    """Whether there is an image part in messages that are not checked yet."""
    contents = (
        [m.get("content") for m in messages if isinstance(m, dict)]
        if isinstance(messages, list | tuple)
        else []
    )
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return any(isinstance(part, dict) and part.get("type") == "image" for part in parts)


def _read_message(
    raw: object, reader: JsonReader, images: list[MessageImage] | None, where: str
) -> dict[str, Any]:
    message = _present(raw, where)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InputError(f"{where} has role {_short(role)}; known are {', '.join(ROLES)}{_hint(role, ROLES)}")
    role = ROLES[role]
    _refuse_unknown(message, _KEYS[role], where)
    checked: dict[str, Any] = {"role": role, "content": _read_content(message, role, reader, images, where)}
    for key in ("name", "tool_call_id"):
        if key in message:
            checked[key] = reader.text(message[key], f"{where}: {key}")
    if "tool_calls" in message:
        checked["tool_calls"] = _read_calls(message["tool_calls"], reader, f"{where}: tool_calls")
    reasoning = {reader.text(message[key], f"{where}: {key}"): key for key in _REASONING if key in message}
    if len(reasoning) > 1:
        raise InputError(f"{where} gives different texts as {' and '.join(reasoning.values())}; give one.")
    for text in reasoning:
        # Templates read the reasoning content under any of these names.
        checked |= dict.fromkeys(_REASONING, text)
    return checked


def _read_content(
    message: dict[str, Any], role: str, reader: JsonReader, images: list[MessageImage] | None, where: str
) -> str | list[dict[str, str]]:
    content = message.get("content", [] if role == "assistant" and "tool_calls" in message else None)
    if isinstance(content, str):
        return reader.text(content, f"{where}: content")
    if not isinstance(content, list | tuple):
        kind = "missing or null" if content is None else f"of type {type(content).__name__}"
        raise InputError(f"{where}: content is {kind}; give a string or a list of text parts.")
    parts: list[dict[str, str]] = []
    for part in content:
        if images is None or not isinstance(part, dict) or part.get("type") != "image":
            parts.append({"type": "text", "text": _read_part(part, reader, where)})
            continue
        if role not in _ROLES_WITH_IMAGES:
            raise InputError(f"{where} has role {role!r} and an image; only user and tool messages may.")
        images.append(_read_image_part(part, where))
        parts.append({"type": "image"})
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _read_image_part(part: dict[str, Any], where: str) -> MessageImage:
    _refuse_unknown(part, ("type", "image"), f"{where}: an image part")
    image = part.get("image")
    if not isinstance(image, RgbImage | ImagePatches):
        kind = "missing" if image is None else f"of type {type(image).__name__}"
        raise InputError(f"{where}: the image of an image part is {kind}; give a decoded image.")
    return image


def _read_part(raw: object, reader: JsonReader, where: str) -> str:
    part = _present(raw, f"{where}: a content part")
    kind = part.get("type")
    if isinstance(kind, str):
        for medium in _MEDIA:
            if medium in kind:
                raise InputError(
                    f"{medium}s are not supported yet; remove the {_short(kind)} part of {where}."
                )
    if kind != "text":
        raise InputError(f"{where} has a content part of type {_short(kind)}; only 'text' is known.")
    _refuse_unknown(part, ("type", "text"), f"{where}: a content part")
    return reader.text(part.get("text"), f"{where}: the text of a content part")


def _read_calls(raw: object, reader: JsonReader, where: str) -> list[dict[str, Any]]:
    if not isinstance(raw, list | tuple):
        raise InputError(f"{where} is of type {type(raw).__name__}; give a list of calls.")
    calls = []
    for item in raw:
        call = _present(item, where)
        _refuse_unknown(call, ("id", "type", "function", "index"), where)
        if call.get("type", "function") != "function":
            raise InputError(
                f"{where} holds a call of type {_short(call['type'])}; only 'function' is known."
            )
        function = _present(call.get("function"), f"{where}: function")
        _refuse_unknown(function, ("name", "arguments"), f"{where}: function")
        name = reader.text(function.get("name"), f"{where}: the function's name")
        arguments = _read_arguments(function.get("arguments", {}), reader, f"{where}: arguments")
        read = {"type": "function", "function": {"name": name, "arguments": arguments}}
        if "id" in call:
            read["id"] = reader.text(call["id"], f"{where}: id")
        calls.append(read)
    return calls


def _read_arguments(raw: object, reader: JsonReader, where: str) -> Any:
    """An object. OpenAI clients send it as JSON text, which templates would render as a string."""
    if isinstance(raw, str):
        text = reader.text(raw, where)
        try:
            raw = json.loads(text) if text.strip() else {}
        except (ValueError, RecursionError):
            raise InputError(f"{where} is a string that is not valid JSON; give an object.") from None
    if not isinstance(raw, dict):
        raise InputError(f"{where} is of type {type(raw).__name__}; give an object.")
    return reader.read(raw, where)


def _answered_tool(message: dict[str, Any], calls: dict[str | None, str] | None, where: str) -> str:
    """The name of the tool whose result this is."""
    if calls is None:
        raise InputError(
            f"{where} has role 'tool', but no assistant message with tool_calls comes before it."
        )
    id_ = message.get("tool_call_id")
    if id_ is not None and None not in calls and id_ not in calls:
        raise InputError(
            f"{where} answers tool call {_short(id_)}; the calls before it are {_short(list(calls))}."
        )
    name = calls.get(id_, message.get("name")) if id_ is not None else message.get("name")
    if name is None:
        raise InputError(f"{where} does not say which call it answers; give tool_call_id or name.")
    return str(name)


@error_field("tools")
def read_tools(tools: object, reader: JsonReader) -> list[dict[str, Any]] | None:
    """Checked copies, or None when there are no tools."""
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        raise InputError(f"tools is of type {type(tools).__name__}; give a list of declarations.")
    if len(tools) > MAX_TOOLS:
        raise InputError(f"tools has {len(tools)} declarations; at most {MAX_TOOLS} are allowed.")
    return [_read_tool(tool, reader, f"tool {number}") for number, tool in enumerate(tools, start=1)] or None


def _read_tool(raw: object, reader: JsonReader, where: str) -> dict[str, Any]:
    tool: dict[str, Any] = reader.read(raw, where)
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise InputError(f'{where} is not of the form {{"type": "function", "function": {{...}}}}.')
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise InputError(f"{where} has no name; give function.name as a string.")
    if not isinstance(function.get("parameters", {}), dict | None):
        raise InputError(f"{where}: parameters is not an object; give a JSON schema.")
    return tool


def _present(raw: object, where: str) -> dict[str, Any]:
    """The entries of an object without null and []: clients send unused fields so."""
    if not isinstance(raw, dict):
        raise InputError(f"{where} is of type {type(raw).__name__}; give an object.")
    return {
        key: value
        for key, value in raw.items()
        if not (value is None or (isinstance(value, list) and not value))
    }


def _refuse_unknown(entries: Iterable[object], known: tuple[str, ...], where: str) -> None:
    for key in entries:
        if key not in known:
            raise InputError(f"{where} has an unknown key {_short(key)}{_hint(key, known)}")


def _hint(name: object, known: Iterable[str]) -> str:
    return suggestion(name, known) if isinstance(name, str) and len(name) <= 40 else "."


def _short(value: object) -> str:
    """A caller's value in an error message: one line, shortened."""
    shown = repr(value) if isinstance(value, str | list | None) else f"of type {type(value).__name__}"
    return shown if len(shown) <= 60 else shown[:57] + "..."
