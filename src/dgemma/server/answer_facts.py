"""Facts of finished answers, as replies tell them: usage, how each came about, why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dgemma.events import Answer, FinishReason, ToolCall
from dgemma.events import Draft as DraftEvent
from dgemma.server.plan import Plan
from dgemma.server.replies import (
    AnswerDetails,
    Draft,
    FunctionCall,
    PromptTokensDetails,
    ToolCallReply,
    UnreadToolCall,
    Usage,
    said,
)
from dgemma.server.work import Done


def usage_of(plan: Plan, answers: Sequence[Answer]) -> Usage:
    per_prompt = len(plan.requests) // len(plan.prompts)
    # What a prompt's first answer found; its others may find what the first has just read.
    cached = sum(answer.cached_tokens for answer in answers[::per_prompt])
    prompt_tokens = sum(map(len, plan.prompts))
    completion_tokens = sum(len(answer.tokens) for answer in answers)
    forwards = sum(answer.forwards for answer in answers)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        denoising_steps=sum(sum(answer.steps) for answer in answers),
        canvases=sum(len(answer.steps) for answer in answers),
        tokens_per_forward=round(completion_tokens / forwards, 3) if forwards else 0.0,
    )


def usage_of_work(done: Sequence[Done[Any]], prompt_tokens: int, completion_tokens: int) -> Usage:
    """The same of fill and edit, all of whose choices have one prompt, which the first one read."""
    forwards = sum(one.tally.forwards for one in done)
    cached = (done[0].tally.cached_tokens or 0) if done else 0
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=min(cached, prompt_tokens)),
        denoising_steps=forwards,
        canvases=sum(one.tally.canvases for one in done),
        tokens_per_forward=round(completion_tokens / forwards, 3) if forwards else 0.0,
    )


def details_of(plan: Plan, answer: Answer) -> AnswerDetails:
    unread = [
        UnreadToolCall(name=call.name, error=call.error or "no tool was offered for it")
        for call in answer.tool_calls
        if not is_delivered(plan, call)
    ]
    return AnswerDetails(
        seed=answer.seed,
        decode=answer.decode,
        finish_reason=answer.finish_reason.value,
        steps=list(answer.steps),
        tokens_per_forward=round(answer.tokens_per_forward, 3),
        **said(
            stop_string=answer.stop_string,
            provisional_tokens=answer.provisional_tokens,
            unread_tool_calls=unread,
        ),
    )


def is_delivered(plan: Plan, call: ToolCall) -> bool:
    """Nobody shall carry out a call that was cut off, or one of a tool that was not offered."""
    return plan.delivers_calls and call.error is None


def delivered_calls(
    plan: Plan, choice: int, calls: Sequence[ToolCall], *, first: int = 0, in_stream: bool = False
) -> list[ToolCallReply]:
    """The calls a client is told of; `first` is the number of those it was told of already."""
    return [
        ToolCallReply(
            **({"index": number} if in_stream else {}),
            id=f"call_{plan.id.partition('-')[2]}_{choice}_{number}",
            type="function",
            function=FunctionCall(name=call.name, arguments=call.arguments_json),
        )
        for number, call in enumerate((c for c in calls if is_delivered(plan, c)), start=first)
    ]


def ended_by_length(answer: Answer) -> bool:
    """OpenAI has no word for a deadline: the answer is as incomplete as one that met its length."""
    return answer.finish_reason is not FinishReason.STOP


def draft_of(event: DraftEvent) -> Draft:
    entropy = sum(event.entropy) / len(event.entropy) if event.entropy else 0.0
    return Draft(canvas=event.canvas, step=event.step, text=event.text, entropy=round(entropy, 4))
