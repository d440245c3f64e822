"""A filled gap in the form of llama.cpp's server: whole, or as a chunk of text and one that ends it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dgemma.canvas.fill import Filled
from dgemma.params import GenerationParams
from dgemma.server.gap import Gap, GapText
from dgemma.server.infill_request import InfillRequest
from dgemma.server.replies import Reply
from dgemma.server.work import Counts, Done, WorkWriter
from dgemma.server.work_replies import Infill, InfillChunk, InfillParts, InfillSettings, InfillTimings

_ABSENT = object()
_STOP_TYPES = {"stop": "eos", "length": "limit", "deadline": "limit"}


@dataclass(frozen=True, kw_only=True)
class InfillWriter(WorkWriter[Filled]):
    gap: Gap
    request: InfillRequest
    params: GenerationParams
    seed: int

    def counts(self, done: Done[Filled]) -> Counts:
        return self.gap.counts(done)

    def whole(self, done: Sequence[Done[Filled]]) -> Reply:
        found = self.gap.text(done[0])
        return self._chosen(self._infill(done[0], found, content=found.text))

    def chunks(self, index: int, done: Done[Filled]) -> Iterator[Reply]:
        found = self.gap.text(done)
        if found.text:
            yield InfillChunk(content=found.text, stop=False)
        yield self._chosen(self._infill(done, found, content=""))

    def _infill(self, done: Done[Filled], found: GapText, *, content: str) -> Infill:
        cached = min(done.tally.cached_tokens or 0, self.gap.prompt_tokens)
        stop_type = "word" if found.stop_string is not None else _STOP_TYPES[found.reason]
        return Infill(
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
            timings=_timings(done, self.gap.prompt_tokens - cached, found.num_tokens),
            generation_settings=InfillSettings(
                n_predict=self.gap.max_tokens if self.request.limit is None else self.request.limit,
                seed=self.seed,
                temperature=self.params.temperature,
                top_k=self.params.top_k,
                top_p=self.params.top_p,
                stop=list(self.params.stop),
            ),
        )

    def _chosen(self, whole: Infill) -> Reply:
        """The entries that were asked for. A path stays one name, as llama.cpp's server has it."""
        if self.request.response_fields is None:
            return whole
        told = whole.model_dump(exclude_unset=True)
        found = {path: _at(told, path) for path in self.request.response_fields}
        return InfillParts(**{path: value for path, value in found.items() if value is not _ABSENT})


def _at(value: Any, path: str) -> Any:
    for part in path.split("/"):
        value = value.get(part, _ABSENT) if isinstance(value, dict) else _ABSENT
    return value


def _timings(done: Done[Filled], prompt_n: int, predicted_n: int) -> InfillTimings:
    """Reading is that of the first request; all the rest is writing."""
    prompt_ms = 1e3 * min(done.tally.prefill_s, done.seconds)
    predicted_ms = 1e3 * done.seconds - prompt_ms
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
