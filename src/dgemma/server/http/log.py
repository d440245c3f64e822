"""The record of one request and the log: one JSON object per line, or lines for people on a terminal.

Texts of prompts and answers are logged only with `--log-text`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from starlette.types import Scope

from dgemma.server.http.api_key import ANONYMOUS, ApiKey
from dgemma.server.http.errors import ApiError, to_api_error
from dgemma.server.http.log_formats import JsonFormatter, TextFormatter, failure_facts, has_colour

if TYPE_CHECKING:
    from dgemma.server.http.tracing import RequestTrace

LOGGER = logging.getLogger("dgemma.server")
_FIELDS = (
    "model", "stream", "choices", "prompt_tokens", "completion_tokens", "finish_reasons", "first_block_s",
)  # fmt: skip
_UVICORN = "uvicorn.error"
_KEY = "dgemma.record"
_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
CLIENT_LEFT = 499  # not an HTTP status: the client disconnected before one was sent


@dataclass
class RequestRecord:
    """What the server notes of a request while it runs; the log line and the metrics are made from it."""

    id: str
    method: str
    path: str
    began_at: float = field(default_factory=time.perf_counter)
    status: int | None = None
    model: str | None = None
    stream: bool | None = None
    choices: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reasons: list[str] | None = None
    first_block_s: float | None = None
    error: ApiError | None = None
    failure: BaseException | None = None  # an unexpected exception
    is_answered: bool = False  # the last byte was sent
    has_left: bool = False  # the client disconnected before the last byte
    texts: dict[str, Any] = field(default_factory=dict)  # with --log-text only
    trace: RequestTrace | None = None
    key: ApiKey = ANONYMOUS

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.began_at


def begin_record(scope: Scope) -> RequestRecord:
    """Put a new record into the scope. Its id is the client's x-request-id, if that is fit for a log line."""
    client_id = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    id_ = client_id.decode() if _ID.fullmatch(client_id) else secrets.token_hex(16)
    record = RequestRecord(id=id_, method=scope["method"], path=scope["path"])
    scope[_KEY] = record
    return record


def record_of(scope: Scope) -> RequestRecord:
    record: RequestRecord = scope[_KEY]
    return record


def note_error(error: Exception, record: RequestRecord) -> ApiError:
    """Note an error -> the error response. An internal error (500) is kept for the log as it is."""
    record.error = to_api_error(error)
    record.failure = error if record.error.status == 500 else None
    return record.error


def configure_log(stream: TextIO, log_format: str = "auto") -> None:
    """Send the logs of dgemma and uvicorn to `stream`. uvicorn's access log is off: ours holds more.

    log_format: `text`, `json`, or `auto`: text if `stream` is a terminal.
    """
    is_text = log_format == "text" or (log_format == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextFormatter(colour=has_colour(stream)) if is_text else JsonFormatter())
    handler.addFilter(_is_not_cancellation)
    for name in (LOGGER.name, "dgemma.engine", "dgemma.model", _UVICORN):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        # Where uvicorn tells people that it starts and ends, our own lines say so.
        logger.setLevel(logging.WARNING if is_text and name == _UVICORN else logging.INFO)
    logging.getLogger("uvicorn.access").handlers = []
    logging.getLogger("uvicorn.access").propagate = False


def _is_not_cancellation(record: logging.LogRecord) -> bool:
    """A request cancelled by a second signal has its own line; uvicorn would log it as a failure."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def log_request(record: RequestRecord, *, with_text: bool) -> None:
    """Write the one line of a request, at its end."""
    facts: dict[str, Any] = {
        "request_id": record.id,
        **({} if record.trace is None else {"trace_id": record.trace.trace_id}),
        "method": record.method,
        "path": record.path[:200],
        "status": record.status,
        "duration_s": round(record.elapsed_s, 4),
    }
    if record.key.name:
        facts["key"] = record.key.name
    facts |= {name: value for name in _FIELDS if (value := getattr(record, name)) is not None}
    if record.error is not None:
        facts |= {"error_code": record.error.code, "error_param": record.error.param}
        if with_text:  # the message may quote the field
            facts["error_message"] = str(record.error)
    if record.failure is not None:
        facts |= failure_facts(record.failure, with_text=with_text)
    if with_text:
        facts |= record.texts
    level = logging.ERROR if record.failure is not None else logging.INFO
    LOGGER.log(level, "request", extra={"facts": facts})
