"""A completion with a suffix: the text between two others."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from dgemma.canvas.fill import Filled
from dgemma.server.api_error import refused, shown
from dgemma.server.completion_request import CompletionRequest
from dgemma.server.fill_writer import FillWriter
from dgemma.server.form_fields import AskedForm, text_form
from dgemma.server.gap import filled_gap, measured_gap
from dgemma.server.plan import Planner, check_streaming, drawn_seed, new_id, too_long
from dgemma.server.work import WorkPlan

# What has no meaning for a gap, why, and values that ask for nothing else than what happens anyway.
_WITHOUT_MEANING: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("logprobs", "a gap is chosen among texts of several lengths, not word by word", ()),
    ("logit_bias", "the words of a gap are limited by the texts around it", ({},)),
    ("diffusing", "a gap has no single canvas to show", (False,)),
    ("decode", "only a canvas can see what follows", ("diffuse",)),
    ("end_tokens", "a gap ends where the suffix begins", ()),
    ("ignore_end", "a gap ends where the suffix begins", (True, False)),
)


def plan_fill(planner: Planner, request: CompletionRequest) -> WorkPlan[Filled]:
    prefix, suffix = request.prompt, request.suffix or ""
    if not isinstance(prefix, str):
        raise refused(
            f"prompt is {shown(prefix)}; with suffix it must be one text, the one before the gap.", "prompt"
        )
    for name, why, usual in _WITHOUT_MEANING:
        value = getattr(request, name)
        if value is not None and value not in usual:
            raise refused(
                f"{name} is {shown(value)}, which is not supported with suffix: {why}. Leave {name} out.",
                name,
                "unsupported_parameter",
            )
    field, form = text_form(request) or (None, None)
    check_streaming(request)
    num_choices = planner.check_choices(1, request.n)
    id_ = new_id("cmpl")
    seed = drawn_seed() if request.seed is None else request.seed
    bench = planner.workbench(request, id_=id_, num_choices=num_choices, seed=seed)
    gap = measured_gap(
        bench,
        (prefix, suffix),
        request.max_tokens,
        most_prompt_tokens=planner.settings.max_prompt_tokens,
        prompt_name="prompt",
        limit_name="max_tokens",
    )
    if not gap.fits:
        raise too_long(
            f"prompt has {gap.num_before} tokens; this model's context of {bench.max_positions} then has no "
            f"room for a gap of {gap.max_tokens}. Shorten the prompt or lower max_tokens.",
            "prompt",
        )
    include_usage = bool(request.stream_options and request.stream_options.include_usage)
    head = {
        "id": id_,
        "object": "text_completion",
        "created": int(time.time()),
        "model": request.model,
        "system_fingerprint": planner.served.fingerprint,
    }
    return WorkPlan(
        model=request.model,
        works=tuple(
            filled_gap(replace(bench, seed=seed + index), (prefix, suffix), gap.max_tokens, form)
            for index in range(num_choices)
        ),
        writer=FillWriter(gap=gap, seed=seed, head=head, include_usage=include_usage),
        deadline_s=planner.deadline_of(bench),
        about=field or "prompt",
        form=None if field is None or form is None else AskedForm(form=form, field=field),
        stream=bool(request.stream),
        include_usage=include_usage,
    )
