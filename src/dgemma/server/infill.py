"""POST /infill: the endpoint of llama.cpp's server that editor plugins speak to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dgemma.canvas.fill import Filled
from dgemma.canvas.rounds import Rounds
from dgemma.canvas.workbench import Workbench
from dgemma.server.asked import Form
from dgemma.server.form_fields import AskedForm
from dgemma.server.gap import filled_gap, measured_gap
from dgemma.server.infill_request import InfillRequest, read_infill_request
from dgemma.server.infill_writer import InfillWriter
from dgemma.server.plan import Planner, drawn_seed, new_id
from dgemma.server.work import WorkPlan

PATH = "/infill"


def _plan(planner: Planner, body: Mapping[str, Any]) -> WorkPlan[Filled]:
    return plan_infill(planner, read_infill_request(body))


def plan_infill(planner: Planner, request: InfillRequest) -> WorkPlan[Filled]:
    if not request.model:
        request = request.model_copy(update={"model": planner.settings.served_model_name})
    seed = drawn_seed() if request.seed is None else request.seed
    bench = planner.workbench(request, id_=new_id("infill"), seed=seed)
    before, limit = request.before, request.limit
    texts = (before, request.behind)
    form = request.form
    # A plugin sends as much of a file as it has: what does not fit is cut off at the far end, and said to be.
    gap = measured_gap(
        bench,
        texts,
        limit or None,
        most_prompt_tokens=planner.settings.max_prompt_tokens,
        prompt_name="input_prefix",
        limit_name="n_predict",
    )
    return WorkPlan(
        model=request.model,
        works=(_read_only(bench, before) if limit == 0 else filled_gap(bench, texts, gap.max_tokens, form),),
        writer=InfillWriter(gap=gap, request=request, params=bench.params, seed=seed),
        deadline_s=planner.deadline_of(bench),
        about="input_prefix" if form is None else "json_schema",
        stream=bool(request.stream),
        form=None if form is None else AskedForm(form=form, field="json_schema"),
    )


def _read_only(bench: Workbench, before: str) -> Rounds[Filled]:
    """Nothing is written: the engine has then read what the next request will begin with."""
    prompt = bench.opening(tuple(bench.tokenizer.encode(before)), room=bench.canvas_len)
    if len(prompt) > 1:
        yield [bench.score(prompt, len(prompt) - 1)]
    return Filled(
        text="",
        log_likelihood=0.0,
        candidates=(),
        forwards=0,
        prompt_tokens=len(prompt),
        cached_tokens=0,
        seed=bench.seed,
    )


INFILL = Form(
    plan=_plan,
    prompt_fields=("input_prefix", "prompt", "input_suffix"),
    end_of_stream=b"",  # its readers know the end by the last chunk's "stop"
)
