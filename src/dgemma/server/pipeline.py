"""One request from its JSON body to its response. HTTP and batches use this same pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from dgemma.engine.service import EngineEvent
from dgemma.errors import InputError
from dgemma.events import Answer, CanvasStep, Commit, Finish, FinishReason
from dgemma.server.canvas_trace import CanvasTrace, TracedModel
from dgemma.server.engine_rounds import MAX_IN_FLIGHT, EngineRounds, SubmitPolicy, TaskDeadlineError
from dgemma.server.http.errors import ApiError, invalid
from dgemma.server.http.log import RequestRecord
from dgemma.server.http.sse import DONE
from dgemma.server.images import NO_IMAGES, without_data
from dgemma.server.plan import AnyServingPlan, EngineUsage, TaskOutcome
from dgemma.server.protocol import ErrorResponse, RequestModel, ResponseModel, TraceChunk, TracedResponse
from dgemma.server.serving import ServingContext
from dgemma.server.state import ServerState
from dgemma.server.validation import Unsupported, flattened
from dgemma.structured_output.constraint import Constraint
from dgemma.tasks.rounds import Ended, Rounds, advance
from dgemma.trace.trace_writer import Line

Chunks = AsyncGenerator[ResponseModel, None]


@dataclass(frozen=True, kw_only=True)
class DescribedEndpoint:
    """One POST route: its path, and the models that describe it."""

    path: str
    summary: str
    prompt_fields: tuple[str, ...]  # the fields of a body that --log-text logs as the prompt
    requests: Mapping[type[RequestModel], Mapping[str, Unsupported]]
    responses: tuple[type[ResponseModel], ...]
    example: Mapping[str, Any]  # a body that is answered; `model` is added where it is required
    chunk: type[ResponseModel] | None = None  # None: the endpoint does not stream
    end_of_stream: bytes = DONE
    last_event: str = "[DONE]"  # what ends a stream, for the description
    errors: type[ResponseModel] = ErrorResponse
    # What a request goes on from, which may hold images as its body may. Called in a thread.
    kept_inputs: Callable[[ServingContext, Mapping[str, Any]], list[Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Endpoint(DescribedEndpoint):
    """A route to the engine: how a body becomes a plan."""

    create: Callable[[ServingContext, Mapping[str, Any]], AnyServingPlan]  # works on text: call in a thread


@dataclass(frozen=True, kw_only=True)
class TextEndpoint(DescribedEndpoint):
    """A route that needs no engine: how a body becomes the model's name and the response."""

    answer: Callable[[ServingContext, Mapping[str, Any]], tuple[str, ResponseModel]]  # call in a thread


