"""Structured logs: one JSON object per line, without the words of prompts and answers unless asked for."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import traceback
from typing import Any, TextIO

from dgemma.server.record import RequestRecord

LOGGER = logging.getLogger("dgemma.server")
_FIELDS = (
    "model", "stream", "choices", "prompt_tokens", "completion_tokens", "finish_reasons", "first_block_s",
)  # fmt: skip


def configure_log(stream: TextIO) -> None:
    """Send our lines and uvicorn's to `stream`. Its access log stays silent: ours says more."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(_is_news)
    for name in (LOGGER.name, "dgemma.engine", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.INFO)
    logging.getLogger("uvicorn.access").handlers = []
    logging.getLogger("uvicorn.access").propagate = False


def _is_news(record: logging.LogRecord) -> bool:
    """A request that a second signal cancels has a line of its own; uvicorn takes it for a failure."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            entry |= failure_facts(record.exc_info[1], with_text=False)
        return json.dumps(entry, ensure_ascii=True, default=str)


def log_request(record: RequestRecord, *, with_text: bool) -> None:
    """The one line of a request, written when it is over."""
    facts: dict[str, Any] = {
        "request_id": record.id,
        "method": record.method,
        "path": record.path[:200],
        "status": record.status,
        "duration_s": round(record.elapsed_s, 4),
    }
    facts |= {name: value for name in _FIELDS if (value := getattr(record, name)) is not None}
    if record.error is not None:
        facts |= {"error_code": record.error.code, "error_param": record.error.param}
        if with_text:  # a sentence about a field may quote it
            facts["error_message"] = str(record.error)
    if record.failure is not None:
        facts |= failure_facts(record.failure, with_text=with_text)
    if with_text:
        facts |= record.texts
    level = logging.ERROR if record.failure is not None else logging.INFO
    LOGGER.log(level, "request", extra={"facts": facts})


def failure_facts(error: BaseException, *, with_text: bool) -> dict[str, Any]:
    """Where it happened. What an error says may quote a prompt."""
    while error.__cause__ is not None:  # the engine's failure is that of something in a step
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)[-12:]
    facts: dict[str, Any] = {
        "failure": type(error).__name__,
        "at": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames],
    }
    if with_text:
        facts["failure_message"] = str(error)
    return facts
