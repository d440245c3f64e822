"""One body on its way to its answer. HTTP and batches go this same way, so a body means the same to both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from dgemma.engine.service import EngineEvent
from dgemma.errors import InputError
from dgemma.events import Answer, Commit, Finish
from dgemma.server.answers import all_of, open_answers
from dgemma.server.asked_work import AskedWork
from dgemma.server.plan import Plan, Planner
from dgemma.server.record import RequestRecord
from dgemma.server.replies import Reply
from dgemma.server.sse import DONE
from dgemma.server.state import ServerState
from dgemma.server.text import TextService
from dgemma.server.work import AnyWorkPlan


class Writer(Protocol):
    """Events to replies, in the form of one endpoint."""

    def whole(self, answers: Sequence[Answer]) -> Reply: ...
    def opening(self) -> Iterator[Reply]: ...
    def chunks(self, index: int, event: EngineEvent) -> Iterator[Reply]: ...
    def usage_chunk(self, answers: Sequence[Answer]) -> Reply: ...


@dataclass(frozen=True)
class Form:
    """What one endpoint does in its own way."""

    plan: Callable[[Planner, Mapping[str, Any]], Plan | AnyWorkPlan]  # from a body; works on text
    prompt_fields: tuple[str, ...]  # what of a body is the prompt, for a log that may hold it
    writer: Callable[[Plan, TextService], Writer] | None = None  # None: all it plans is work in rounds
    end_of_stream: bytes = DONE


@dataclass
class Asked:
    """A planned request; what happens to it is counted, and noted in its record."""

    state: ServerState
    record: RequestRecord
    plan: Plan
    writer: Writer
    _finished: dict[int, Answer] = field(default_factory=dict)

    @property
    def answers(self) -> list[Answer]:
        """All of them, when all events have been taken."""
        return all_of(self._finished, len(self.plan.requests))

    @asynccontextmanager
    async def events(self) -> AsyncIterator[AsyncIterator[tuple[int, EngineEvent]]]:
        """What the engine says. Entered when it has accepted all, left when all is finished or cancelled."""
        settings = self.state.settings
        # The engine ends at the deadline by itself; it has the grace to do so.
        timeout_s = settings.request_timeout_s + settings.timeout_grace_s
        try:
            async with open_answers(self.state.engine, self.plan.requests, timeout_s=timeout_s) as events:
                yield self._noted(events)
        except InputError as error:
            raise self.plan.refusal(error) from None

    async def whole(self) -> Reply:
        async with self.events() as events:
            async for _ in events:
                pass
        return self.writer.whole(self.answers)

    @asynccontextmanager
    async def replies(self) -> AsyncIterator[AsyncGenerator[Reply, None]]:
        """The replies of a stream. Entered when the engine has accepted all."""
        async with self.events() as events:
            yield self._replies(events)

    async def _replies(self, events: AsyncIterator[tuple[int, EngineEvent]]) -> AsyncGenerator[Reply, None]:
        for reply in self.writer.opening():
            yield reply
        async for index, event in events:
            for reply in self.writer.chunks(index, event):
                yield reply
        answers = self.answers
        if self.plan.include_usage:
            yield self.writer.usage_chunk(answers)

    async def _noted(
        self, events: AsyncIterator[tuple[int, EngineEvent]]
    ) -> AsyncIterator[tuple[int, EngineEvent]]:
        metrics, record = self.state.metrics, self.record
        async for index, event in events:
            if isinstance(event, Commit):
                if record.first_block_s is None:
                    record.first_block_s = round(record.elapsed_s, 4)
                    metrics.first_block.observe(record.first_block_s)
                if event.steps:
                    metrics.steps.observe(event.steps)
                metrics.completion_tokens.add(len(event.tokens))
                record.completion_tokens = (record.completion_tokens or 0) + len(event.tokens)
            elif isinstance(event, Finish):
                answer = self._finished[index] = event.answer
                metrics.finished.add(reason=answer.finish_reason.value)
                metrics.tokens_per_forward.observe(answer.tokens_per_forward)
                record.finish_reasons = [*(record.finish_reasons or []), answer.finish_reason.value]
                if self.state.settings.log_text:
                    record.texts.setdefault("answers", []).append(answer.text)
            yield index, event


async def read_asked(
    state: ServerState, form: Form, body: Mapping[str, Any], record: RequestRecord
) -> Asked | AskedWork:
    """What a body asks for, or the first thing that is wrong with it."""
    plan = await asyncio.to_thread(form.plan, state.planner, body)
    record.model = plan.model
    record.stream = plan.stream
    record.choices = plan.num_choices
    if state.settings.log_text:
        prompts = [body[name] for name in form.prompt_fields if name in body]
        record.texts["prompt"] = prompts[0] if len(prompts) == 1 else prompts
    constraint = None
    if plan.form is not None:
        limit_s = state.settings.request_timeout_s + state.settings.timeout_grace_s
        constraint = await state.constraints.of(plan.form, timeout_s=limit_s)
    if not isinstance(plan, Plan):
        # A gap's machine is another one, but now it is known that it can be made in time.
        return AskedWork(state, record, plan)
    record.prompt_tokens = sum(map(len, plan.prompts))
    state.metrics.prompt_tokens.add(record.prompt_tokens)
    if constraint is not None:
        plan = plan.within(constraint)
    assert form.writer is not None
    return Asked(state, record, plan, form.writer(plan, state.text))