class RequestRunner:
    """Runs the plan of one request and records what happens to it."""

    def __init__(
        self,
        state: ServerState,
        record: RequestRecord,
        plan: AnyServingPlan,
        constraint: Constraint | None = None,
        trace: CanvasTrace | None = None,
    ) -> None:
        self._state = state
        self.record = record
        self.plan = plan
        self._constraint = constraint
        self._trace = trace
        self._trace_lines: list[Line] = []  # of a response that is not streamed
        self._outcomes: list[TaskOutcome[Any]] = []

    async def response(self) -> ResponseModel:
        """Run the plan -> the whole response."""
        async with aclosing(self._run()) as chunks:
            async for _ in chunks:
                pass
        response = self.plan.writer.response(self._outcomes)
        if self._trace is not None and isinstance(response, TracedResponse):
            response.trace = self._trace_lines
        return response

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[Chunks]:
        """The chunks of a streamed response. Entered when the engine has accepted the request."""
        async with aclosing(self._run()) as chunks:
            await anext(chunks)
            yield _without_none(chunks)

    async def _run(self) -> AsyncGenerator[ResponseModel | None, None]:
        """Run all tasks. Yields None when the engine has accepted, then the chunks of a stream."""
        plan, writer = self.plan, self.plan.writer
        rounds = self._engine_rounds()
        is_open = False
        trace = self._trace
        for index, task in enumerate(plan.start(self._constraint)):
            began_s = asyncio.get_running_loop().time()
            usage = EngineUsage()
            result: Any = None
            answers: list[Answer] | None = None
            try:
                while not isinstance(step := await self._advance(task, answers, rounds), Ended):
                    finished: dict[int, Answer] = {}
                    if trace is not None:
                        step = [replace(request, trace=True) for request in step]
                    begun = False
                    async with aclosing(rounds.events(step)) as events:
                        async for number, event in events:
                            if self.record.trace is not None:
                                self.record.trace.add(number, event)
                            if not is_open and rounds.is_accepted:
                                is_open = True
                                yield None
                                for chunk in writer.opening_chunks() if plan.stream else ():
                                    yield chunk
                                for chunk in self._traced(trace.head() if trace is not None else ()):
                                    yield chunk
                            if trace is not None and is_open:
                                if not begun:
                                    begun = True
                                    for chunk in self._traced(trace.begin(step)):
                                        yield chunk
                                for chunk in self._traced(trace.add(number, event)):
                                    yield chunk
                                if isinstance(event, CanvasStep):
                                    continue
                            if isinstance(event, Finish):
                                finished[number] = event.answer
                                usage.add(event.answer)
                            if plan.answers_are_choices:
                                self._record_event(event)
                                if plan.stream or writer.reads_events:
                                    for chunk in writer.event_chunks(number, event):
                                        if plan.stream:
                                            yield chunk
                            elif isinstance(event, Finish):
                                _check_deadline(event.answer)
                    answers = [finished[number] for number in range(len(step))]
                    for answer in answers[:1]:
                        usage.add_first(answer)
                result = step.result
            except TaskDeadlineError:
                pass
            except InputError as error:
                raise self._translated(error) from None
            seconds = asyncio.get_running_loop().time() - began_s
            outcome = TaskOutcome(result=result, usage=usage, seconds=seconds)
            self._record_outcome(outcome)
            self._outcomes.append(outcome)
            if not is_open:
                is_open = True
                yield None
            for chunk in writer.task_chunks(index, outcome) if plan.stream else ():
                yield chunk
        if trace is not None:
            for chunk in self._traced([trace.end()]):
                yield chunk
        if plan.stream and plan.include_usage:
            yield writer.usage_chunk(self._outcomes)

    def _traced(self, lines: Iterable[Line]) -> Iterator[TraceChunk]:
        """Lines of the trace: chunks of a stream, or kept for the response."""
        for line in lines:
            if self.plan.stream:
                yield TraceChunk(object="dgemma.trace", choices=[], trace=line)
            else:
                self._trace_lines.append(line)

    def _engine_rounds(self) -> EngineRounds:
        settings, engine = self._state.settings, self._state.engine
        max_in_flight = None
        if not self.plan.answers_are_choices:
            # More than run at once would only occupy the queue; more than max_choices no client may ask for.
            limit = min(MAX_IN_FLIGHT, engine.stats().slots_total, settings.max_choices)
            max_in_flight = max(1, limit)
        # The engine ends a request at its deadline by itself; the grace is its time to do so.
        timeout_s = settings.request_timeout_s + settings.timeout_grace_s
        key = self.record.key
        policy = SubmitPolicy(
            max_in_flight=max_in_flight,
            deadline_s=self.plan.deadline_s,
            timeout_s=timeout_s,
            tenant=key.name,
            max_tenant_seqs=key.limits.max_num_seqs,
            cache_salt="" if settings.share_prefixes else key.name,
        )
        return EngineRounds(engine, policy)

    async def _advance(self, task: Rounds[Any], answers: list[Answer] | None, rounds: EngineRounds) -> Any:
        """The next round of requests, or the end of the task."""
        if self.plan.answers_are_choices:
            return advance(task, answers)
        # Between two rounds a task works on text, which may take a while: in a thread.
        step = asyncio.create_task(asyncio.to_thread(advance, task, answers))
        try:
            await asyncio.wait({step}, timeout=rounds.time_left_s)
            if not step.done():
                raise rounds.timeout()
            return step.result()
        finally:
            step.cancel()

    def _translated(self, error: InputError) -> ApiError:
        """An InputError of the engine or a task, with the client's spelling of its field."""
        field = self.plan.field_names.get(error.field or "")
        if field is None:
            return invalid(str(error), self.plan.default_field, error.code)
        return invalid(str(error.with_field(field)), field, error.code)

    def _record_event(self, event: EngineEvent) -> None:
        """Count an event of an answer that is a choice of the response."""
        metrics, record = self._state.metrics, self.record
        if isinstance(event, Commit):
            self._record_first_block()
            if event.steps:
                metrics.steps.observe(event.steps)
            metrics.completion_tokens.inc(len(event.tokens))
            record.completion_tokens = (record.completion_tokens or 0) + len(event.tokens)
        elif isinstance(event, Finish):
            if event.answer.forwards:
                metrics.tokens_per_forward.observe(event.answer.tokens_per_forward)
            self._record_finish(event.answer.finish_reason.value, event.answer.text)

    def _record_outcome(self, outcome: TaskOutcome[Any]) -> None:
        """Count a finished task, unless its answers were counted event by event."""
        if self.plan.answers_are_choices:
            return
        metrics, record = self._state.metrics, self.record
        counts = self.plan.writer.counts(outcome)
        self._record_first_block()
        if not self._outcomes:
            record.prompt_tokens = counts.prompt_tokens
            metrics.prompt_tokens.inc(counts.prompt_tokens)
        metrics.completion_tokens.inc(counts.completion_tokens)
        record.completion_tokens = (record.completion_tokens or 0) + counts.completion_tokens
        self._record_finish(counts.reason, counts.text)

    def _record_first_block(self) -> None:
        if self.record.first_block_s is None:
            self.record.first_block_s = round(self.record.elapsed_s, 4)
            self._state.metrics.first_block.observe(self.record.first_block_s)

    def _record_finish(self, reason: str, text: str | None) -> None:
        record = self.record
        self._state.metrics.finished.labels(reason=reason).inc()
        record.finish_reasons = [*(record.finish_reasons or []), reason]
        if self._state.settings.log_text and text is not None:
            record.texts.setdefault("answers", []).append(text)


