"""The two forms of a log record: one JSON object, or a line for people.

A line for people holds nothing that a terminal would obey.
"""

from __future__ import annotations

import json
import logging
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, TextIO
from urllib.parse import quote

_RESET, _DIM, _RED, _YELLOW = "\x1b[0m", "\x1b[2m", "\x1b[31m", "\x1b[33m"
_LEVELS = ((logging.ERROR, "error: ", _RED), (logging.WARNING, "warning: ", _YELLOW))
# What a path may have unescaped (RFC 3986). Spaces are escaped too: a path cannot look like another column.
_PATH_CHARS = "/:@!$&'()*+,;=~"
_CLIENT_LEFT = 499
# In a line of a request by their own wording, or left out: the JSON form has them all.
_WORDED = (
    "request_id", "trace_id", "method", "path", "status", "duration_s", "key", "model", "stream", "choices",
    "prompt_tokens", "completion_tokens", "finish_reasons", "first_block_s", "error_code", "error_param",
    "failure", "at",
)  # fmt: skip


class JsonFormatter(logging.Formatter):
    """A log record as one JSON object."""

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


class TextFormatter(logging.Formatter):
    """A log record as one readable line; the frames of a failure follow it."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        facts = dict(getattr(record, "facts", {}))
        if record.exc_info and record.exc_info[1] is not None:
            facts |= failure_facts(record.exc_info[1], with_text=False)
        event = record.getMessage()
        level, style = _level(record, facts)
        match event:
            case "request" if "method" in facts:
                parts = list(_request_parts(facts))
            case "listening" if "address" in facts:
                parts = [f"serving {facts['model']} at {facts['address']}", "(docs: /docs, Ctrl-C ends)"]
            case _:
                parts = [event, *(f"{name}={_value(value)}" for name, value in facts.items() if name != "at")]
        line = level + "  ".join(printable(part) for part in parts)
        frames = [f"          at {printable(str(frame))}" for frame in facts.get("at", ())]
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        return "\n".join([f"{self._styled(clock, _DIM)}  {self._styled(line, style)}", *frames])

    def _styled(self, text: str, style: str) -> str:
        return f"{style}{text}{_RESET}" if self._colour and style else text


def failure_facts(error: BaseException, *, with_text: bool) -> dict[str, Any]:
    """Type and frames of an error. Its message may quote a prompt, so it needs `with_text`."""
    while error.__cause__ is not None:  # report the root cause of an engine failure
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)[-12:]
    facts: dict[str, Any] = {
        "failure": type(error).__name__,
        "at": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames],
    }
    if with_text:
        facts["failure_message"] = str(error)
    return facts


def has_colour(stream: TextIO) -> bool:
    """On a terminal that knows colours, unless NO_COLOR is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def printable(text: str) -> str:
    """`text` with escapes in place of control characters, line ends and marks that reorder a line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _level(record: logging.LogRecord, facts: Mapping[str, Any]) -> tuple[str, str]:
    """The word that a line begins with, and its colour."""
    for level, word, style in _LEVELS:
        if record.levelno >= level:
            return word, style
    status = facts.get("status") or 0
    return "", _RED if status >= 500 else _YELLOW if status >= 400 else ""


def _request_parts(facts: Mapping[str, Any]) -> Iterator[str]:
    status = facts["status"]
    yield f"{facts['method']} {quote(facts['path'], safe=_PATH_CHARS, errors='replace')}"
    yield "client left" if status == _CLIENT_LEFT else str(status)
    yield f"{facts['duration_s']:.2f} s"
    if facts.get("completion_tokens") is not None:
        yield f"{facts['completion_tokens']} tokens"
    if facts.get("error_code") is not None:
        param = facts.get("error_param")
        yield facts["error_code"] + (f" ({param})" if param else "")
    if "key" in facts:
        yield f"key={facts['key']}"
    if "failure" in facts:
        yield str(facts["failure"])
    if (status or 0) >= 500:  # the client was told that the log has it
        yield f"id={facts['request_id']}"
    # Texts, which are there only with --log-text.
    yield from (f"{name}={_value(value)}" for name, value in facts.items() if name not in _WORDED)


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
