"""Traces of requests by OpenTelemetry: a span per HTTP request, and the phases of its answers below it.

On if the extra `otel` is installed and one of the standard variables names an exporter's endpoint. Otherwise
this file imports nothing of OpenTelemetry, and a request has no trace.

The engine reports no moments, only the seconds of each phase when an answer ends. The spans of an answer are
therefore made at its end: a canvas ends when its commit arrived, the rest follows from the seconds.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.types import Scope

from dgemma.engine.service import EngineEvent
from dgemma.events import Answer, Commit, Finish
from dgemma.server.http.log import LOGGER, RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer
    from opentelemetry.util.types import AttributeValue

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PACKAGE = "opentelemetry.exporter.otlp.proto.http"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
_CONTEXT = (b"traceparent", b"tracestate")


class RequestTrace:
    """The span of one request."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracer = tracer
        self._span = span
        self._below = set_span_in_context(span)
        self._canvases: dict[int, list[tuple[int, Commit]]] = {}  # by answer, with the time of their commit
        context = span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}"
        # The response's side of W3C Trace Context: what the request became.
        self.header = f"00-{self.trace_id}-{context.span_id:016x}-{context.trace_flags:02x}".encode()

    def add(self, number: int, event: EngineEvent) -> None:
        """Note an event of answer `number`; at its end, make its spans."""
        now = time.time_ns()
        if isinstance(event, Commit) and event.steps:  # not each token of a causal answer
            self._canvases.setdefault(number, []).append((now, event))
        elif isinstance(event, Finish):
            self._add_answer(number, event.answer, self._canvases.pop(number, []), now)

    def end(self, record: RequestRecord) -> None:
        from opentelemetry.trace import Status, StatusCode

        error = record.error
        known: Mapping[str, AttributeValue | None] = {
            "http.response.status_code": record.status,
            "gen_ai.request.model": record.model,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.completion_tokens,
            "gen_ai.response.finish_reasons": record.finish_reasons,
            "error.type": None if error is None else error.code or str(error.status),
        }
        self._span.set_attributes({name: value for name, value in known.items() if value is not None})
        if error is not None and error.status >= 500:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()

    def _add_answer(self, number: int, answer: Answer, canvases: list[tuple[int, Commit]], end: int) -> None:
        spent = answer.timings
        begin = end - _ns(spent.total_s)
        admitted = begin + _ns(spent.queue_s)
        self._child("queue", number, begin, admitted)
        at = admitted + _ns(spent.prefill_s)
        self._child("prefill", number, admitted, at, tokens=answer.prompt_tokens, cached=answer.cached_tokens)
        if answer.decode == "causal":
            self._child("decode", number, at, end, tokens=len(answer.tokens))
        # The last canvas of an answer is not encoded.
        commit_ns = _ns(spent.commit_s) // max(1, len(canvases) - 1)
        for committed, event in canvases:
            at = min(at, committed)  # two clocks
            if event.canvas > 0:
                encoded = min(at + commit_ns, committed)
                self._child("commit", number, at, encoded, canvas=event.canvas - 1)
                at = encoded
            facts = {"canvas": event.canvas, "steps": event.steps, "tokens": len(event.tokens)}
            self._child("denoise", number, at, committed, **facts)
            at = committed

    def _child(self, name: str, number: int, begin: int, end: int, **facts: int) -> None:
        attributes = {f"dgemma.{key}": value for key, value in {"answer": number, **facts}.items()}
        span = self._tracer.start_span(name, self._below, attributes=attributes, start_time=begin)
        span.end(end)


class Tracing:
    """Begins the traces of one server."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("dgemma.server")

    def begin(self, scope: Scope, record: RequestRecord, endpoint: str) -> RequestTrace:
        """The span of a request, below the client's span if it sent a `traceparent`."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        sent = {
            name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _CONTEXT
        }
        method = record.method if record.method in _METHODS else "HTTP"  # of few values, as endpoints are
        span = self._tracer.start_span(
            f"{method} {endpoint}",
            TraceContextTextMapPropagator().extract(sent),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": method,
                "http.route": endpoint,
                "dgemma.request_id": record.id,
            },
        )
        return RequestTrace(self._tracer, span)


def open_tracing() -> Tracing | None:
    """Traces as the OTEL_* variables ask for; None if they ask for none."""
    if not any(os.environ.get(name) for name in _ENDPOINTS):
        return None
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    if not _is_installed():
        LOGGER.warning("OTEL_* names an endpoint, but traces are off; run: pip install 'dgemma[otel]'")
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    is_named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    provider = TracerProvider(resource=Resource.create({} if is_named else {"service.name": "dgemma"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider)


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec(_PACKAGE) is not None
    except ModuleNotFoundError:  # a part of its name
        return False


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
