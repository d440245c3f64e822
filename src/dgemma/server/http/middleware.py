"""Middleware around all routes: request id, framing, host, API key, exceptions, log line, metrics, CORS."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Collection

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dgemma.server.http.api_key import KeyLimits
from dgemma.server.http.auth import ApiKeyAuth
from dgemma.server.http.errors import ApiError, error_response, server_draining, shown
from dgemma.server.http.log import CLIENT_LEFT, RequestRecord, begin_record, log_request, note_error
from dgemma.server.http.models import MODELS_PATH
from dgemma.server.http.settings import Settings
from dgemma.server.http.tracing import open_tracing
from dgemma.server.state import ServerState


class RequestMiddleware:
    """The ASGI application that uvicorn runs. No exception of a request leaves it."""

    def __init__(self, app: ASGIApp, state: ServerState, paths: Collection[str]) -> None:
        self._app = app
        self.state = state
        self._paths = frozenset(paths)  # labels of the request metrics
        settings = state.settings
        limits = KeyLimits(
            requests_per_minute=settings.requests_per_minute,
            tokens_per_minute=settings.tokens_per_minute,
            max_num_seqs=settings.max_key_seqs,
            compile_seconds_per_minute=settings.compile_seconds_per_minute,
        )
        self._auth = ApiKeyAuth(
            settings.api_keys, settings.api_key_file, limits=limits, has_page=settings.playground
        )
        self.tracing = open_tracing()
        self._entry: ASGIApp = self._handle
        if settings.cors_origins:
            # Outermost, so that a page can read refusals too, and a preflight needs no key.
            self._entry = CORSMiddleware(
                self._handle,
                allow_origins=settings.cors_origins,
                allow_methods=("GET", "POST", "DELETE"),
                # Clients add headers of their own (x-stainless-*). None gives a right but the key, which a
                # page must know.
                allow_headers=("*",),
                # Never with cookies: nothing here reads any, and with * they would be every page's.
                allow_credentials=False,
                expose_headers=("x-request-id", "retry-after"),
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._entry if scope["type"] == "http" else self._app)(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = begin_record(scope)
        if self.tracing is not None:
            record.trace = self.tracing.begin(scope, record, self._endpoint(record.path))

        async def recorded_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", record.id.encode())]
                if record.trace is not None:
                    message["headers"].append((b"traceresponse", record.trace.header))
            elif message["type"] == "http.response.body":
                record.is_answered = not message.get("more_body", False)
            try:
                async with asyncio.timeout(self.state.settings.send_timeout_s):
                    await send(message)
            except TimeoutError:  # a client that reads nothing counts as disconnected
                raise ClientDisconnect from None

        try:
            _check_framing(scope)
            check_host(scope, self.state.settings)
            record.key = self._auth.check(scope)
            await self._app(scope, receive, recorded_send)
        except asyncio.CancelledError:  # the server ends at once
            record.has_left = True
            if record.status is None:
                await error_response(server_draining(), record.path, record.id)(scope, receive, recorded_send)
            raise
        except ClientDisconnect:
            record.has_left = True
        except Exception as error:
            note_error(error, record)
            if record.status is None:
                assert record.error is not None
                await error_response(record.error, record.path, record.id)(scope, receive, recorded_send)
        finally:
            self._close(record)

    def _close(self, record: RequestRecord) -> None:
        metrics = self.state.metrics
        if record.has_left:
            record.status = record.status or CLIENT_LEFT
            metrics.cancelled.inc()
        endpoint = self._endpoint(record.path)
        metrics.requests.labels(endpoint=endpoint, status=str(record.status)).inc()
        metrics.durations.labels(endpoint=endpoint).observe(record.elapsed_s)
        self._count_key(record)
        if record.trace is not None:
            record.trace.end(record)
        log_request(record, with_text=self.state.settings.log_text)

    def _count_key(self, record: RequestRecord) -> None:
        """Usage by API key: the metrics, and the tokens of its rate limit."""
        if not record.key.name:
            return
        metrics, name = self.state.metrics, record.key.name
        metrics.key_requests.labels(key=name, status=str(record.status)).inc()
        prompt, completion = record.prompt_tokens or 0, record.completion_tokens or 0
        metrics.key_tokens.labels(key=name, kind="prompt").inc(prompt)
        metrics.key_tokens.labels(key=name, kind="completion").inc(completion)
        self.state.rate_limits.of(record.key).spend_tokens(prompt + completion)

    def _endpoint(self, path: str) -> str:
        """A metrics label: of few values, whatever paths clients request."""
        if path in self._paths:
            return path
        if path.startswith(f"{MODELS_PATH}/"):
            return f"{MODELS_PATH}/{{model}}"
        if path.startswith("/v1/responses/"):
            return "/v1/responses/{response_id}"
        return "other"


def _check_framing(scope: Scope) -> None:
    """Refuse what a proxy in front could read as another request (request smuggling)."""
    names = [name for name, _ in scope["headers"]]
    if b"content-length" in names and b"transfer-encoding" in names:
        raise _closing("the request has both Content-Length and Transfer-Encoding; send one of them.")
    if names.count(b"content-length") > 1 or names.count(b"host") > 1:
        raise _closing("the request has two Content-Length or two Host headers; send one.")


def check_host(scope: Scope, settings: Settings) -> None:
    """On a loopback address: refuse the name of another host, which a web page can make point here."""
    if not settings.is_loopback and not settings.allowed_hosts:
        return
    header = next((value for name, value in scope["headers"] if name == b"host"), None)
    if header is None:
        return
    host = _host_name(header.decode("latin-1"))
    names = [name.lower() for name in (settings.host, *settings.allowed_hosts)]
    if not _is_loopback(host) and host not in names:
        raise ApiError(
            f"the Host header is {shown(host)}, which is not this server; --allowed-host adds a name.",
            status=421,
            code="wrong_host",
            headers={"connection": "close"},
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_name(host: str) -> str:
    """`name:port` or `[::1]:port` without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _closing(message: str) -> ApiError:
    return ApiError(message, code="ambiguous_framing", headers={"connection": "close"})
