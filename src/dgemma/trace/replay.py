"""Runs the requests of a trace again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

from dgemma.engine.request import EngineRequest
from dgemma.errors import InputError
from dgemma.events import FinishReason
from dgemma.model.config import ModelConfig
from dgemma.params import GenerationParams
from dgemma.structured_output.compiler import GrammarCompiler
from dgemma.trace.recorder import Recorder, Run
from dgemma.trace.trace import Trace, TraceRequest


def replay(
    trace: Trace,
    recorder: Recorder,
    run: Run,
    compiler: Callable[[GenerationParams], GrammarCompiler],
    config: ModelConfig,
) -> Trace:
    """The trace of the same requests, those of a round together, as they ran."""
    model = trace.about.get("model", {})
    for name in ("canvas_len", "vocab_size"):
        if isinstance(model, dict) and model.get(name, getattr(config, name)) != getattr(config, name):
            raise InputError(
                f"the trace is of a model with {name} {model[name]!r:.40}; this one has "
                f"{getattr(config, name)}. Replay it with its own model."
            )
    for _, together in groupby(trace.requests, key=lambda request: request.round):
        requests = [replace(_restored(traced, compiler), row=row) for row, traced in enumerate(together)]
        for _ in recorder.run(requests, run):
            pass
    return recorder.trace()


def _restored(traced: TraceRequest, compiler: Callable[[GenerationParams], GrammarCompiler]) -> EngineRequest:
    if traced.own_sampler is not None:
        raise InputError(
            f"the trace was made with a sampler of the caller's own, {traced.own_sampler:.80}; "
            "it cannot be replayed from a file."
        )
    if traced.answer is not None and traced.answer.finish_reason == FinishReason.DEADLINE:
        raise InputError("a deadline cut this generation short; how far it gets depends on the machine.")
    request = replace(traced.request, params=replace(traced.request.params, deadline_s=None))
    if traced.constraint is None:
        return request
    constraint = compiler(request.params).compile_source(
        traced.constraint.source, begin=traced.constraint.begin, end=traced.constraint.end
    )
    return replace(request, constraint=constraint)
