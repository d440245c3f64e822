"""What is known of one request while it runs; the log and the metrics are written from it."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from dgemma.server.api_error import ApiError, api_error_of

_KEY = "dgemma.record"
_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
CLIENT_LEFT = 499  # no status of HTTP: the client was gone before one was sent


@dataclass
class RequestRecord:
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
    failure: BaseException | None = None  # what nobody expected
    is_answered: bool = False  # the last byte was sent
    has_left: bool = False  # the client, before its answer was whole
    texts: dict[str, Any] = field(default_factory=dict)  # only if texts are to be logged

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.began_at


def begin_record(scope: Scope) -> RequestRecord:
    """A record in the scope, under the id the client gave, if it is one that a log line can hold."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    id_ = given.decode() if _ID.fullmatch(given) else secrets.token_hex(16)
    record = RequestRecord(id=id_, method=scope["method"], path=scope["path"])
    scope[_KEY] = record
    return record


def record_of(scope: Scope) -> RequestRecord:
    record: RequestRecord = scope[_KEY]
    return record


def note_error(error: Exception, record: RequestRecord) -> ApiError:
    """-> what the client is told. An error that is our own goes to the log as it is."""
    record.error = api_error_of(error)
    record.failure = error if record.error.status == 500 else None
    return record.error
