"""Infill: a gap between two texts, filled in several rounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dgemma.params import GenerationParams
from dgemma.server.gap import GapText, MeasuredGap, filled_gap, measured_gap
from dgemma.server.infill.protocol import (
    InfillChunk,
    InfillRequest,
    InfillResponse,
    InfillSelection,
    InfillSettings,
    InfillTimings,
)
from dgemma.server.plan import ResponseWriter, ServingPlan, TaskCounts, TaskOutcome
from dgemma.server.protocol import ResponseModel
from dgemma.server.response_format import RequestedFormat
from dgemma.server.serving import ServingBase, new_id, request_seed
from dgemma.tasks.context import TaskContext
from dgemma.tasks.infill import Filled
from dgemma.tasks.rounds import Rounds

_ABSENT = object()
_STOP_TYPES = {"stop": "eos", "length": "limit", "deadline": "limit"}


class InfillServing(ServingBase):
    """The handler of /infill."""

    def create_infill(self, request: InfillRequest) -> ServingPlan[Filled]:
        if not request.model:
            request = request.model_copy(update={"model": self.settings.served_model_name})
        seed = request_seed(request)
        task = self.task_context(request, id_=new_id("infill"), seed=seed)
        texts, limit, text_format = (request.before, request.after), request.limit, request.text_format
        # A plugin sends as much of a file as it has: the beginning that does not fit is cut off, and
        # `truncated` is set.
        gap = measured_gap(
            task,
            texts,
            limit or None,
            most_prompt_tokens=self.settings.max_prompt_tokens,
            prompt_field="input_prefix",
            limit_field="n_predict",
        )
        rounds = (
            _read_only(task, request.before)
            if limit == 0
            else filled_gap(task, texts, gap.max_tokens, text_format)
        )
        response_format = (
            None if text_format is None else RequestedFormat(response_format=text_format, field="json_schema")
        )
        return ServingPlan(
            model=request.model,
            start=lambda _: (rounds,),
            num_choices=1,
            writer=InfillWriter(gap=gap, request=request, params=task.params, seed=seed),
            deadline_s=self.deadline_s(task),
            default_field="input_prefix" if text_format is None else "json_schema",
            stream=bool(request.stream),
            response_format=response_format,
        )


@dataclass(frozen=True, kw_only=True)
class InfillWriter(ResponseWriter[Filled]):
    """Writes a filled gap as llama.cpp's server does: whole, or one chunk of text and a last one."""

    gap: MeasuredGap
    request: InfillRequest
    params: GenerationParams
    seed: int

    def counts(self, outcome: TaskOutcome[Filled]) -> TaskCounts:
        return self.gap.counts(outcome)

    def response(self, outcomes: Sequence[TaskOutcome[Filled]]) -> ResponseModel:
        found = self.gap.text(outcomes[0])
        return self._selected(self._infill(outcomes[0], found, content=found.text))

    def task_chunks(self, index: int, outcome: TaskOutcome[Filled]) -> Iterator[ResponseModel]:
        found = self.gap.text(outcome)
        if found.text:
            yield InfillChunk(content=found.text, stop=False)
        yield self._selected(self._infill(outcome, found, content=""))

    def _infill(self, outcome: TaskOutcome[Filled], found: GapText, *, content: str) -> InfillResponse:
        cached = min(outcome.usage.cached_tokens or 0, self.gap.prompt_tokens)
        stop_type = "word" if found.stop_string is not None else _STOP_TYPES[found.reason]
        return InfillResponse(
            content=content,
            stop=True,
            index=0,
            id_slot=0,
            model=self.request.model,
            tokens_predicted=found.num_tokens,
            tokens_evaluated=self.gap.prompt_tokens,
            tokens_cached=cached,
            truncated=not self.gap.fits,
            stop_type=stop_type,
            stopping_word=found.stop_string or "",
            timings=_timings(outcome, self.gap.prompt_tokens - cached, found.num_tokens),
            generation_settings=InfillSettings(
                n_predict=self.gap.max_tokens if self.request.limit is None else self.request.limit,
                seed=self.seed,
                temperature=self.params.temperature,
                top_k=self.params.top_k,
                top_p=self.params.top_p,
                stop=list(self.params.stop),
            ),
        )

    def _selected(self, whole: InfillResponse) -> ResponseModel:
        """The entries of `response_fields`. A path stays one name, as in llama.cpp's server."""
        if self.request.response_fields is None:
            return whole
        entries = whole.model_dump(exclude_unset=True)
        found = {path: _at(entries, path) for path in self.request.response_fields}
        return InfillSelection(**{path: value for path, value in found.items() if value is not _ABSENT})


def _at(value: Any, path: str) -> Any:
    for part in path.split("/"):
        value = value.get(part, _ABSENT) if isinstance(value, dict) else _ABSENT
    return value


def _timings(outcome: TaskOutcome[Filled], prompt_n: int, predicted_n: int) -> InfillTimings:
    """Prompt time is the prefill of the first request; the rest counts as prediction."""
    prompt_ms = 1e3 * min(outcome.usage.prefill_s, outcome.seconds)
    predicted_ms = 1e3 * outcome.seconds - prompt_ms
    return InfillTimings(
        prompt_n=prompt_n,
        prompt_ms=round(prompt_ms, 3),
        prompt_per_token_ms=_ratio(prompt_ms, prompt_n),
        prompt_per_second=_ratio(1e3 * prompt_n, prompt_ms),
        predicted_n=predicted_n,
        predicted_ms=round(predicted_ms, 3),
        predicted_per_token_ms=_ratio(predicted_ms, predicted_n),
        predicted_per_second=_ratio(1e3 * predicted_n, predicted_ms),
    )


def _ratio(amount: float, by: float) -> float:
    return round(amount / by, 3) if by > 0 else 0.0


def _read_only(task: TaskContext, before: str) -> Rounds[Filled]:
    """Write nothing: the engine reads the text before the gap into its prefix cache."""
    prompt = task.opening(tuple(task.tokenizer.encode(before)), reserve=task.canvas_len)
    if len(prompt) > 1:
        yield [task.score(prompt, len(prompt) - 1)]
    return Filled(
        text="",
        log_likelihood=0.0,
        candidates=(),
        forwards=0,
        prompt_tokens=len(prompt),
        cached_tokens=0,
        seed=task.seed,
    )
