"""GET and DELETE of kept responses, and the list of the items they answered."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from dgemma.server.http.errors import ApiError, invalid, shown
from dgemma.server.http.log import record_of
from dgemma.server.protocol import ResponseModel
from dgemma.server.responses.store import KeptResponse, KeptResponses
from dgemma.server.state import ServerState

RESPONSE_PATH = "/v1/responses/{response_id}"
INPUT_ITEMS_PATH = RESPONSE_PATH + "/input_items"
MAX_LISTED = 100
_USUAL_LISTED = 20
LIST_PARAMETERS: list[dict[str, Any]] = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED}},
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}},
    {"name": "after", "in": "query", "schema": {"type": "string"}},
]


class DeletedResponse(ResponseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemList(ResponseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def show_response(state: ServerState, request: Request, id_: str) -> Response:
    if request.query_params.get("stream", "false") != "false":
        raise invalid("stream is given, but a kept response is not streamed again.", "stream")
    return _json(_kept(state, request, id_).response)


def delete_response(state: ServerState, request: Request, id_: str) -> Response:
    if not _of(state, request).delete(id_):
        raise _unknown(id_)
    return _json(DeletedResponse(id=id_, object="response", deleted=True).to_json())


def list_input_items(state: ServerState, request: Request, id_: str) -> Response:
    kept = _kept(state, request, id_)
    number = id_.removeprefix("resp_")
    items = [
        {**item, "id": item.get("id") or f"item_{number}_{place}"}
        for place, item in enumerate(json.loads(kept.inputs)[kept.num_inherited :])
    ]
    limit, is_ascending, after = _list_options(request.query_params)
    if not is_ascending:
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None:
        if after not in ids:
            raise invalid(f"after is {shown(after)}, which is not the id of an item.", "after")
        items = items[ids.index(after) + 1 :]
    listed = items[:limit]
    found = InputItemList(
        object="list",
        data=listed,
        first_id=listed[0]["id"] if listed else None,
        last_id=listed[-1]["id"] if listed else None,
        has_more=len(items) > limit,
    )
    return _json(found.to_json())


def _list_options(query: Mapping[str, str]) -> tuple[int, bool, str | None]:
    """Most items, whether the first is the first, and the id behind which to begin."""
    limit, order = query.get("limit", str(_USUAL_LISTED)), query.get("order", "desc")
    # Without int(): a text of thousands of digits is no number of items.
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MAX_LISTED):
        raise invalid(f"limit is {shown(limit)}; give a number from 1 to {MAX_LISTED}.", "limit")
    if order not in ("asc", "desc"):
        raise invalid(f"order is {shown(order)}; give asc or desc.", "order")
    return int(limit), order == "asc", query.get("after")


def _of(state: ServerState, request: Request) -> KeptResponses:
    return state.responses.of(record_of(request.scope).key)


def _kept(state: ServerState, request: Request, id_: str) -> KeptResponse:
    kept = _of(state, request).get(id_)
    if kept is None:
        raise _unknown(id_)
    return kept


def _unknown(id_: str) -> ApiError:
    return ApiError(
        f"no response {shown(id_)} is kept for this API key; the oldest are dropped, and store=false keeps "
        "none.",
        status=404,
        param="response_id",
        code="response_not_found",
    )


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
