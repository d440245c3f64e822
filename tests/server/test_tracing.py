"""A request is a span with its phases below it, in the client's trace; without an endpoint there is none."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx2
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from dgemma.engine.request import EngineRequest
from dgemma.engine.service import EngineEvent
from dgemma.events import Finish, Timings
from dgemma.server.http import tracing
from dgemma.server.http.log import LOGGER
from dgemma.server.http.log_formats import JsonFormatter
from dgemma.server.http.middleware import RequestMiddleware
from dgemma.server.http.tracing import Tracing, open_tracing
from server.fake_engine import FakeEngine, Script
from server.served import CHAT, HELLO, app_of, on_a_port, post

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
SPENT = Timings(queue_s=0.01, prefill_s=0.02, denoise_s=0.06, commit_s=0.01, first_commit_s=0.05, total_s=0.1)
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


class TimedEngine(FakeEngine):
    """Says how long each phase took, as the real one does."""

    decode = "diffuse"

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:  # type: ignore[override]
        async for event in super().submit(request):
            if isinstance(event, Finish):
                event = replace(event, answer=replace(event.answer, timings=SPENT, decode=self.decode))
            yield event


class Spans:
    """A server whose traces are kept in memory."""

    def __init__(self, engine: FakeEngine) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.app: RequestMiddleware = app_of(engine)
        self.app.tracing = Tracing(provider)

    def all(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def root(self) -> ReadableSpan:
        (found,) = (span for span in self.all() if span.name.startswith(("POST", "GET", "HTTP")))
        return found

    def children(self) -> list[ReadableSpan]:
        return [span for span in self.all() if span is not self.root()]


@pytest.fixture(autouse=True)
def _no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def lines() -> Iterator[Any]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    LOGGER.addHandler(handler)
    level = LOGGER.level
    LOGGER.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    LOGGER.setLevel(level)
    LOGGER.removeHandler(handler)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_its_phases_below_it_in_the_clients_trace(lines: Any, stream: bool) -> None:
    spans = Spans(TimedEngine(Script(text="x" * 40, steps=4)))
    with on_a_port(spans.app) as address:
        body, headers = {**HELLO, "stream": stream}, {"traceparent": TRACEPARENT}
        response = httpx2.post(address + CHAT, json=body, headers=headers, timeout=60)
        assert response.status_code == 200
    root = spans.root()
    assert root.name == f"POST {CHAT}"
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == PARENT_ID
    assert root.attributes is not None
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["gen_ai.request.model"] == "dgemma"
    assert root.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert root.attributes["dgemma.request_id"] == response.headers["x-request-id"]
    names = [span.name for span in spans.children()]
    assert names == ["queue", "prefill", "denoise", "commit", "denoise", "commit", "denoise"]
    for span in spans.all():
        assert f"{span.context.trace_id:032x}" == TRACE_ID
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time
    for before, after in zip(spans.children(), spans.children()[1:], strict=False):
        assert before.end_time <= after.end_time  # type: ignore[operator]
        assert span.parent is not None
        assert after.parent is not None
        assert after.parent.span_id == root.context.span_id
    denoised = [dict(span.attributes or {}) for span in spans.children() if span.name == "denoise"]
    assert [found["dgemma.canvas"] for found in denoised] == [0, 1, 2]
    assert {found["dgemma.steps"] for found in denoised} == {4}
    # The same ids for the client and for who reads the log.
    assert response.headers["traceresponse"] == f"00-{TRACE_ID}-{root.context.span_id:016x}-01"
    (line,) = (line for line in lines() if line["event"] == "request")
    assert line["trace_id"] == TRACE_ID


def test_queue_and_prefill_last_as_long_as_the_engine_says() -> None:
    spans = Spans(TimedEngine(Script(text="x")))
    post(spans.app, CHAT, HELLO)
    lasted = {span.name: (span.end_time or 0) - (span.start_time or 0) for span in spans.children()}
    assert lasted["prefill"] == 20_000_000
    assert lasted["queue"] == 10_000_000


def test_each_answer_has_its_own_spans() -> None:
    spans = Spans(TimedEngine(Script(text="x")))
    post(spans.app, CHAT, {**HELLO, "n": 2})
    queued = [dict(span.attributes or {}) for span in spans.children() if span.name == "queue"]
    assert sorted(found["dgemma.answer"] for found in queued) == [0, 1]


def test_a_causal_answer_has_one_span_for_all_its_tokens() -> None:
    engine = TimedEngine(Script(text="x" * 40, steps=0))
    engine.decode = "causal"
    spans = Spans(engine)
    post(spans.app, CHAT, HELLO)
    assert [span.name for span in spans.children()] == ["queue", "prefill", "decode"]


def test_an_internal_error_is_an_error_of_its_span_and_a_refusal_is_none() -> None:
    spans = Spans(FakeEngine(Script(text="x", fails_at=0)))
    assert post(spans.app, CHAT, HELLO).status_code == 500
    assert spans.root().status.status_code is StatusCode.ERROR
    spans = Spans(FakeEngine())
    assert post(spans.app, CHAT, {**HELLO, "temprature": 1}).status_code == 400
    assert spans.root().status.status_code is StatusCode.UNSET
    assert dict(spans.root().attributes or {})["error.type"] is not None


@pytest.mark.parametrize("sent", ["", "nonsense", f"00-{'0' * 32}-{PARENT_ID}-01", "ä".encode()])
def test_a_context_that_is_none_begins_a_trace(sent: Any) -> None:
    spans = Spans(FakeEngine())
    post(spans.app, CHAT, HELLO, headers={"traceparent": sent})
    assert spans.root().parent is None


def test_span_names_have_few_values_and_no_span_has_text() -> None:
    spans = Spans(TimedEngine(Script(text="secret answer")))
    post(spans.app, "/secret", {})
    body = {**HELLO, "messages": [{"role": "user", "content": "secret question"}]}
    post(spans.app, CHAT, body)
    assert {span.name for span in spans.all()} == {
        "POST other", f"POST {CHAT}", "queue", "prefill", "denoise",
    }  # fmt: skip
    assert "secret" not in "".join(span.to_json() for span in spans.all())


def test_no_sdk_and_no_exporter_is_imported_unless_an_endpoint_is_named() -> None:
    """The API is: FastAPI imports it."""
    code = (
        "import sys; sys.path.insert(0, 'tests'); from server.served import app_of, post, CHAT, HELLO\n"
        "app = app_of(); assert post(app, CHAT, HELLO).status_code == 200 and app.tracing is None\n"
        "unwanted = ('opentelemetry.sdk', 'opentelemetry.exporter', 'google.protobuf')\n"
        "sys.exit(any(name.startswith(unwanted) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_fastapi_makes_no_traces_of_its_own() -> None:
    """It would, for a provider of the whole process, and with the messages of errors, which quote prompts."""
    code = (
        "import sys; sys.path.insert(0, 'tests'); from opentelemetry import trace\n"
        "from opentelemetry.sdk.trace import TracerProvider\n"
        "from opentelemetry.sdk.trace.export import SimpleSpanProcessor\n"
        "from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter\n"
        "kept = InMemorySpanExporter(); trace.set_tracer_provider(TracerProvider())\n"
        "trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(kept))\n"
        "from server.served import app_of, post, CHAT, HELLO; post(app_of(), CHAT, HELLO)\n"
        "sys.exit(len(kept.get_finished_spans()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_traces_there_is_no_header_and_no_field(lines: Any) -> None:
    response = post(app_of(), CHAT, HELLO, headers={"traceparent": TRACEPARENT})
    assert "traceresponse" not in response.headers
    assert "trace_id" not in lines()[0]


@pytest.mark.parametrize("off", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}])
def test_the_standard_switches_turn_traces_off(monkeypatch: pytest.MonkeyPatch, off: dict[str, str]) -> None:
    for name, value in {ENDPOINT: "http://127.0.0.1:1", **off}.items():
        monkeypatch.setenv(name, value)
    assert open_tracing() is None


def test_an_endpoint_without_the_packages_is_a_warning(monkeypatch: pytest.MonkeyPatch, lines: Any) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:1")
    for missing in ("nothing_like_it", "nothing_like_it.exporter"):
        monkeypatch.setattr(tracing, "_PACKAGE", missing)
        assert open_tracing() is None
    assert all("pip install 'dgemma[otel]'" in line["event"] for line in lines())
    assert len(lines()) == 2


def test_spans_reach_the_endpoint_that_the_variables_name() -> None:
    """In a process of its own: what is left is sent when it ends."""
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        code = (
            f"import os, sys; os.environ['{ENDPOINT}'] = 'http://127.0.0.1:{collector.server_port}'\n"
            "os.environ['OTEL_EXPORTER_OTLP_COMPRESSION'] = 'none'; sys.path.insert(0, 'tests')\n"
            "from server.served import app_of, post, CHAT, HELLO; post(app_of(), CHAT, HELLO)"
        )
        subprocess.run([sys.executable, "-c", code], check=True)
        collector.shutdown()
    assert {path for path, _ in received} == {"/v1/traces"}
    sent = b"".join(content for _, content in received)
    assert b"dgemma" in sent
    assert b"denoise" in sent
