"""Response formats: a regular expression, a choice of texts, JSON (of a schema), tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dgemma.errors import InputError

MAX_CHOICES = 10_000
MAX_FORMAT_CHARS = 4 << 20  # of a pattern, a schema or all choices together
# The schema of a function that declares no parameters.
_NO_ARGUMENTS = json.dumps({"properties": {}, "additionalProperties": False})


@dataclass(frozen=True)
class RegexFormat:
    """The whole text matches the regular expression."""

    pattern: str


@dataclass(frozen=True)
class ChoiceFormat:
    """The text is one of these options."""

    options: tuple[str, ...]


@dataclass(frozen=True)
class JsonFormat:
    """A JSON value valid for a JSON Schema; without a schema, any JSON object."""

    schema: str | None = None  # JSON text; the order of its members is the order of the output


TextFormat = RegexFormat | ChoiceFormat | JsonFormat


@dataclass(frozen=True)
class Tool:
    name: str
    schema: str | None = None  # JSON Schema of the arguments; None: any object
    strict: bool = False  # False: any object is allowed when the schema cannot be compiled


@dataclass(frozen=True)
class ToolCallFormat:
    """Calls of these tools."""

    tools: tuple[Tool, ...]
    allow_text: bool = False  # text may come before the calls, or replace them
    parallel: bool = True  # more than one call is allowed
    text_format: TextFormat | None = None  # a text of this format may replace the calls

    def relaxed(self) -> ToolCallFormat:
        """The same format with the schemas of strict tools only."""
        return replace(self, tools=tuple(tool if tool.strict else Tool(tool.name) for tool in self.tools))


ResponseFormat = TextFormat | ToolCallFormat

FORMAT_OPTIONS = ("regex", "choice", "json_schema", "json_object")
"""The keyword options that set a text format; at most one of them is set."""


def schema_text(schema: object, name: str = "json_schema", *, field: str | None = None) -> str:
    """A schema (JSON text, a mapping, true or false) as JSON text.

    name: how error messages call it. field: the `InputError.field`, if that is not `name`.
    """
    field = name if field is None else field
    if isinstance(schema, str) and len(schema) > MAX_FORMAT_CHARS:
        raise _too_long(name, len(schema), field)
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(found, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise InputError(f"{name} is nested too deep; flatten it.", field=field) from None
    except (ValueError, TypeError) as error:
        raise InputError(f"{name} is no JSON: {error}", field=field) from None
    if not isinstance(found, Mapping | bool):
        raise InputError(f"{name} is a {type(found).__name__}; a JSON Schema is an object.", field=field)
    if len(text) > MAX_FORMAT_CHARS:
        raise _too_long(name, len(text), field)
    return text


def response_format_of(options: Mapping[str, Any]) -> TextFormat | None:
    """The text format that these options set; None if they set none."""
    given = {name: options[name] for name in FORMAT_OPTIONS if options.get(name) not in (None, False)}
    if len(given) > 1:
        raise InputError(
            f"{' and '.join(given)} are both given; an answer has one response format. Give one of them.",
            field=list(given)[1],
        )
    for name, value in given.items():
        if name == "regex":
            if not isinstance(value, str):
                raise InputError(f"regex is {value!r}; give a regular expression as text.", field="regex")
            return RegexFormat(value)
        if name == "choice":
            return choice_format(value)
        return JsonFormat(schema_text(value)) if name == "json_schema" else JsonFormat()
    return None


def pop_response_format(options: dict[str, Any]) -> TextFormat | None:
    """Like `response_format_of`; removes these options from `options`."""
    return response_format_of({name: options.pop(name, None) for name in FORMAT_OPTIONS})


def tool_call_format(
    tools: Sequence[Mapping[str, Any]],
    *,
    required: bool,
    parallel: bool = True,
    text_format: TextFormat | None = None,
) -> ToolCallFormat | None:
    """The format of calls of a chat's tools; None if the request does not constrain its tool calls."""
    functions = [tool["function"] for tool in tools]
    is_constrained = required or not parallel or text_format or any(f.get("strict") for f in functions)
    if not functions or not is_constrained:
        return None
    return ToolCallFormat(
        tuple(map(_tool_of, functions)),
        allow_text=not required and text_format is None,
        parallel=parallel,
        text_format=None if required else text_format,
    )


def _tool_of(function: Mapping[str, Any]) -> Tool:
    name, parameters = function["name"], function.get("parameters")
    schema = _NO_ARGUMENTS
    if parameters is not None:
        schema = schema_text(parameters, f"tool {name!r}", field="tools")
    return Tool(name, schema, strict=bool(function.get("strict")))


def choice_format(options: object, name: str = "choice") -> ChoiceFormat:
    if isinstance(options, str) or not isinstance(options, Sequence) or not options:
        raise InputError(f"{name} is {options!r}; give a list of texts.", field=name)
    if not all(isinstance(option, str) and option for option in options):
        raise InputError(f"{name} has an option that is no text, or is empty; give texts.", field=name)
    if len(options) > MAX_CHOICES:
        raise InputError(f"{name} has {len(options)} options; at most {MAX_CHOICES} are allowed.", field=name)
    if (length := sum(map(len, options))) > MAX_FORMAT_CHARS:
        raise _too_long(name, length, name)
    return ChoiceFormat(tuple(dict.fromkeys(options)))


def _too_long(name: str, length: int, field: str) -> InputError:
    return InputError(f"{name} has {length} characters; at most {MAX_FORMAT_CHARS} are allowed.", field=field)
