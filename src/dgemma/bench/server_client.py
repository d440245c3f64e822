"""One request to an OpenAI-compatible server, and what became of it. No request raises."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from dgemma.errors import InputError

if TYPE_CHECKING:
    import httpx2

Fate = Literal["ok", "refused", "failed", "lost"]
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_CONNECT_S = 10.0  # for the first connection: an address where nobody listens shall be told soon
_FIRST_ANSWER_S = 30.0
_AFTER_DONE_S = 1.0  # for a server to end its stream after [DONE], before we hang up
_MOST_BYTES = 1 << 24  # of one answer
_REFUSED = (429, 503)
# What says that every request of the plan would be answered so.
_WRONG_PLAN = (400, 401, 403, 404, 405, 413, 415, 422)
_OWN_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)
_EXAMPLE = "give the address of an OpenAI-compatible server, such as http://127.0.0.1:8000"
_REMEDIES = {401: "give an API key that it takes", 403: "give an API key that may do this"}


@dataclass(kw_only=True)
class Exchange:
    """What became of one request. Times are the event loop's seconds.

    ok: a whole answer. refused: 429 or 503. failed: another status, an error in the answer, no connection.
    lost: an answer that did not come or is not whole: a stream without [DONE], JSON that cannot be parsed.
    """

    scheduled_at: float
    sent_at: float
    first_text_at: float | None = None
    ended_at: float = 0.0
    fate: Fate | None = None
    reason: str = ""  # of one that is not ok, in few words that many requests share
    detail: str = ""  # what the server or the socket says about it
    status: int | None = None
    usage_tokens: int | None = None  # what the server says it has written
    num_texts: int | None = None  # deltas with text; None: the answer was no stream

    def settle(self, at: float, fate: Fate, reason: str = "", detail: str = "") -> None:
        """The first fate counts: a connection that breaks after the answer's end has lost nothing."""
        if self.fate is None:
            self.ended_at, self.fate, self.reason, self.detail = at, fate, reason, detail

    @property
    def is_wrong_plan(self) -> bool:
        return self.status in _WRONG_PLAN


def base_url(url: str) -> str:
    """The address that ends with /v1, for one with or without it."""
    import httpx2

    try:
        parts = urlsplit(url.strip())
        host = httpx2.URL(url.strip()).host if parts.scheme in ("http", "https") else ""
    except (ValueError, httpx2.InvalidURL) as error:
        raise _url_error(url, f"is not an address ({error})") from None
    if not host:
        raise _url_error(url, "is not an http or https address")
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise _url_error(url, "has more than a host, a port and a path")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}/v1"


def open_client(base: str, api_key: str | None) -> httpx2.AsyncClient:
    """A client that opens one connection for each request, so that none depends on an earlier one's."""
    import httpx2

    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key):
        raise InputError.about("api_key", "must be printable ASCII; check how it was copied.")
    # Compression would hold deltas back.
    headers = {"accept-encoding": "identity"}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    return httpx2.AsyncClient(
        base_url=base,
        headers=headers,
        timeout=None,  # each exchange has its own limit
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
        trust_env=httpx2.URL(base).host not in _LOOPBACK,  # a proxy does not see this machine's ports
    )


async def find_model(client: httpx2.AsyncClient, wanted: str | None) -> str:
    """The wanted model, or the first one of GET /v1/models; somebody must answer there in any case."""
    import httpx2

    base = str(client.base_url).rstrip("/")
    try:
        response = await client.get("/models", timeout=httpx2.Timeout(_FIRST_ANSWER_S, connect=_CONNECT_S))
    except (httpx2.HTTPError, OSError) as error:
        why = _cause(error)[0]
        remedy = f"start the server, or {_EXAMPLE}"
        raise _url_error(base, f"does not answer ({why})", remedy) from None
    if wanted is not None:
        return wanted
    if response.status_code != 200:
        remedy = _REMEDIES.get(response.status_code, f"give the model's name, or {_EXAMPLE}")
        raise _url_error(base, f"answers {response.status_code} to GET /v1/models", remedy)
    try:
        name = response.json()["data"][0]["id"]
    except (ValueError, LookupError, TypeError, RecursionError):
        name = None
    if not isinstance(name, str) or not name:
        raise _url_error(base, "lists no model at /v1/models", f"give the model's name, or {_EXAMPLE}")
    return name


def _url_error(url: str, rule: str, remedy: str = _EXAMPLE) -> InputError:
    return InputError(f"{url!r} {rule}; {remedy}.", field="url")


def wrong_plan_error(base: str, path: str, found: Exchange) -> InputError:
    """The error of a first request that says that all of them would be answered so."""
    status = found.status or 0
    remedy = _REMEDIES.get(status, "check the URL, the model's name and the fields of the request")
    said = f" ({found.detail})" if found.detail else ""
    return InputError(f"{base}{path} answers {found.status}{said}; {remedy}.")


