"""Chat completions: a request becomes one round of engine requests, their events become the response."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dgemma.engine.service import EngineEvent
from dgemma.events import Answer, Commit, Draft, Finish, ToolCall
from dgemma.server.chat.protocol import (
    ChatChoice,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
    ChatMessage,
    ChatStreamChoice,
    ChatToolCall,
    DeltaMessage,
    FunctionCall,
)
from dgemma.server.outputs import (
    ChatLogprobs,
    TopLogprobs,
    answer_details,
    chat_logprobs,
    draft_info,
    generation_usage,
    is_cut_off,
    is_delivered,
    prompt_logprobs,
)
from dgemma.server.plan import ResponseWriter, ServingPlan, TaskOutcome
from dgemma.server.protocol import FinishReasonName, ResponseModel, set_fields
from dgemma.server.reply import ChatTurn, ReplyServing
from dgemma.server.response_format import requested_text_format
from dgemma.server.serving import GenerationInfo, check_prompt_logprobs
from dgemma.server.text import TextService


class ChatServing(ReplyServing):
    """The handler of /v1/chat/completions."""

    def create_chat_completion(self, request: ChatCompletionRequest) -> ServingPlan[list[Answer]]:
        turn = ChatTurn(
            messages=request.messages,
            tools=request.offered_tools,
            must_call=request.must_call,
            named_tool=request.named_tool,
            parallel_calls=request.parallel_tool_calls is not False,
            text_format=requested_text_format(request),
            thinking=request.thinking,
            max_tokens=request.token_limit,
            max_tokens_field=request.token_limit_field,
            field_names={"enable_thinking": request.thinking_field},
        )
        check_prompt_logprobs(request)
        return self.reply_plan(
            request,
            turn,
            prefix="chatcmpl",
            logprobs=request.num_logprobs,
            num_prompt_logprobs=request.prompt_logprobs,
            writer=lambda info: ChatWriter(info, self.text, request.prompt_logprobs),
        )


@dataclass
class _Sent:
    """What the stream of one choice has sent."""

    num_tokens: int = 0  # with log-probabilities
    num_calls: int = 0  # in commits
    num_delivered: int = 0


class ChatWriter(ResponseWriter[list[Answer]]):
    """Writes a chat completion: whole, or chunk by chunk."""

    def __init__(self, info: GenerationInfo, text: TextService, num_prompt_logprobs: int | None) -> None:
        self._info = info
        self._text = text
        self._num_prompt_logprobs = num_prompt_logprobs
        self._sent = [_Sent() for _ in range(info.num_choices)]

    def response(self, outcomes: Sequence[TaskOutcome[list[Answer]]]) -> ResponseModel:
        answers = outcomes[0].result or []
        return ChatCompletionResponse(
            **self._info.head.fields("chat.completion"),
            choices=[self._choice(index, answer) for index, answer in enumerate(answers)],
            usage=generation_usage(self._info, answers),
            **self._prompt_logprobs(answers),
        )

    def _prompt_logprobs(self, answers: Sequence[Answer]) -> dict[str, Any]:
        if self._num_prompt_logprobs is None:
            return {}
        scored = (answers[0].prompt_logprobs if answers else None) or ()
        count = self._info.prompt_tokens
        return {"prompt_logprobs": prompt_logprobs(self._text, scored, count, self._num_prompt_logprobs)}

    def opening_chunks(self) -> Iterator[ResponseModel]:
        """The role of each choice."""
        for index in range(len(self._sent)):
            yield self._chunk(index, DeltaMessage(role="assistant", content=""))

    def event_chunks(self, index: int, event: EngineEvent) -> Iterator[ResponseModel]:
        match event:
            case Draft():
                # Beside the delta, not in it: a client that joins deltas gets only the final text.
                yield self._chunk(index, DeltaMessage(), draft=draft_info(event))
            case Commit():
                extra = self._logprobs(index, event.tokens, event.logprobs)
                delta = self._delta(index, event.tool_calls, text=event.text, thought=event.thought)
                if delta.model_fields_set or extra:
                    yield self._chunk(index, delta, **extra)
            case Finish():
                yield from self._end(index, event.answer)

    def usage_chunk(self, outcomes: Sequence[TaskOutcome[list[Answer]]]) -> ResponseModel:
        chunk = self._chunk(None)
        chunk.usage = generation_usage(self._info, outcomes[0].result or [])
        return chunk

    def _end(self, index: int, answer: Answer) -> Iterator[ResponseModel]:
        """What no commit had, then the finish reason."""
        sent = self._sent[index]
        top = None if answer.logprobs is None else answer.logprobs[sent.num_tokens :]
        extra = self._logprobs(index, answer.tokens[sent.num_tokens :], top)
        delta = self._delta(index, answer.tool_calls[sent.num_calls :])
        if delta.model_fields_set or extra:
            yield self._chunk(index, delta, **extra)
        yield self._chunk(
            index,
            DeltaMessage(),
            finish_reason=self._finish_reason(answer),
            dgemma=answer_details(self._info, answer),
        )

    def _delta(
        self, index: int, calls: Sequence[ToolCall], *, text: str = "", thought: str = ""
    ) -> DeltaMessage:
        sent = self._sent[index]
        calls_sent = self._tool_calls(index, calls, first=sent.num_delivered, in_stream=True)
        sent.num_calls += len(calls)
        sent.num_delivered += len(calls_sent)
        return DeltaMessage(**set_fields(reasoning_content=thought, content=text, tool_calls=calls_sent))

    def _logprobs(self, index: int, tokens: Sequence[int], top: TopLogprobs | None) -> dict[str, Any]:
        if self._info.logprobs is None or not top:
            return {}
        self._sent[index].num_tokens += len(tokens)
        return {"logprobs": ChatLogprobs(content=chat_logprobs(self._text, tokens, top, self._info.logprobs))}

    def _chunk(
        self, index: int | None, delta: DeltaMessage | None = None, **choice: Any
    ) -> ChatCompletionStreamResponse:
        """A chunk of one choice; without an index, of none."""
        choices = []
        if index is not None:
            assert delta is not None
            choice.setdefault("finish_reason", None)
            choices = [ChatStreamChoice(index=index, delta=delta, **choice)]
        usage: dict[str, Any] = {"usage": None} if self._info.include_usage else {}
        return ChatCompletionStreamResponse(
            **self._info.head.fields("chat.completion.chunk"), choices=choices, **usage
        )

    def _choice(self, index: int, answer: Answer) -> ChatChoice:
        calls = self._tool_calls(index, answer.tool_calls)
        message = ChatMessage(
            role="assistant",
            content=None if calls and not answer.text else answer.text,
            refusal=None,
            **set_fields(reasoning_content=answer.thought, tool_calls=calls),
        )
        logprobs = self._logprobs(index, answer.tokens, answer.logprobs) or {"logprobs": None}
        return ChatChoice(
            index=index,
            message=message,
            finish_reason=self._finish_reason(answer),
            dgemma=answer_details(self._info, answer),
            **logprobs,
        )

    def _finish_reason(self, answer: Answer) -> FinishReasonName:
        if is_cut_off(answer):
            return "length"
        return "tool_calls" if self._tool_calls(0, answer.tool_calls) else "stop"

    def _tool_calls(
        self, choice: int, calls: Sequence[ToolCall], *, first: int = 0, in_stream: bool = False
    ) -> list[ChatToolCall]:
        """The calls that are sent; `first` is the number of those sent before."""
        request_id = self._info.head.id.partition("-")[2]
        delivered = [call for call in calls if is_delivered(self._info, call)]
        return [
            ChatToolCall(
                **({"index": number} if in_stream else {}),
                id=f"call_{request_id}_{choice}_{number}",
                type="function",
                function=FunctionCall(name=call.name, arguments=call.arguments_json),
            )
            for number, call in enumerate(delivered, start=first)
        ]
