"""What an answer can be asked to be: a regular expression, one of some texts, JSON, tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dgemma.errors import InputError

MAX_CHOICES = 10_000
MAX_FORM_CHARS = 4 << 20  # of a pattern, a schema or all choices together
# A function without parameters has none.
_NO_ARGUMENTS = json.dumps({"properties": {}, "additionalProperties": False})


@dataclass(frozen=True)
class Regex:
    """The whole text matches."""

    pattern: str


@dataclass(frozen=True)
class Choice:
    """The text is one of these."""

    options: tuple[str, ...]


@dataclass(frozen=True)
class Json:
    """A JSON value that a schema describes; without one, any object."""

    schema: str | None = None  # as JSON text, its members in their order


TextForm = Regex | Choice | Json


@dataclass(frozen=True)
class Tool:
    name: str
    schema: str | None = None  # of its arguments; None: any object
    strict: bool = False  # otherwise any object will do where the schema cannot be kept


@dataclass(frozen=True)
class Calls:
    """Tool calls."""

    tools: tuple[Tool, ...]
    may_speak: bool = False  # text may stand in their place, or before them
    several: bool = True  # more than one call
    instead: TextForm | None = None  # a text of this may stand in their place

    def loose(self) -> Calls:
        """The same where only strict tools have a schema."""
        return replace(self, tools=tuple(tool if tool.strict else Tool(tool.name) for tool in self.tools))


Form = TextForm | Calls

FORMS = ("regex", "choice", "json_schema", "json_object")
"""What these are called as options."""


def schema_text(schema: object, what: str = "json_schema") -> str:
    """A schema, as given (text, a mapping, true or false), as JSON text."""
    if isinstance(schema, str) and len(schema) > MAX_FORM_CHARS:
        raise InputError(_too_long(what, len(schema)))
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(found, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise InputError(f"{what} is nested too deep; flatten it.") from None
    except (ValueError, TypeError) as error:
        raise InputError(f"{what} is no JSON: {error}") from None
    if not isinstance(found, Mapping | bool):
        raise InputError(f"{what} is a {type(found).__name__}; a JSON Schema is an object.")
    if len(text) > MAX_FORM_CHARS:
        raise InputError(_too_long(what, len(text)))
    return text


def form_of(options: Mapping[str, Any]) -> TextForm | None:
    """From the options of that name; None where none of them is set."""
    asked = {name: options[name] for name in FORMS if options.get(name) not in (None, False)}
    if len(asked) > 1:
        raise InputError(f"{' and '.join(asked)} are both given; an answer has one form. Give one of them.")
    for name, value in asked.items():
        if name == "regex":
            if not isinstance(value, str):
                raise InputError(f"regex is {value!r}; give a regular expression as text.")
            return Regex(value)
        if name == "choice":
            return choice_of(value)
        return Json(schema_text(value)) if name == "json_schema" else Json()
    return None


def take_form(options: dict[str, Any]) -> TextForm | None:
    """The same, taken out of them."""
    return form_of({name: options.pop(name, None) for name in FORMS})


def calls_of(
    tools: Sequence[Mapping[str, Any]],
    *,
    required: bool,
    several: bool = True,
    instead: TextForm | None = None,
) -> Calls | None:
    """Calls of these tools, in the shape of a chat's; None where nothing is asked of them."""
    functions = [tool["function"] for tool in tools]
    asked = required or not several or instead or any(one.get("strict") for one in functions)
    if not functions or not asked:
        return None
    return Calls(
        tuple(map(_tool_of, functions)),
        may_speak=not required and instead is None,
        several=several,
        instead=None if required else instead,
    )


def _tool_of(function: Mapping[str, Any]) -> Tool:
    parameters = function.get("parameters")
    schema = _NO_ARGUMENTS if parameters is None else schema_text(parameters, f"tool {function['name']!r}")
    return Tool(function["name"], schema, strict=bool(function.get("strict")))


def choice_of(options: object, what: str = "choice") -> Choice:
    if isinstance(options, str) or not isinstance(options, Sequence) or not options:
        raise InputError(f"{what} is {options!r}; give a list of texts.")
    if not all(isinstance(option, str) and option for option in options):
        raise InputError(f"{what} has an option that is no text, or is empty; give texts.")
    if len(options) > MAX_CHOICES:
        raise InputError(f"{what} has {len(options)} options; at most {MAX_CHOICES} are taken.")
    if (length := sum(map(len, options))) > MAX_FORM_CHARS:
        raise InputError(_too_long(what, length))
    return Choice(tuple(dict.fromkeys(options)))


def _too_long(what: str, length: int) -> str:
    return f"{what} has {length} characters; at most {MAX_FORM_CHARS} are taken."
