"""Responses: a request becomes a conversation, the parts of its reply become output items."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dgemma.engine.service import EngineEvent
from dgemma.events import Answer, Draft
from dgemma.server.http.errors import ApiError, invalid, shown
from dgemma.server.outputs import answer_details, draft_info, generation_usage, is_cut_off
from dgemma.server.plan import ResponseWriter, ServingPlan, TaskOutcome
from dgemma.server.protocol import InputTokensDetails, OutputTokensDetails, ResponseModel, UsageInfo
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
from dgemma.server.responses.conversation import ItemReader
from dgemma.server.responses.items import (
    INPUT_ITEMS,
    InputItem,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputReasoningText,
    OutputSummaryText,
    OutputTextContent,
    Status,
    user_message,
)
from dgemma.server.responses.protocol import (
    IncompleteDetails,
    InputTokensRequest,
    InputTokensResponse,
    ItemFields,
    ResponseEvent,
    ResponseFailure,
    ResponseObject,
    ResponseRequest,
    ResponseUsageInfo,
)
from dgemma.server.responses.store import KeptResponse
from dgemma.server.serving import GenerationInfo
from dgemma.server.text import TextService


class ResponseServing(ReplyServing):
    """The handler of /v1/responses."""

    def create_response(self, request: ResponseRequest) -> ServingPlan[list[Answer]]:
        inherited, given = self._items(request)
        keep = self._keep(request, inherited, given)
        return self.reply_plan(
            request,
            self._turn(request, inherited, given, request.max_output_tokens),
            prefix="resp_",
            writer=lambda info: ResponsesWriter(info, request, self.text, keep),
        )

    def count_input_tokens(self, request: InputTokensRequest) -> InputTokensResponse:
        self.adapter(request.model)  # refuses unknown names
        prompt = self.prompt(self._turn(request, *self._items(request)))
        return InputTokensResponse(object="response.input_tokens", input_tokens=len(prompt.tokens))

    def kept_inputs(self, body: Mapping[str, Any]) -> list[Any]:
        """The items that the response before answered. The body is not yet checked."""
        id_ = body.get("previous_response_id")
        kept = self._kept(id_) if isinstance(id_, str) else None
        return [] if kept is None else list(json.loads(kept.inputs))

    def _kept(self, id_: str) -> KeptResponse | None:
        return None if self.context.responses is None else self.context.responses.get(id_)

    def _items(self, request: ItemFields) -> tuple[list[InputItem], list[InputItem]]:
        """The items of the response before, and those of the request."""
        given: list[InputItem] = (
            [user_message(request.input)] if isinstance(request.input, str) else request.input
        )
        id_ = request.previous_response_id
        if id_ is None:
            return [], given
        kept = self._kept(id_)
        if kept is None:
            raise invalid(
                f"previous_response_id is {shown(id_)}, which is not kept for this API key; the oldest are "
                "dropped, and store=false keeps none. Give the items of the conversation.",
                "previous_response_id",
                "previous_response_not_found",
            )
        output = json.loads(kept.response)["output"]
        return [*INPUT_ITEMS.validate_json(kept.inputs), *INPUT_ITEMS.validate_python(output)], given

    def _keep(
        self, request: ResponseRequest, inherited: list[InputItem], given: list[InputItem]
    ) -> Callable[[ResponseObject], None] | None:
        """What keeps the response when it is finished; None: it shall not be kept."""
        responses = self.context.responses
        keeps_any = responses is not None and responses.keeps_any
        if request.store and not keeps_any:
            raise invalid(
                "store is true, but this server keeps no responses; leave store out.",
                "store",
                "unsupported_parameter",
            )
        if responses is None or not keeps_any or request.store is False:
            return None
        inputs = INPUT_ITEMS.dump_json([*inherited, *given], exclude_unset=True)

        def keep(response: ResponseObject) -> None:
            kept = KeptResponse(response=response.to_json(), inputs=inputs, num_inherited=len(inherited))
            responses.put(response.id, kept)

        return keep

    def _turn(
        self,
        request: ItemFields,
        inherited: list[InputItem],
        given: list[InputItem],
        max_tokens: int | None = None,
    ) -> ChatTurn:
        reader = ItemReader(request.instructions, self.context.images)
        for item in inherited:
            reader.add(item, "previous_response_id")
        for number, item in enumerate(given):
            reader.add(item, f"input.{number}")
        return ChatTurn(
            messages=reader.messages(),
            tools=request.chat_tools,
            must_call=request.must_call,
            named_tool=request.named_tool,
            parallel_calls=request.parallel_tool_calls is not False,
            text_format=request.text_format,
            thinking=request.thinking,
            max_tokens=max_tokens,
            max_tokens_field="max_output_tokens",
            field_names={"messages": "input", "enable_thinking": "reasoning"},
        )


class ResponsesWriter(ResponseWriter[list[Answer]]):
    """Writes a response: whole, or event by event."""

    reads_events = True

    def __init__(
        self,
        info: GenerationInfo,
        request: ResponseRequest,
        text: TextService,
        keep: Callable[[ResponseObject], None] | None = None,
    ) -> None:
        self._keep = keep
        self._done: ResponseObject | None = None
        self._info = info
        self._request = request
        self._text = text
        self._reply = ReplyParts(info)
        self._num_events = 0

    def response(self, outcomes: Sequence[TaskOutcome[list[Answer]]]) -> ResponseModel:
        assert self._done is not None
        return self._done

    def opening_chunks(self) -> Iterator[ResponseModel]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._object("in_progress"))

    def event_chunks(self, index: int, event: EngineEvent) -> Iterator[ResponseModel]:
        if isinstance(event, Draft):
            yield self._event("dgemma.draft", draft=draft_info(event))
            return
        for step in self._reply.add(event):
            yield from self._step_events(step)
        if self._reply.answer is not None:
            self._done = self._finished()
            if self._keep is not None:  # before the client knows the id to be that of a whole response
                self._keep(self._done)
            yield self._event(f"response.{self._done.status}", response=self._done)

    def error_chunk(self, error: ApiError) -> ResponseModel:
        self._reply.break_off()
        failure = ResponseFailure(
            code="rate_limit_exceeded" if error.status == 429 else "server_error", message=str(error)
        )
        return self._event("response.failed", response=self._object("failed", error=failure))

    def _finished(self) -> ResponseObject:
        answer = self._reply.answer
        assert answer is not None
        is_incomplete = is_cut_off(answer)
        return self._object(
            "incomplete" if is_incomplete else "completed",
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if is_incomplete else None,
            usage=self._usage(generation_usage(self._info, [answer])),
            dgemma=answer_details(self._info, answer),
        )

    def _usage(self, usage: UsageInfo) -> ResponseUsageInfo:
        thought_tokens = self._reply.thought_tokens(self._text, usage.completion_tokens)
        cached = usage.prompt_tokens_details.cached_tokens
        return ResponseUsageInfo(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=cached, cache_write_tokens=0),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=thought_tokens),
            total_tokens=usage.total_tokens,
            denoising_steps=usage.denoising_steps,
            canvases=usage.canvases,
            tokens_per_forward=usage.tokens_per_forward,
        )

    def _object(self, status: str, **more: Any) -> ResponseObject:
        """The response as it is now. All items that have begun are in it."""
        request, head = self._request, self._info.head
        parts = [] if status == "in_progress" else self._reply.parts
        facts: dict[str, Any] = {
            "status": status,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "output": [self._item(part) for part in parts],
            **more,
        }
        return ResponseObject(
            id=head.id,
            object="response",
            created_at=head.created,
            background=False,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            model=head.model,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            previous_response_id=request.previous_response_id,
            reasoning=_told(request.reasoning) or {"effort": None, "summary": None},
            store=self._keep is not None,
            temperature=request.temperature,
            text=_told(request.text) or {"format": {"type": "text"}},
            tool_choice=_told(request.tool_choice) or "auto",
            tools=[_told(tool) for tool in request.tools or ()],
            top_p=request.top_p,
            truncation="disabled",
            user=request.user,
            system_fingerprint=head.system_fingerprint,
            **facts,
        )

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        facts = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return ResponseEvent(**facts)

    def _step_events(self, step: PartStep) -> Iterator[ResponseEvent]:
        part = step.part
        place = {"item_id": self._item_id(part), "output_index": part.index}
        match step:
            case PartBegan():
                empty = self._item(part, "in_progress")
                yield self._event("response.output_item.added", output_index=part.index, item=empty)
                yield from self._content_event("added", part, "", place)
            case PartGrew(delta=delta):
                yield self._delta_event(part, delta, place)
            case PartEnded():
                yield self._done_event(part, place)
                yield from self._content_event("done", part, part.text, place)
                yield self._event("response.output_item.done", output_index=part.index, item=self._item(part))

    def _delta_event(self, part: ReplyPart, delta: str, place: dict[str, Any]) -> ResponseEvent:
        name, where = self._text_field(part)
        extra: dict[str, Any] = {"logprobs": []} if part.kind is PartKind.TEXT else {}
        return self._event(f"response.{name}.delta", delta=delta, **where, **extra, **place)

    def _done_event(self, part: ReplyPart, place: dict[str, Any]) -> ResponseEvent:
        name, where = self._text_field(part)
        extra: dict[str, Any] = {"text": part.text}
        if part.kind is PartKind.CALL:
            extra = {"name": part.name, "arguments": part.text}
        elif part.kind is PartKind.TEXT:
            extra["logprobs"] = []
        return self._event(f"response.{name}.done", **where, **extra, **place)

    def _content_event(
        self, change: str, part: ReplyPart, text: str, place: dict[str, Any]
    ) -> Iterator[ResponseEvent]:
        """That the content of an item begins or is whole; a call has none."""
        name, where = self._text_field(part)
        if part.kind is PartKind.CALL:
            return
        kind = "reasoning_summary_part" if name == "reasoning_summary_text" else "content_part"
        yield self._event(f"response.{kind}.{change}", part=self._content(part, text), **where, **place)

    def _text_field(self, part: ReplyPart) -> tuple[str, dict[str, int]]:
        """The name of the events that carry a part's text, and the text's place in its item."""
        match part.kind:
            case PartKind.CALL:
                return "function_call_arguments", {}
            case PartKind.TEXT:
                return "output_text", {"content_index": 0}
        if self._request.has_summary:
            return "reasoning_summary_text", {"summary_index": 0}
        return "reasoning_text", {"content_index": 0}

    def _content(
        self, part: ReplyPart, text: str
    ) -> OutputTextContent | OutputReasoningText | OutputSummaryText:
        if part.kind is PartKind.TEXT:
            return OutputTextContent(type="output_text", text=text, annotations=[], logprobs=[])
        if self._request.has_summary:
            return OutputSummaryText(type="summary_text", text=text)
        return OutputReasoningText(type="reasoning_text", text=text)

    def _item_id(self, part: ReplyPart) -> str:
        prefix = {PartKind.THOUGHT: "rs", PartKind.TEXT: "msg", PartKind.CALL: "fc"}[part.kind]
        return f"{prefix}_{self._info.head.id.removeprefix('resp_')}_{part.index}"

    def _item(self, part: ReplyPart, status: Status | None = None) -> OutputItem:
        """The item of a part; with a status: as it begins, without text."""
        text = part.text if status is None else ""
        status = status or ("completed" if part.is_whole else "incomplete")
        facts: dict[str, Any] = {"id": self._item_id(part), "status": status}
        content: list[Any] = [] if status == "in_progress" else [self._content(part, text)]
        match part.kind:
            case PartKind.TEXT:
                return OutputMessage(type="message", role="assistant", content=content, **facts)
            case PartKind.CALL:
                call_id = self._item_id(part).replace("fc_", "call_", 1)
                return OutputFunctionCall(
                    type="function_call", call_id=call_id, name=part.name, arguments=text, **facts
                )
        if self._request.has_summary:
            return OutputReasoning(type="reasoning", summary=content, **facts)
        return OutputReasoning(type="reasoning", summary=[], content=content, **facts)


def _told(given: Any) -> Any:
    """A value of the request as the response tells it."""
    return given.model_dump(by_alias=True, exclude_unset=True) if hasattr(given, "model_dump") else given
