"""Messages: a request becomes a conversation, the parts of its reply become content blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from dgemma.engine.service import EngineEvent
from dgemma.events import Answer, Draft
from dgemma.server.http.errors import ApiError, anthropic_error
from dgemma.server.messages.blocks import SIGNATURE, ReplyBlock, TextBlock, ThinkingBlock, ToolUseBlock
from dgemma.server.messages.conversation import MessageReader
from dgemma.server.messages.protocol import (
    CountTokensRequest,
    CountTokensResponse,
    MessageDelta,
    MessageErrorInfo,
    MessageEvent,
    MessageFields,
    MessageObject,
    MessagesRequest,
    MessageUsage,
    StopReason,
    ThinkingTokens,
)
from dgemma.server.outputs import answer_details, draft_info, generation_usage, is_cut_off
from dgemma.server.plan import ResponseWriter, ServingPlan, TaskOutcome
from dgemma.server.protocol import ResponseModel, UsageInfo
from dgemma.server.reply import ChatTurn, ReplyServing
from dgemma.server.reply_parts import (
    PartBegan,
    PartEnded,
    PartGrew,
    PartKind,
    PartStep,
    ReplyPart,
    ReplyParts,
)
from dgemma.server.serving import GenerationInfo
from dgemma.server.text import TextService


class MessagesServing(ReplyServing):
    """The handler of /v1/messages and /v1/messages/count_tokens."""

    def create_message(self, request: MessagesRequest) -> ServingPlan[list[Answer]]:
        return self.reply_plan(
            request,
            self._turn(request, request.max_tokens),
            prefix="msg_",
            writer=lambda info: MessagesWriter(info, request, self.text),
        )

    def count_tokens(self, request: CountTokensRequest) -> CountTokensResponse:
        self.adapter(request.model)  # refuses unknown names
        return CountTokensResponse(input_tokens=len(self.prompt(self._turn(request)).tokens))

    def _turn(self, request: MessageFields, max_tokens: int | None = None) -> ChatTurn:
        reader = MessageReader(request.system, self.context.images)
        for number, message in enumerate(request.messages):
            reader.add(message, f"messages.{number}")
        return ChatTurn(
            messages=reader.messages(),
            tools=request.chat_tools,
            must_call=request.must_call,
            named_tool=request.named_tool,
            parallel_calls=request.has_parallel_calls,
            text_format=request.text_format,
            thinking=request.thinks,
            max_tokens=max_tokens,
            field_names={"enable_thinking": "thinking"},
        )


class MessagesWriter(ResponseWriter[list[Answer]]):
    """Writes a message: whole, or event by event."""

    reads_events = True

    def __init__(self, info: GenerationInfo, request: MessagesRequest, text: TextService) -> None:
        self._info = info
        self._request = request
        self._text = text
        self._reply = ReplyParts(info)

    def response(self, outcomes: Sequence[TaskOutcome[list[Answer]]]) -> ResponseModel:
        answer = self._finished_answer()
        return self._message(
            content=[self._block(part, part.text) for part in self._reply.parts],
            stop_reason=self._stop_reason(answer),
            stop_sequence=self._stop_sequence(answer),
            usage=self._usage(generation_usage(self._info, [answer])),
            dgemma=answer_details(self._info, answer),
        )

    def opening_chunks(self) -> Iterator[ResponseModel]:
        usage = MessageUsage(
            input_tokens=self._info.prompt_tokens,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=0,
            output_tokens=0,
        )
        begun = self._message(content=[], stop_reason=None, stop_sequence=None, usage=usage)
        yield MessageEvent(type="message_start", message=begun)
        yield MessageEvent(type="ping")

    def event_chunks(self, index: int, event: EngineEvent) -> Iterator[ResponseModel]:
        if isinstance(event, Draft):
            yield MessageEvent(type="dgemma.draft", draft=draft_info(event))
            return
        for step in self._reply.add(event):
            yield from self._step_events(step)
        if self._reply.answer is not None:
            yield from self._end(self._reply.answer)

    def error_chunk(self, error: ApiError) -> ResponseModel:
        return MessageEvent(type="error", error=MessageErrorInfo.model_validate(anthropic_error(error)))

    def _end(self, answer: Answer) -> Iterator[MessageEvent]:
        yield MessageEvent(
            type="message_delta",
            delta=MessageDelta(
                stop_reason=self._stop_reason(answer), stop_sequence=self._stop_sequence(answer)
            ),
            usage=self._usage(generation_usage(self._info, [answer])),
            dgemma=answer_details(self._info, answer),
        )
        yield MessageEvent(type="message_stop")

    def _finished_answer(self) -> Answer:
        assert self._reply.answer is not None
        return self._reply.answer

    def _message(self, **facts: Any) -> MessageObject:
        head = self._info.head
        return MessageObject(id=head.id, type="message", role="assistant", model=head.model, **facts)

    def _stop_reason(self, answer: Answer) -> StopReason:
        if is_cut_off(answer):
            return "max_tokens"
        if self._reply.has_calls:
            return "tool_use"
        return "end_turn" if answer.stop_string is None else "stop_sequence"

    def _stop_sequence(self, answer: Answer) -> str | None:
        return answer.stop_string if self._stop_reason(answer) == "stop_sequence" else None

    def _usage(self, usage: UsageInfo) -> MessageUsage:
        thought_tokens = self._reply.thought_tokens(self._text, usage.completion_tokens)
        cached = usage.prompt_tokens_details.cached_tokens
        return MessageUsage(
            input_tokens=usage.prompt_tokens - cached,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
            output_tokens_details=ThinkingTokens(thinking_tokens=thought_tokens),
            denoising_steps=usage.denoising_steps,
            canvases=usage.canvases,
            tokens_per_forward=usage.tokens_per_forward,
        )

    def _step_events(self, step: PartStep) -> Iterator[MessageEvent]:
        part = step.part
        match step:
            case PartBegan():
                block = self._block(part, "", signature="")
                yield MessageEvent(type="content_block_start", index=part.index, content_block=block)
            case PartGrew(delta=delta):
                if not (part.kind is PartKind.THOUGHT and self._request.omits_thoughts):
                    yield self._delta_event(part, _delta(part.kind, delta))
            case PartEnded():
                if part.kind is PartKind.THOUGHT:
                    signed = MessageDelta(type="signature_delta", signature=SIGNATURE)
                    yield self._delta_event(part, signed)
                yield MessageEvent(type="content_block_stop", index=part.index)

    def _delta_event(self, part: ReplyPart, delta: MessageDelta) -> MessageEvent:
        return MessageEvent(type="content_block_delta", index=part.index, delta=delta)

    def _block(self, part: ReplyPart, text: str, *, signature: str = SIGNATURE) -> ReplyBlock:
        match part.kind:
            case PartKind.TEXT:
                return TextBlock(type="text", text=text, citations=None)
            case PartKind.THOUGHT:
                shown = "" if self._request.omits_thoughts else text
                return ThinkingBlock(type="thinking", thinking=shown, signature=signature)
        id_ = f"toolu_{self._info.head.id.removeprefix('msg_')}_{part.index}"
        return ToolUseBlock(type="tool_use", id=id_, name=part.name, input=json.loads(text or "{}"))


def _delta(kind: PartKind, delta: str) -> MessageDelta:
    match kind:
        case PartKind.TEXT:
            return MessageDelta(type="text_delta", text=delta)
        case PartKind.THOUGHT:
            return MessageDelta(type="thinking_delta", thinking=delta)
        case PartKind.CALL:
            return MessageDelta(type="input_json_delta", partial_json=delta)