async def exchange(
    client: httpx2.AsyncClient, path: str, body: Mapping[str, Any], *, scheduled_at: float, timeout_s: float
) -> Exchange:
    """Send it now and read the answer to its end."""
    import httpx2

    now = asyncio.get_running_loop().time
    found = Exchange(scheduled_at=scheduled_at, sent_at=now())
    try:
        async with (
            asyncio.timeout_at(found.sent_at + timeout_s) as limit,
            client.stream("POST", path, json=body) as response,
        ):
            await _read(response, found, limit, streamed=bool(body.get("stream")))
    except TimeoutError:
        found.settle(now(), "lost", "timeout", f"no whole answer after {timeout_s:g} s")
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
        why, number = _cause(error)
        own = number in _OWN_LIMITS
        found.settle(now(), "failed", "this machine's limit" if own else "no connection", why)
    except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:
        found.settle(now(), "lost", "broken off", _cause(error)[0])
    except (ValueError, RecursionError) as error:
        found.settle(now(), "lost", "not parsable", plain(str(error)))
    return found


async def _read(
    response: httpx2.Response, found: Exchange, limit: asyncio.Timeout, *, streamed: bool
) -> None:
    now = asyncio.get_running_loop().time
    found.status = response.status_code
    kind = response.headers.get("content-type", "")
    if found.status == 200 and ("event-stream" in kind or (streamed and "json" not in kind)):
        await _read_stream(response, found, limit)
        return
    content = b""
    async for piece in response.aiter_bytes():
        content = _joined(content, piece)
    ended = now()
    if found.status != 200:
        fate: Fate = "refused" if found.status in _REFUSED else "failed"
        found.settle(ended, fate, f"HTTP {found.status}", _message(content))
        return
    answer = _object(content)
    if answer.get("error"):
        found.settle(ended, "failed", "an error in the answer", _message(content))
        return
    texts = _note(answer, found)
    if not texts:
        found.settle(ended, "failed", "no choices")
    if any(texts):
        found.first_text_at = ended
    found.settle(ended, "ok")


async def _read_stream(response: httpx2.Response, found: Exchange, limit: asyncio.Timeout) -> None:
    """Events are split here: httpx's lines also end at U+2028, which JSON may hold."""
    now = asyncio.get_running_loop().time
    rest, size = b"", 0
    events = _Events(found)
    async for piece in response.aiter_bytes():
        came = now()
        size += len(piece)
        if size > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            # Others are comments, other fields of an event, or come after the end.
            if line.startswith(b"data:") and events.take(line.removeprefix(b"data:").strip(), came):
                # Reading on lets the server end in its own way; it need not.
                limit.reschedule(came + _AFTER_DONE_S)
    found.settle(now(), "lost", "no [DONE]", "the stream ended without it")


class _Events:
    """The events of one stream, in the order they come."""

    def __init__(self, found: Exchange) -> None:
        self._found = found
        self._has_choices = False
        found.num_texts = 0

    def take(self, data: bytes, came: float) -> bool:
        """Note an event; whether it ends the answer."""
        found = self._found
        if found.fate is not None or not data:
            return False
        if data == b"[DONE]":
            if self._has_choices:
                found.settle(came, "ok")
            else:
                found.settle(came, "failed", "no choices")
            return True
        chunk = _object(data)
        if chunk.get("error"):
            found.settle(came, "failed", "an error in the answer", _message(data))
            return True
        texts = _note(chunk, found)
        self._has_choices = self._has_choices or bool(texts)
        found.num_texts = (found.num_texts or 0) + sum(map(bool, texts))
        if any(texts) and found.first_text_at is None:
            found.first_text_at = came
        return False


def _note(answer: dict[str, Any], found: Exchange) -> list[str]:
    """Take the usage, if there is one, and return the text of each choice."""
    usage = answer.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if isinstance(tokens, int):
        found.usage_tokens = tokens
    choices = answer.get("choices")
    return [_text(choice) for choice in choices] if isinstance(choices, list) else []


def _text(choice: Any) -> str:
    """Of a delta, a message, or a choice of /v1/completions."""
    if not isinstance(choice, dict):
        return ""
    part = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
    text = part.get("content") if isinstance(part, dict) else None
    return text if isinstance(text, str) else ""


def _object(data: bytes) -> dict[str, Any]:
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError("an answer that is no JSON object")
    return found


def _message(content: bytes) -> str:
    """What an error says: `message` of OpenAI's form, else the beginning of the text."""
    try:
        error = json.loads(content)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError, RecursionError):
        text = content[:1000].decode(errors="replace")
    return plain(text)


def plain(text: str, most: int = 160) -> str:
    """On one line, without what would move a terminal's cursor."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * most]).split())
    return line if len(line) <= most else line[: most - 3] + "..."


def _joined(content: bytes, piece: bytes) -> bytes:
    if len(content) + len(piece) > _MOST_BYTES:
        raise ValueError(f"more than {_MOST_BYTES} bytes")
    return content + piece


def _cause(error: BaseException) -> tuple[str, int | None]:
    """What the operating system said, under the names that libraries give it; and its number."""
    import socket
    import ssl

    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.errno is not None:
            # These two have numbers of their own; asyncio puts an address in the place of the others' words.
            is_own = isinstance(inner, socket.gaierror | ssl.SSLError)
            return plain(str(inner.strerror) if is_own else os.strerror(inner.errno)), inner.errno
        if isinstance(inner, BaseExceptionGroup):  # one for each address of a host
            inner = inner.exceptions[0]
        else:
            inner = inner.__cause__ or inner.__context__
    return plain(str(error)) or type(error).__name__, None
