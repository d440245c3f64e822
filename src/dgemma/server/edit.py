"""POST /v1/edit/completions: a region of a file, rewritten."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from dgemma.canvas.edit import Edited, EditOptions, edit
from dgemma.errors import InputError
from dgemma.server.api_error import refused
from dgemma.server.asked import Form
from dgemma.server.edit_message import FIELD, read_edit_message
from dgemma.server.edit_request import EditRequest, read_edit_request
from dgemma.server.edit_writer import EditWriter
from dgemma.server.plan import Planner, drawn_seed, new_id, too_long
from dgemma.server.work import WorkPlan

PATH = "/v1/edit/completions"
# Every canvas of a region is looked at with all that stands before it.
MAX_CANVASES = 32


def _plan(planner: Planner, body: Mapping[str, Any]) -> WorkPlan[Edited]:
    return plan_edit(planner, read_edit_request(body))


def plan_edit(planner: Planner, request: EditRequest) -> WorkPlan[Edited]:
    message = read_edit_message(request.text)
    id_ = new_id("edit")
    seed = drawn_seed() if request.seed is None else request.seed
    bench = planner.workbench(request, id_=id_, seed=seed)
    encode = bench.tokenizer.encode
    try:
        region = len(encode(message.region))
        around = sum(len(encode(text)) for text in (message.before, message.behind, message.instruction))
    except InputError as error:
        raise refused(f"messages: {error}", FIELD) from None
    most = planner.settings.max_prompt_tokens or bench.max_positions
    if 1 + region + around > most:
        raise too_long(
            f"messages has {1 + region + around} tokens; this server takes at most {most}. Shorten it.", FIELD
        )
    widest = MAX_CANVASES * bench.canvas_len
    if region > widest:
        raise too_long(
            f"the region to rewrite has {region} tokens; at most {widest} are taken. Give a smaller one.",
            FIELD,
        )
    if request.max_tokens is not None and region > request.max_tokens:
        raise refused(
            f"max_tokens is {request.max_tokens}; the region has {region} tokens, and comes back as a whole. "
            "Raise it, or give a smaller region.",
            "max_tokens",
        )
    head = {
        "id": id_,
        "object": "edit.completion",
        "created": int(time.time()),
        "model": request.model,
        "system_fingerprint": planner.served.fingerprint,
    }
    rounds = edit(
        bench,
        message.region,
        message.instruction,
        EditOptions(),
        before=message.before,
        behind=message.behind,
    )
    writer = EditWriter(
        head=head,
        region=message.region,
        tokenizer=bench.tokenizer,
        prompt_tokens=1 + region + around,
        seed=seed,
    )
    return WorkPlan(
        model=request.model,
        works=(rounds,),
        writer=writer,
        deadline_s=planner.deadline_of(bench),
        about=FIELD,
    )


EDIT = Form(plan=_plan, prompt_fields=(FIELD,))
