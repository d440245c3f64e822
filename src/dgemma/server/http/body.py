"""Request bodies: read with a size limit and a timeout, then parsed as strict JSON."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from starlette.requests import Request

from dgemma.errors import InputError
from dgemma.server.http.errors import ApiError, invalid, shown
from dgemma.text.json_value import JsonReader

# Of a body that is too large so many bytes more are read and discarded: most clients read no response before
# they have sent all.
_MAX_DISCARDED_BYTES = 4 << 20
_LARGE_BYTES = 64 << 10
# What a body may have more of if it holds images: long runs of base64, in JSON that escapes slashes or not.
_IMAGE_DATA = re.compile(rb"[A-Za-z0-9+/=_\\-]{1024,}")
_CHARSETS = ("utf-8", "utf8", "us-ascii")


async def read_object(
    request: Request,
    *,
    max_bytes: int,
    timeout_s: float,
    max_image_bytes: int = 0,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> dict[str, Any]:
    """The JSON object of the body, without its top-level nulls: null means absent.

    max_image_bytes: so much more it may have in base64. on_bytes: called with the size of each part before it
    is kept; may raise.
    """
    _check_type(request)
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _read_bounded(request, max_bytes + max_image_bytes, on_bytes)
    except TimeoutError:
        raise ApiError(
            f"the body did not arrive within {timeout_s:g} seconds.",
            status=408,
            code="body_timeout",
            headers={"connection": "close"},
        ) from None
    # A large body is parsed in a thread, so that other streams go on.
    if len(raw) < _LARGE_BYTES:
        return parse_object(raw)
    if len(raw) > max_bytes and await asyncio.to_thread(_num_other_bytes, raw) > max_bytes:
        raise _too_large(max_bytes, " besides images")
    return await asyncio.to_thread(parse_object, raw)


def parse_object(raw: bytes) -> dict[str, Any]:
    return checked_fields(strict_object(raw))


def strict_object(raw: bytes, what: str = "the body") -> dict[str, Any]:
    """Parse one JSON object; what two parsers could read differently (NaN, repeated names) is refused."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _malformed(
            f"{what} is not UTF-8: byte {raw[error.start]:#04x} at position {error.start}."
        ) from None
    try:
        found = json.loads(
            text,
            parse_constant=partial(_refuse_constant, what),
            parse_float=partial(_finite, what),
            object_pairs_hook=_without_repeats,
        )
    except RecursionError:
        raise _malformed(f"{what} is nested too deeply; flatten it.") from None
    except json.JSONDecodeError as error:
        raise _malformed(
            f"{what} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from None
    except ValueError:  # Python refuses integers of more than some thousand digits
        raise _malformed(f"{what} holds a number of too many digits.") from None
    if not isinstance(found, dict):
        raise _malformed(f"{what} is not a JSON object; send one such as {{...}}.")
    return found


def checked_fields(body: dict[str, Any]) -> dict[str, Any]:
    """The body without its nulls, which mean absent fields; the size of its values is bounded."""
    reader = JsonReader()
    for name, value in body.items():
        try:
            reader.read(value, reader.key(name, "the body"))
        except InputError as error:
            raise invalid(str(error), name[:100]) from None
    return {name: value for name, value in body.items() if value is not None}


def _check_type(request: Request) -> None:
    kind, _, parameters = request.headers.get("content-type", "").partition(";")
    # Also for security: a web page may send text/plain to this machine without a preflight, but not JSON.
    if kind.strip().lower() != "application/json":
        raise _unsupported(f"Content-Type is {shown(kind.strip())}; send application/json.")
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        charset = value.strip().strip('"').lower()
        if name.strip().lower() == "charset" and charset not in _CHARSETS:
            raise _unsupported(f"the charset is {shown(charset)}; send UTF-8.")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        raise _unsupported(f"Content-Encoding is {shown(encoding)}; send the body as it is.")


async def _read_bounded(request: Request, max_bytes: int, on_bytes: Callable[[int], None]) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and len(declared) > 18:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= max_bytes:
            on_bytes(len(part))
            parts.append(part)
        else:
            parts.clear()
            if size > max_bytes + _MAX_DISCARDED_BYTES:
                break
    if size > max_bytes:
        raise _too_large(max_bytes)
    return b"".join(parts)


def _num_other_bytes(raw: bytes) -> int:
    """Besides image data: JSON of many values takes fifty times its size."""
    return len(raw) - sum(match.end() - match.start() for match in _IMAGE_DATA.finditer(raw))


def _too_large(max_bytes: int, what: str = "") -> ApiError:
    return ApiError(
        f"the body has more than {max_bytes} bytes{what}, which this server takes at most; shorten the "
        "request.",
        status=413,
        code="body_too_large",
        headers={"connection": "close"},
    )


def _unsupported(message: str) -> ApiError:
    return ApiError(message, status=415, code="unsupported_media_type", headers={"connection": "close"})


def _malformed(message: str) -> ApiError:
    return ApiError(message, code="malformed_body")


def _refuse_constant(what: str, name: str) -> NoReturn:
    raise _malformed(f"{what} holds {name}, which JSON does not have.")


def _finite(what: str, text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise _malformed(f"{what} holds the number {text[:40]}, which is out of range.")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Most JSON parsers silently drop one of two values under one name; here it is an error."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise invalid(f"the name {shown(name)} stands twice in one object; give it once.", name[:100])
        found[name] = value
    return found
