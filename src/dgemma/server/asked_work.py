"""Planned work on its way to its answer: rounds of requests to the engine, until it is done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from dgemma.canvas.rounds import Ended, Rounds, advance
from dgemma.errors import InputError
from dgemma.events import Answer
from dgemma.server.api_error import refused, timed_out
from dgemma.server.in_flight import InFlight, OutOfTimeError, Tally
from dgemma.server.record import RequestRecord
from dgemma.server.replies import Reply
from dgemma.server.state import ServerState
from dgemma.server.work import AnyWorkPlan, Done

Dones = AsyncGenerator[tuple[int, Done[Any]], None]


@dataclass
class AskedWork:
    """Like `Asked`, for work that is more than one request to the engine."""

    state: ServerState
    record: RequestRecord
    plan: AnyWorkPlan
    _done: list[Done[Any]] = field(default_factory=list)

    async def whole(self) -> Reply:
        async with aclosing(self._work(self._in_flight())) as works:
            async for _ in works:
                pass
        return self.plan.writer.whole(self._done)

    @asynccontextmanager
    async def replies(self) -> AsyncIterator[AsyncGenerator[Reply, None]]:
        """The replies of a stream. Entered when the engine has taken a request, or raises its refusal."""
        flight = self._in_flight()
        finished: asyncio.Queue[tuple[int, Done[Any]] | None] = asyncio.Queue()

        async def work() -> None:
            try:
                async with aclosing(self._work(flight)) as works:
                    async for one in works:
                        finished.put_nowait(one)
            finally:
                finished.put_nowait(None)

        working = asyncio.create_task(work())
        accepted = asyncio.create_task(flight.accepted.wait())
        try:
            await asyncio.wait({working, accepted}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            yield self._replies(finished, working)
        finally:
            accepted.cancel()
            working.cancel()
            await asyncio.gather(accepted, working, return_exceptions=True)

    async def _replies(
        self, finished: asyncio.Queue[tuple[int, Done[Any]] | None], working: asyncio.Task[None]
    ) -> AsyncGenerator[Reply, None]:
        while (one := await finished.get()) is not None:
            for reply in self.plan.writer.chunks(*one):
                yield reply
        await working
        if self.plan.include_usage:
            yield self.plan.writer.usage_chunk(self._done)

    def _in_flight(self) -> InFlight:
        # One body has no more requests with the engine than it could ask for answers.
        most = self.state.settings.max_choices
        return InFlight(self.state.engine, deadline_s=self.plan.deadline_s, most=most)

    async def _work(self, flight: InFlight) -> Dones:
        loop, settings = asyncio.get_running_loop(), self.state.settings
        # The engine ends at the deadline by itself; it has the grace to do so.
        ends_at = loop.time() + settings.request_timeout_s + settings.timeout_grace_s
        for index, rounds in enumerate(self.plan.works):
            try:
                async with asyncio.timeout_at(ends_at):
                    done = await self._do(rounds, flight)
            except TimeoutError:
                limit_s = settings.request_timeout_s + settings.timeout_grace_s
                raise timed_out(f"no answer within {limit_s:g} seconds; ask for less.") from None
            self._note(done)
            yield index, done

    async def _do(self, rounds: Rounds[Any], flight: InFlight) -> Done[Any]:
        loop = asyncio.get_running_loop()
        began, tally, result = loop.time(), Tally(), None
        answers: list[Answer] | None = None
        try:
            while True:
                # What is decided between two rounds is work on text, and may take a while.
                step = await asyncio.to_thread(advance, rounds, answers)
                if isinstance(step, Ended):
                    result = step.result
                    break
                answers = await flight.ask(step, tally)
        except OutOfTimeError:
            pass
        except InputError as error:
            raise refused(str(error), self.plan.about) from None
        return Done(result=result, tally=tally, seconds=loop.time() - began)

    def _note(self, done: Done[Any]) -> None:
        metrics, record = self.state.metrics, self.record
        counts = self.plan.writer.counts(done)
        if not self._done:
            record.first_block_s = round(record.elapsed_s, 4)
            metrics.first_block.observe(record.first_block_s)
            record.prompt_tokens = counts.prompt_tokens
            metrics.prompt_tokens.add(counts.prompt_tokens)
        self._done.append(done)
        metrics.completion_tokens.add(counts.completion_tokens)
        metrics.finished.add(reason=counts.reason)
        record.completion_tokens = (record.completion_tokens or 0) + counts.completion_tokens
        record.finish_reasons = [*(record.finish_reasons or []), counts.reason]
        if self.state.settings.log_text and counts.text is not None:
            record.texts.setdefault("answers", []).append(counts.text)
