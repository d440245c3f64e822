"""What a chat's answer shall be: text, text of a form, tool calls, or either of them."""

from __future__ import annotations

from dgemma.constraint.forms import calls_of
from dgemma.errors import InputError
from dgemma.server.api_error import refused
from dgemma.server.chat_request import ChatRequest
from dgemma.server.form_fields import AskedForm, text_form


def chat_form(request: ChatRequest) -> AskedForm | None:
    """None where the model may write what it likes."""
    field, asked = text_form(request) or (None, None)
    must_call, named = request.must_call, request.named_tool
    tools = [tool for tool in request.offered_tools or () if named in (None, tool["function"]["name"])]
    try:
        calls = calls_of(
            tools, required=must_call, several=request.parallel_tool_calls is not False, instead=asked
        )
    except InputError as error:
        raise refused(f"tools: {error}", "tools") from None
    form = calls or asked
    if form is None:
        return None
    by = "tool_choice" if must_call else field or "tools"
    return AskedForm(form=form, field=by, thinks=request.thinking)
