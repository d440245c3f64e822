"""A batch: many bodies answered without HTTP, each as it would be over HTTP."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress

from dgemma.engine.service import EngineFailureError
from dgemma.server.api_error import refused, to_json
from dgemma.server.asked import read_asked
from dgemma.server.batch_requests import FORMS, BatchRequest
from dgemma.server.batch_results import OK, BatchResult
from dgemma.server.body import checked
from dgemma.server.record import RequestRecord, note_error
from dgemma.server.settings import Settings
from dgemma.server.state import ServerState


def max_in_flight(settings: Settings) -> int:
    """Requests at once: a place that gets free finds the next one waiting, already read."""
    return 2 * settings.max_num_seqs


def queue_len(settings: Settings) -> int:
    """A queue that takes all that is in flight: in a batch nothing is refused because there is much of it."""
    return max_in_flight(settings) * settings.max_choices


async def answer_all(
    state: ServerState, requests: Iterator[BatchRequest], add: Callable[[BatchResult], None]
) -> None:
    """Answer all requests, several at once; `add` takes each result as it comes, in no order.

    Left by an error or a cancellation only when all that was in flight is cancelled.
    """

    async def work() -> None:
        for request in requests:  # shared: each takes the next one
            add(await _answer(state, request))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(max_in_flight(state.settings)):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        with suppress(Exception):  # whatever is wrong with it: what was answered is written
            await state.engine.drain(state.settings.drain_timeout_s)


async def _answer(state: ServerState, request: BatchRequest) -> BatchResult:
    record = RequestRecord(id=secrets.token_hex(16), method="POST", path=request.url)
    try:
        asked = await read_asked(state, FORMS[request.url], checked(request.body), record)
        if asked.plan.stream:
            raise refused(
                "stream is true, which is not supported in a batch: nobody listens. Leave stream out.",
                "stream",
                "unsupported_parameter",
            )
        body = (await asked.whole()).to_json()
        return BatchResult(custom_id=request.custom_id, request_id=record.id, status=OK, body=body)
    except Exception as error:  # what goes wrong with one request is its result
        failure = state.engine.stats().failure
        if failure is not None:  # but not this: all the others would fail too
            raise EngineFailureError(f"the engine works no more: {failure}") from error
        told = note_error(error, record)
        return BatchResult(
            custom_id=request.custom_id,
            request_id=record.id,
            status=told.status,
            body=to_json(told.body()),
            reason=str(told) if record.failure is None else f"{type(error).__name__}: {error}",
        )
