"""Batches: many bodies answered without HTTP, by the same pipeline."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress

from dgemma.engine.service import EngineDeadError, EngineRestartedError
from dgemma.server.batch.protocol import ENDPOINTS, OK, BatchRequest, BatchResult
from dgemma.server.http.body import checked_fields
from dgemma.server.http.errors import invalid, to_json
from dgemma.server.http.log import RequestRecord, note_error
from dgemma.server.http.settings import Settings
from dgemma.server.pipeline import prepare
from dgemma.server.state import ServerState


def max_in_flight(settings: Settings) -> int:
    """Requests at once: twice the slots, so that a free slot finds a request that is already read."""
    return 2 * settings.max_num_seqs


def queue_len(settings: Settings) -> int:
    """A queue for all requests in flight: a batch is never refused with 429."""
    return max_in_flight(settings) * settings.max_choices


async def answer_all(
    state: ServerState, requests: Iterator[BatchRequest], add: Callable[[BatchResult], None]
) -> None:
    """Answer all requests, several at once; `add` takes each result as it comes, in no order.

    On an error or a cancellation all requests in flight are cancelled before this returns.
    """

    async def work() -> None:
        for request in requests:  # shared: each worker takes the next one
            add(await _answer(state, request))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(max_in_flight(state.settings)):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        with suppress(Exception):  # the results are written, whatever fails here
            await state.engine.drain(state.settings.drain_timeout_s)


async def _answer(state: ServerState, request: BatchRequest) -> BatchResult:
    """The result of one request. If the engine is restarted meanwhile, it is asked once more."""
    try:
        return await _answer_once(state, request, may_repeat=True)
    except EngineRestartedError:
        return await _answer_once(state, request, may_repeat=False)


async def _answer_once(state: ServerState, request: BatchRequest, *, may_repeat: bool) -> BatchResult:
    record = RequestRecord(id=secrets.token_hex(16), method="POST", path=request.url)
    try:
        runner = await prepare(state, ENDPOINTS[request.url], checked_fields(request.body), record)
        if runner.plan.stream:
            raise invalid(
                "stream is true, which is not supported in a batch. Leave stream out.",
                "stream",
                "unsupported_parameter",
            )
        body = (await runner.response()).to_json()
        return BatchResult(custom_id=request.custom_id, request_id=record.id, status=OK, body=body)
    except Exception as error:  # the failure of one request is its result
        failure = state.engine.stats().failure
        if failure is not None:  # all other requests would fail too
            raise EngineDeadError(f"the engine has stopped: {failure}") from error
        if may_repeat and isinstance(error, EngineRestartedError):
            raise
        api_error = note_error(error, record)
        return BatchResult(
            custom_id=request.custom_id,
            request_id=record.id,
            status=api_error.status,
            body=to_json(api_error.body()),
            reason=str(api_error) if record.failure is None else f"{type(error).__name__}: {error}",
        )
