"""Parts of responses made from the engine's outputs: usage, details, drafts, log-probabilities."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from dgemma.events import Answer, Draft, FinishReason, ScoredToken, ToolCall
from dgemma.server.plan import TaskOutcome
from dgemma.server.protocol import (
    AnswerDetails,
    DraftInfo,
    PromptTokensDetails,
    ResponseModel,
    UnreadToolCall,
    UsageInfo,
    set_fields,
)
from dgemma.server.serving import GenerationInfo
from dgemma.server.text import TextService

# Per token of an answer: (token, log-probability) of the top-k tokens, best first.
TopLogprobs = Sequence[Sequence[tuple[int, float]]]
# The log-probability that OpenAI's API gives for a token that is not in the list.
UNLISTED = -9999.0


def generation_usage(info: GenerationInfo, answers: Sequence[Answer]) -> UsageInfo:
    """Usage of a plain generation."""
    # Cache hits of each prompt's first answer; its other answers may hit what the first has just read.
    cached = sum(answer.cached_tokens for answer in answers[:: info.num_choices // info.num_prompts])
    return _usage(
        prompt_tokens=info.prompt_tokens,
        completion_tokens=sum(len(answer.tokens) for answer in answers),
        cached_tokens=cached,
        denoising_steps=sum(sum(answer.steps) for answer in answers),
        canvases=sum(len(answer.steps) for answer in answers),
        forwards=sum(answer.forwards for answer in answers),
    )


def task_usage(outcomes: Sequence[TaskOutcome[Any]], prompt_tokens: int, completion_tokens: int) -> UsageInfo:
    """Usage of tasks. All of them have one prompt, which the first one read."""
    forwards = sum(outcome.usage.forwards for outcome in outcomes)
    cached = (outcomes[0].usage.cached_tokens or 0) if outcomes else 0
    return _usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        cached_tokens=min(cached, prompt_tokens),
        denoising_steps=forwards,
        canvases=sum(outcome.usage.canvases for outcome in outcomes),
        forwards=forwards,
    )


def _usage(
    *,
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int,
    denoising_steps: int,
    canvases: int,
    forwards: int,
) -> UsageInfo:
    return UsageInfo(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
        denoising_steps=denoising_steps,
        canvases=canvases,
        tokens_per_forward=round(completion_tokens / forwards, 3) if forwards else 0.0,
    )


def answer_details(info: GenerationInfo, answer: Answer) -> AnswerDetails:
    unread = [
        UnreadToolCall(name=call.name, error=call.error or "no tool was offered for it")
        for call in answer.tool_calls
        if not is_delivered(info, call)
    ]
    return AnswerDetails(
        seed=answer.seed,
        decode=answer.decode,
        finish_reason=answer.finish_reason.value,
        steps=list(answer.steps),
        tokens_per_forward=round(answer.tokens_per_forward, 3),
        **set_fields(
            stop_string=answer.stop_string,
            pinned=_spans(answer.pinned),
            provisional_tokens=answer.provisional_tokens,
            unread_tool_calls=unread,
        ),
    )


def _spans(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending positions as spans [begin, end]."""
    found: list[tuple[int, int]] = []
    for position in positions:
        if found and found[-1][1] == position:
            found[-1] = (found[-1][0], position + 1)
        else:
            found.append((position, position + 1))
    return found


def is_delivered(info: GenerationInfo, call: ToolCall) -> bool:
    """Whether a call is sent as a call: not if it was cut off, nor if its tool was not offered."""
    return info.has_tools and call.error is None


def is_cut_off(answer: Answer) -> bool:
    """OpenAI has no finish reason for a deadline: as incomplete as an answer that reached its length."""
    return answer.finish_reason is not FinishReason.STOP


def draft_info(event: Draft) -> DraftInfo:
    entropy = sum(event.entropy) / len(event.entropy) if event.entropy else 0.0
    return DraftInfo(canvas=event.canvas, step=event.step, text=event.text, entropy=round(entropy, 4))


# Log-probabilities, in the form of chats and in that of completions


