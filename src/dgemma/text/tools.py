"""The tools of a chat: declarations in OpenAI's form, checked."""

from __future__ import annotations

from typing import Any

from dgemma.errors import InputError
from dgemma.text.json_value import JsonReader

MAX_TOOLS = 1024


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
