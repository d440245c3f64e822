"""Every refusal and failure in the one form that OpenAI's clients read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.responses import Response

from dgemma.engine.service import BusyError, DrainingError, EngineFailureError
from dgemma.errors import DgemmaError, InputError

INVALID = "invalid_request_error"
_RETRY_WHEN_DRAINING_S = 5.0


class ApiError(DgemmaError):
    """An answer other than the one that was asked for."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def refused(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    """A 400 that names the field."""
    return ApiError(message, param=param, code=code)


def too_many(message: str, retry_after_s: float) -> ApiError:
    return ApiError(
        message,
        status=429,
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"retry-after": _whole_seconds(retry_after_s)},
    )


def draining() -> ApiError:
    return ApiError(
        "this server is shutting down and takes no new requests; ask again in a moment.",
        status=503,
        kind="server_error",
        code="draining",
        headers={"retry-after": _whole_seconds(_RETRY_WHEN_DRAINING_S)},
    )


def timed_out(message: str) -> ApiError:
    # The same request would take as long again: clients shall not repeat it by themselves.
    headers = {"x-should-retry": "false"}
    return ApiError(message, status=504, kind="server_error", code="timeout", headers=headers)


def api_error_of(error: Exception, fields: Iterable[str] = ()) -> ApiError:
    """What a client is told of any error. `fields`: names that an InputError's sentence may begin with."""
    match error:
        case ApiError():
            return error
        case BusyError():
            return too_many(str(error), error.retry_after_s)
        case DrainingError():
            return draining()
        case InputError():
            return refused(str(error), named_field(str(error), fields))
        case EngineFailureError():
            # Its own text may speak of things inside; the log has it.
            return _failed("the engine failed on this request; others are not affected.", "engine_failure")
    return _failed("an error inside the server; its log has the request id.", "internal_error")


def named_field(message: str, fields: Iterable[str]) -> str | None:
    """The field a sentence is about: our errors begin with the name."""
    word = message.partition(" ")[0].rstrip(":;,")
    return word if word in fields else None


def error_response(error: ApiError) -> Response:
    return Response(
        to_json(error.body()),
        status_code=error.status,
        media_type="application/json",
        headers=error.headers,
    )


def to_json(value: Any) -> bytes:
    # A lone surrogate of a client's text, which UTF-8 lacks, becomes its JSON escape.
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")


def shown(value: object) -> str:
    """A client's value in an error: one line, and no more of it than needed."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and value.bit_length() > 128:
        return "a huge number"
    text = repr(value[:100] if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."


def _failed(message: str, code: str) -> ApiError:
    return ApiError(message, status=500, kind="server_error", code=code)


def _whole_seconds(seconds: float) -> str:
    """As Retry-After wants them; never 0, which some clients take as "at once, for ever"."""
    return str(max(1, math.ceil(seconds)) if math.isfinite(seconds) else 60)
