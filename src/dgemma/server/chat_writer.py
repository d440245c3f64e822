"""Events of the engine as a chat completion: whole, or chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dgemma.engine.service import EngineEvent
from dgemma.events import Answer, Commit, Draft, Finish, ToolCall
from dgemma.server.answer_facts import delivered_calls, details_of, draft_of, ended_by_length, usage_of
from dgemma.server.logprobs import Likeliest, chat_logprobs
from dgemma.server.plan import Plan
from dgemma.server.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FinishReasonName,
    Reply,
    said,
)
from dgemma.server.text import TextService


@dataclass
class _Told:
    """What the client of one choice has been told."""

    num_tokens: int = 0  # whose log-probabilities were sent
    num_calls: int = 0  # seen in commits
    num_delivered: int = 0


class ChatWriter:
    def __init__(self, plan: Plan, text: TextService) -> None:
        self._plan = plan
        self._text = text
        self._told = [_Told() for _ in plan.requests]

    def whole(self, answers: Sequence[Answer]) -> Reply:
        return ChatCompletion(
            id=self._plan.id,
            object="chat.completion",
            created=self._plan.created,
            model=self._plan.model,
            system_fingerprint=self._plan.fingerprint,
            choices=[self._choice(index, answer) for index, answer in enumerate(answers)],
            usage=usage_of(self._plan, answers),
        )

    def opening(self) -> Iterator[Reply]:
        """The role of each choice; the request is accepted."""
        for index in range(len(self._told)):
            yield self._chunk(index, ChatDelta(role="assistant", content=""))

    def chunks(self, index: int, event: EngineEvent) -> Iterator[Reply]:
        match event:
            case Draft():
                # Beside the delta, not in it: who joins deltas gets the final text and nothing else.
                yield self._chunk(index, ChatDelta(), draft=draft_of(event))
            case Commit():
                extra = self._logprobs(index, event.tokens, event.logprobs)
                delta = self._delta(index, event.tool_calls, text=event.text, thought=event.thought)
                if delta.model_fields_set or extra:
                    yield self._chunk(index, delta, **extra)
            case Finish():
                yield from self._end(index, event.answer)

    def usage_chunk(self, answers: Sequence[Answer]) -> Reply:
        chunk = self._chunk(None)
        chunk.usage = usage_of(self._plan, answers)
        return chunk

    def _end(self, index: int, answer: Answer) -> Iterator[Reply]:
        """What no commit told, then why the answer ended."""
        told = self._told[index]
        likeliest = None if answer.logprobs is None else answer.logprobs[told.num_tokens :]
        extra = self._logprobs(index, answer.tokens[told.num_tokens :], likeliest)
        delta = self._delta(index, answer.tool_calls[told.num_calls :])
        if delta.model_fields_set or extra:
            yield self._chunk(index, delta, **extra)
        yield self._chunk(
            index,
            ChatDelta(),
            finish_reason=self._finish_reason(answer),
            dgemma=details_of(self._plan, answer),
        )

    def _delta(
        self, index: int, calls: Sequence[ToolCall], *, text: str = "", thought: str = ""
    ) -> ChatDelta:
        told = self._told[index]
        replies = delivered_calls(self._plan, index, calls, first=told.num_delivered, in_stream=True)
        told.num_calls += len(calls)
        told.num_delivered += len(replies)
        return ChatDelta(**said(reasoning_content=thought, content=text, tool_calls=replies))

    def _logprobs(self, index: int, tokens: Sequence[int], likeliest: Likeliest | None) -> dict[str, Any]:
        if self._plan.logprobs is None or not likeliest:
            return {}
        self._told[index].num_tokens += len(tokens)
        return {
            "logprobs": ChatLogprobs(
                content=chat_logprobs(self._text, tokens, likeliest, self._plan.logprobs)
            )
        }

    def _chunk(self, index: int | None, delta: ChatDelta | None = None, **choice: Any) -> ChatChunk:
        """A chunk of one choice, or (None) of none."""
        choices = []
        if index is not None:
            assert delta is not None
            choice.setdefault("finish_reason", None)
            choices = [ChatChunkChoice(index=index, delta=delta, **choice)]
        return ChatChunk(
            id=self._plan.id,
            object="chat.completion.chunk",
            created=self._plan.created,
            model=self._plan.model,
            system_fingerprint=self._plan.fingerprint,
            choices=choices,
            **({"usage": None} if self._plan.include_usage else {}),
        )

    def _choice(self, index: int, answer: Answer) -> ChatChoice:
        calls = delivered_calls(self._plan, index, answer.tool_calls)
        message = ChatMessage(
            role="assistant",
            content=None if calls and not answer.text else answer.text,
            refusal=None,
            **said(reasoning_content=answer.thought, tool_calls=calls),
        )
        logprobs = self._logprobs(index, answer.tokens, answer.logprobs) or {"logprobs": None}
        return ChatChoice(
            index=index,
            message=message,
            finish_reason=self._finish_reason(answer),
            dgemma=details_of(self._plan, answer),
            **logprobs,
        )

    def _finish_reason(self, answer: Answer) -> FinishReasonName:
        if ended_by_length(answer):
            return "length"
        return "tool_calls" if delivered_calls(self._plan, 0, answer.tool_calls) else "stop"
