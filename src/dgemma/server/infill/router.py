"""The route of infill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dgemma.server.infill.protocol import (
    UNSUPPORTED_IN_INFILL,
    InfillChunk,
    InfillRequest,
    InfillResponse,
    InfillSelection,
    read_infill_request,
)
from dgemma.server.infill.serving import InfillServing
from dgemma.server.pipeline import Endpoint
from dgemma.server.plan import AnyServingPlan
from dgemma.server.serving import ServingContext


def create_infill(context: ServingContext, body: Mapping[str, Any]) -> AnyServingPlan:
    return InfillServing(context).create_infill(read_infill_request(body))


INFILL = Endpoint(
    path="/infill",
    summary="Fill a gap, as llama.cpp does",
    create=create_infill,
    prompt_fields=("input_prefix", "prompt", "input_suffix"),
    requests={InfillRequest: UNSUPPORTED_IN_INFILL},
    responses=(InfillResponse, InfillSelection),
    example={
        "input_prefix": "def add(a, b):\n",
        "prompt": "    return ",
        "input_suffix": "\n",
        "n_predict": 4,
    },
    chunk=InfillChunk,
    last_event="a chunk whose stop is true",
    end_of_stream=b"",  # clients know the end by the last chunk's "stop"
)
