"""The route of edits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dgemma.server.edit.prompt import FIELD
from dgemma.server.edit.protocol import (
    EXAMPLE,
    UNSUPPORTED_IN_EDIT,
    EditCompletionResponse,
    EditRequest,
    read_edit_request,
)
from dgemma.server.edit.serving import EditServing
from dgemma.server.pipeline import Endpoint
from dgemma.server.plan import AnyServingPlan
from dgemma.server.serving import ServingContext


def create_edit(context: ServingContext, body: Mapping[str, Any]) -> AnyServingPlan:
    return EditServing(context).create_edit(read_edit_request(body))


EDIT_COMPLETIONS = Endpoint(
    path="/v1/edit/completions",
    summary="Rewrite a region",
    create=create_edit,
    prompt_fields=(FIELD,),
    requests={EditRequest: UNSUPPORTED_IN_EDIT},
    responses=(EditCompletionResponse,),
    example={"messages": [{"role": "user", "content": EXAMPLE}]},
)