async def prepare(
    state: ServerState,
    endpoint: Endpoint,
    body: Mapping[str, Any],
    record: RequestRecord,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> RequestRunner:
    """Plan the request of a body, or raise the first thing that is wrong with it.

    on_bytes: called with the bytes of images before they are kept, or with less than none; may raise.
    """
    body = flattened(body)
    context = await with_images(state, endpoint, body, record, on_bytes)
    plan = await asyncio.to_thread(endpoint.create, context, body)
    if body.get("trace") is True and not state.settings.traces:
        raise invalid("this server returns no traces; start it with --traces, or leave trace out.", "trace")
    record.model = plan.model
    record.stream = plan.stream
    record.choices = plan.num_choices
    note_prompt(state, endpoint, body, record)
    constraint = None
    if plan.response_format is not None:
        # Also for infill, which constrains its own canvases: this shows that compiling takes bounded time.
        constraint = await state.compile_pool.compile(
            plan.response_format,
            timeout_s=state.settings.compile_timeout_s,
            tenant=record.key.name,
            usage=state.rate_limits.of(record.key),
            on_used=state.metrics.key_compile_seconds.labels(key=record.key.name).inc,
        )
    if plan.prompt_tokens is not None:
        record.prompt_tokens = plan.prompt_tokens
        state.metrics.prompt_tokens.inc(plan.prompt_tokens)
    trace = None
    if body.get("trace") is True:
        context = state.serving_context
        model = TracedModel(plan.model, context.served, context.text)
        trace = CanvasTrace(model, endpoint.path)
    return RequestRunner(state, record, plan, constraint, trace)


async def with_images(
    state: ServerState,
    endpoint: DescribedEndpoint,
    body: Mapping[str, Any],
    record: RequestRecord,
    on_bytes: Callable[[int], None],
) -> ServingContext:
    """What a request is checked against, with the images that it holds."""
    context = state.context_of(record.key)
    if not state.images.takes_any:
        return replace(context, images=NO_IMAGES)
    if endpoint.kept_inputs is not None:
        body = {**body, "kept": await asyncio.to_thread(endpoint.kept_inputs, context, body)}
    images = await state.images.load(body, record.key.name, on_bytes)
    return replace(context, images=images)


def note_prompt(
    state: ServerState, endpoint: DescribedEndpoint, body: Mapping[str, Any], record: RequestRecord
) -> None:
    """Keep the prompt for the log, if it shall hold texts."""
    if state.settings.log_text:
        prompts = [without_data(body[name]) for name in endpoint.prompt_fields if name in body]
        record.texts["prompt"] = prompts[0] if len(prompts) == 1 else prompts


def _check_deadline(answer: Answer) -> None:
    if answer.finish_reason is FinishReason.DEADLINE:
        raise TaskDeadlineError("the deadline cut a part of the task short.")


async def _without_none(chunks: AsyncGenerator[ResponseModel | None, None]) -> Chunks:
    async for chunk in chunks:
        if chunk is not None:
            yield chunk
