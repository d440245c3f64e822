"""Filled gaps as a text completion: whole, or chunk by chunk in the same shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dgemma.canvas.fill import Filled
from dgemma.server.answer_facts import usage_of_work
from dgemma.server.gap import Gap
from dgemma.server.replies import Completion, CompletionChoice, FillDetails, Reply, Usage, said
from dgemma.server.work import Counts, Done, WorkWriter


@dataclass(frozen=True, kw_only=True)
class FillWriter(WorkWriter[Filled]):
    gap: Gap
    seed: int  # of the first one
    head: dict[str, Any]  # what every reply begins with
    include_usage: bool

    def counts(self, done: Done[Filled]) -> Counts:
        return self.gap.counts(done)

    def whole(self, done: Sequence[Done[Filled]]) -> Reply:
        choices = [
            CompletionChoice(
                index=index,
                text=found.text,
                finish_reason=found.finish_reason,
                logprobs=None,
                dgemma=self._details(index, one),
            )
            for index, one in enumerate(done)
            for found in [self.gap.text(one)]
        ]
        return Completion(**self.head, choices=choices, usage=self._usage(done))

    def chunks(self, index: int, done: Done[Filled]) -> Iterator[Reply]:
        found = self.gap.text(done)
        if found.text:
            yield self._chunk(index, text=found.text, finish_reason=None)
        details = self._details(index, done)
        yield self._chunk(index, text="", finish_reason=found.finish_reason, dgemma=details)

    def usage_chunk(self, done: Sequence[Done[Filled]]) -> Reply:
        return Completion(**self.head, choices=[], usage=self._usage(done))

    def _chunk(self, index: int, **choice: Any) -> Completion:
        usage: dict[str, Any] = {"usage": None} if self.include_usage else {}
        return Completion(**self.head, choices=[CompletionChoice(index=index, **choice)], **usage)

    def _details(self, index: int, done: Done[Filled]) -> FillDetails:
        found, result = self.gap.text(done), done.result
        return FillDetails(
            seed=self.seed + index,
            finish_reason=found.reason,
            log_likelihood=None if result is None else result.log_likelihood,
            candidates=0 if result is None else len(result.candidates),
            denoising_steps=done.tally.forwards,
            **said(stop_string=found.stop_string),
        )

    def _usage(self, done: Sequence[Done[Filled]]) -> Usage:
        written = sum(self.gap.text(one).num_tokens for one in done)
        return usage_of_work(done, self.gap.prompt_tokens, written)
