"""What a chat's answer shall be: text, text of a form, tool calls, or either of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dgemma.constraint.forms import Calls, Tool, schema_text
from dgemma.errors import InputError
from dgemma.server.api_error import refused
from dgemma.server.chat_request import ChatRequest
from dgemma.server.form_fields import AskedForm, text_form

# A function without parameters has none.
_NO_ARGUMENTS = json.dumps({"properties": {}, "additionalProperties": False})


def chat_form(request: ChatRequest) -> AskedForm | None:
    """None where the model may write what it likes. Its tools are of the form that dgemma.text takes."""
    asked = text_form(request)
    tools = request.offered_tools
    if tools is None:
        return None if asked is None else AskedForm(form=asked[1], field=asked[0], thinks=request.thinking)
    must_call = request.must_call
    one_call = request.parallel_tool_calls is False
    if not (must_call or one_call or asked or any(_is_strict(tool) for tool in tools)):
        return None
    callable_tools = [tool for tool in tools if request.named_tool in (None, tool["function"]["name"])]
    form = Calls(
        tuple(Tool(tool["function"]["name"], _schema(tools, tool)) for tool in callable_tools),
        may_speak=not must_call and asked is None,
        several=not one_call,
        instead=None if must_call or asked is None else asked[1],
    )
    field = "tool_choice" if must_call else "tools" if asked is None else asked[0]
    return AskedForm(form=form, field=field, thinks=request.thinking, otherwise=_loose(form, callable_tools))


def _loose(form: Calls, tools: Sequence[Mapping[str, Any]]) -> Calls | None:
    """The same where tools that are not strict take any object; None if that is no other form.

    Strict ones are promises; of the others a schema that cannot be compiled is only a description.
    """
    found = tuple(
        known if _is_strict(tool) else Tool(known.name) for known, tool in zip(form.tools, tools, strict=True)
    )
    return None if found == form.tools else replace(form, tools=found)


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return bool(tool["function"].get("strict"))


def _schema(tools: Sequence[Mapping[str, Any]], tool: Mapping[str, Any]) -> str:
    parameters = tool["function"].get("parameters")
    if parameters is None:
        return _NO_ARGUMENTS
    where = f"tools.{tools.index(tool)}.function.parameters"
    try:
        return schema_text(parameters, where)
    except InputError as error:
        raise refused(str(error), where) from None
