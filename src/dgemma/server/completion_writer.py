"""Events of the engine as a text completion: whole, or chunk by chunk in the same shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dgemma.engine.service import EngineEvent
from dgemma.events import Answer, Commit, Draft, Finish
from dgemma.server.answer_facts import details_of, draft_of, ended_by_length, usage_of
from dgemma.server.logprobs import CompletionLogprobWriter, Likeliest
from dgemma.server.plan import Plan
from dgemma.server.replies import Completion, CompletionChoice, Reply, said
from dgemma.server.text import TextService


class CompletionWriter:
    def __init__(self, plan: Plan, text: TextService) -> None:
        self._plan = plan
        self._num_told = [0] * len(plan.requests)  # tokens whose log-probabilities were sent
        self._logprob_writers = [CompletionLogprobWriter(text, plan.logprobs or 0) for _ in plan.requests]

    def whole(self, answers: Sequence[Answer]) -> Reply:
        choices = []
        for index, answer in enumerate(answers):
            logprobs = self._logprobs(index, answer.tokens, answer.logprobs) or {"logprobs": None}
            choices.append(
                CompletionChoice(
                    index=index,
                    text=answer.text,
                    finish_reason="length" if ended_by_length(answer) else "stop",
                    dgemma=details_of(self._plan, answer),
                    **logprobs,
                    **said(reasoning_content=answer.thought),
                )
            )
        return self._reply(choices, usage=usage_of(self._plan, answers))

    def opening(self) -> Iterator[Reply]:
        """A completion has no role to tell: its first chunk is its first text."""
        yield from ()

    def chunks(self, index: int, event: EngineEvent) -> Iterator[Reply]:
        match event:
            case Draft():
                yield self._chunk(index, draft=draft_of(event))
            case Commit():
                extra = self._logprobs(index, event.tokens, event.logprobs)
                extra |= said(reasoning_content=event.thought)
                if event.text or extra:
                    yield self._chunk(index, text=event.text, **extra)
            case Finish(answer=answer):
                told = self._num_told[index]
                rest = None if answer.logprobs is None else answer.logprobs[told:]
                extra = self._logprobs(index, answer.tokens[told:], rest)
                yield self._chunk(
                    index,
                    finish_reason="length" if ended_by_length(answer) else "stop",
                    dgemma=details_of(self._plan, answer),
                    **extra,
                )

    def usage_chunk(self, answers: Sequence[Answer]) -> Reply:
        return self._reply([], usage=usage_of(self._plan, answers))

    def _logprobs(self, index: int, tokens: Sequence[int], likeliest: Likeliest | None) -> dict[str, Any]:
        if self._plan.logprobs is None or not likeliest:
            return {}
        self._num_told[index] += len(tokens)
        return {"logprobs": self._logprob_writers[index].add(tokens, likeliest)}

    def _chunk(self, index: int, **choice: Any) -> Completion:
        choice = {"text": "", "finish_reason": None, **choice}
        usage = {"usage": None} if self._plan.include_usage else {}
        return self._reply([CompletionChoice(index=index, **choice)], **usage)

    def _reply(self, choices: list[CompletionChoice], **usage: Any) -> Completion:
        return Completion(
            id=self._plan.id,
            object="text_completion",
            created=self._plan.created,
            model=self._plan.model,
            system_fingerprint=self._plan.fingerprint,
            choices=choices,
            **usage,
        )