class TopLogprob(ResponseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    content: list[TokenLogprob]


class CompletionLogprobs(ResponseModel):
    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="null: the first token of a prompt, with echo.")
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(ResponseModel):
    """vLLM's entry for one token, under its id."""

    logprob: float
    rank: int = Field(description="1: the most likely.")
    decoded_token: str


# Per token of a prompt: itself and the most likely ones, by token id; null for the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


def chat_logprobs(
    text: TextService, tokens: Sequence[int], top: TopLogprobs, num_listed: int
) -> list[TokenLogprob]:
    """One entry per generated token, controls included: those have a name and no bytes."""

    def entry(token: int, value: float) -> TopLogprob:
        shown = text.token_text(token)
        raw = None if shown.raw is None else list(shown.raw)
        return TopLogprob(token=shown.text, logprob=_finite(value), bytes=raw)

    entries = []
    for token, listed in zip(tokens, top, strict=False):
        own = entry(token, dict(listed).get(token, UNLISTED))
        entries.append(
            TokenLogprob(
                token=own.token,
                logprob=own.logprob,
                bytes=own.bytes,
                top_logprobs=[entry(*pair) for pair in listed[:num_listed]],
            )
        )
    return entries


def prompt_logprobs(
    text: TextService, scored: Sequence[ScoredToken], num_tokens: int, num_listed: int
) -> PromptLogprobs:
    """Of a prompt of `num_tokens`. A deadline may leave its last tokens without scores: they have null."""

    def entry(token: int, value: float, rank: int) -> PromptLogprob:
        return PromptLogprob(logprob=value, rank=rank, decoded_token=text.token_text(token).text)

    found: PromptLogprobs = [None]
    for each in scored:
        listed = {
            str(token): entry(token, value, rank)
            for rank, (token, value) in enumerate(each.top[:num_listed], start=1)
        }
        listed[str(each.token)] = entry(each.token, each.logprob, each.rank)
        found.append(listed)
    return found + [None] * (num_tokens - len(found))


def join_logprobs(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    """Those of a prompt and of its answer, as one list."""
    return CompletionLogprobs(
        **{
            name: [value for part in parts for value in getattr(part, name)]
            for name in CompletionLogprobs.model_fields
        }
    )


class CompletionLogprobWriter:
    """Log-probabilities of a completion; keeps the text offset between chunks."""

    def __init__(self, text: TextService, num_listed: int) -> None:
        self._text = text
        self._num_listed = num_listed
        self._offset = 0
        # A character may take several tokens: it counts when its last byte is there.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: Sequence[int], top: TopLogprobs) -> CompletionLogprobs:
        values = [
            _finite(dict(listed).get(token, UNLISTED)) for token, listed in zip(tokens, top, strict=False)
        ]
        return self._listed(tokens, values, top)

    def add_prompt(
        self, tokens: Sequence[int], scored: Sequence[ScoredToken], text: str
    ) -> CompletionLogprobs:
        """The prompt before the answer; `text` is what is returned of it. Tokens that were not scored, as the
        first one, have null."""
        rest = len(tokens) - 1 - len(scored)
        values = [None, *(each.logprob for each in scored), *[None] * rest]
        found = self._listed(tokens, values, [None, *(each.top for each in scored), *[None] * rest])
        self._offset = len(text)
        self._decoder.reset()
        return found

    def _listed(
        self,
        tokens: Sequence[int],
        values: Sequence[float | None],
        top: Sequence[Sequence[tuple[int, float]] | None],
    ) -> CompletionLogprobs:
        found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token, value, listed in zip(tokens, values, top, strict=False):
            found.tokens.append(self._name(token))
            found.token_logprobs.append(value)
            found.top_logprobs.append(
                None
                if listed is None
                else {self._name(other): _finite(each) for other, each in listed[: self._num_listed]}
            )
            found.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(self._text.token_text(token).raw or b""))
        return found

    def _name(self, token: int) -> str:
        """A token's text; part of a character by its bytes, so that no two tokens become one key."""
        shown = self._text.token_text(token)
        if shown.raw is None or shown.text.encode() == shown.raw:
            return shown.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in shown.raw)


def _finite(value: float) -> float:
    """A token that top_k or top_p cut off has probability 0; JSON has no -infinity."""
    return max(value, UNLISTED) if math.isfinite(value) else UNLISTED
