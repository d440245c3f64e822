"""API errors: every refusal and failure in the JSON form that OpenAI's clients read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from dgemma.engine.service import (
    BusyError,
    DrainingError,
    EngineDeadError,
    EngineFailureError,
    EngineRestartedError,
)
from dgemma.errors import DgemmaError, InputError

INVALID = "invalid_request_error"
# Below this path clients read errors in Anthropic's form.
ANTHROPIC_PATH = "/v1/messages"
# Anthropic's names of the kinds of errors; others are those of a request that is wrong.
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_RETRY_WHEN_UNAVAILABLE_S = 5.0


class ApiError(DgemmaError):
    """An HTTP response other than 200, with OpenAI's error fields."""

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


def invalid(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    """A 400 that names the field."""
    return ApiError(message, param=param, code=code)


def context_too_long(message: str, param: str) -> ApiError:
    return invalid(message, param, "context_length_exceeded")


def missing_field(path: str) -> ApiError:
    return invalid(f"{path} is missing; give it.", path, "missing_required_parameter")


def invalid_input(error: InputError, *, default_field: str | None = None, prefix: str = "") -> ApiError:
    """An InputError as a 400: its own field, or `default_field`, and its own code."""
    return invalid(f"{prefix}{error}", error.field or default_field, error.code)


def too_many_requests(message: str, retry_after_s: float) -> ApiError:
    return ApiError(
        message,
        status=429,
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"retry-after": _whole_seconds(retry_after_s)},
    )


def server_draining() -> ApiError:
    message = "this server is shutting down and takes no new requests; ask again in a moment."
    return _unavailable(message, "draining")


def engine_down() -> ApiError:
    message = "the engine of this server has stopped, and no request is served until it is restarted."
    return _unavailable(message, "engine_down")


def engine_stalled() -> ApiError:
    message = "a step of the engine takes too long; it is about to be restarted."
    return _unavailable(message, "engine_stalled")


def timed_out(message: str) -> ApiError:
    # The same request would take as long again: clients must not repeat it by themselves.
    headers = {"x-should-retry": "false"}
    return ApiError(message, status=504, kind="server_error", code="timeout", headers=headers)


def to_api_error(error: Exception) -> ApiError:
    """The response for any exception."""
    match error:
        case ApiError():
            return error
        case BusyError():
            return too_many_requests(str(error), error.retry_after_s)
        case DrainingError():
            return server_draining()
        case InputError():
            return invalid_input(error)
        case EngineDeadError():
            return engine_down()
        case EngineRestartedError():
            message = "the engine was restarted while it wrote this answer; ask again."
            return _unavailable(message, "engine_restarted")
        case EngineFailureError():
            # Its own text may describe internals; the log has it.
            return _failed("the engine failed on this request; others are not affected.", "engine_failure")
    return _failed("an error inside the server; its log has the request id.", "internal_error")


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """The `error` of Anthropic's form."""
    return {
        "type": _ANTHROPIC_KINDS.get(error.status, INVALID),
        "message": str(error),
        "details": {"error_code": error.code, "param": error.param},
    }


def error_body(error: ApiError, path: str = "", request_id: str | None = None) -> dict[str, Any]:
    """The error in the form that clients of this path read."""
    if path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/"):
        return {"type": "error", "error": anthropic_error(error), "request_id": request_id}
    return error.body()


def error_response(error: ApiError, path: str = "", request_id: str | None = None) -> Response:
    return Response(
        to_json(error_body(error, path, request_id)),
        status_code=error.status,
        media_type="application/json",
        headers=error.headers,
    )


def to_json(value: Any) -> bytes:
    # A lone surrogate in a client's text, which UTF-8 cannot encode, becomes its JSON escape.
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")


def shown(value: object) -> str:
    """A client's value in an error message: one line, shortened."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and value.bit_length() > 128:
        return "a huge number"
    text = repr(value[:100] if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."


def _unavailable(message: str, code: str) -> ApiError:
    headers = {"retry-after": _whole_seconds(_RETRY_WHEN_UNAVAILABLE_S)}
    return ApiError(message, status=503, kind="server_error", code=code, headers=headers)


def _failed(message: str, code: str) -> ApiError:
    return ApiError(message, status=500, kind="server_error", code=code)


def _whole_seconds(seconds: float) -> str:
    """The value of Retry-After; never 0, which some clients take as "retry at once, without end"."""
    return str(max(1, math.ceil(seconds)) if math.isfinite(seconds) else 60)
