"""What /metrics says is valid for Prometheus' own reader, and adds up."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from dgemma.server.front_door import FrontDoor
from dgemma.server.metrics import Counter, Histogram
from server.fake_engine import FakeEngine, Script
from server.served import CHAT, COMPLETIONS, HELLO, ONCE, app_of, ask, post


def samples(app: FrontDoor) -> dict[tuple[str, ...], float]:
    """Value by name and label values."""
    page = ask(app, "GET", "/metrics")
    assert page.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(page.text)
        for sample in family.samples
    }


def test_requests_tokens_steps_and_times_are_counted() -> None:
    app = app_of(FakeEngine(Script(text="x" * 31, steps=4)))
    post(app, CHAT, {**HELLO, "n": 2})
    post(app, COMPLETIONS, {**ONCE, "stream": True})
    post(app, CHAT, {**HELLO, "temprature": 1})
    ask(app, "GET", "/nowhere/at/all")
    found = samples(app)
    assert found["dgemma_http_requests_total", CHAT, "200"] == 1
    assert found["dgemma_http_requests_total", CHAT, "400"] == 1
    assert found["dgemma_http_requests_total", COMPLETIONS, "200"] == 1
    assert found["dgemma_http_requests_total", "other", "404"] == 1
    assert found["dgemma_http_request_duration_seconds_count", CHAT] == 2
    assert found["dgemma_prompt_tokens_total",] == 14 + 5
    assert found["dgemma_completion_tokens_total",] == 3 * 32
    assert found["dgemma_answers_total", "stop"] == 3
    assert found["dgemma_time_to_first_block_seconds_count",] == 2
    assert found["dgemma_denoising_steps_per_canvas_count",] == 6
    assert found["dgemma_denoising_steps_per_canvas_sum",] == 24
    assert found["dgemma_tokens_per_forward_sum",] == 12
    assert found["dgemma_requests_cancelled_total",] == 0


def test_the_engines_numbers_are_there() -> None:
    found = samples(app_of())
    assert found["dgemma_slots_in_use",] == 0
    assert found["dgemma_slots",] == 8
    assert found["dgemma_kv_pages_in_use", "full"] == 3
    assert found["dgemma_kv_pages", "window"] == 16
    assert found["dgemma_requests_waiting",] == 0
    assert found["dgemma_requests_in_progress",] == 0
    assert found["dgemma_prefix_hit_tokens_total",] == 40
    assert found["dgemma_engine_denoise_forwards_total",] == 12


def test_labels_have_few_values_whatever_is_asked_for() -> None:
    app = app_of()
    for number in range(5):
        ask(app, "GET", f"/v1/models/nobody-{number}")
        ask(app, "GET", f"/{number}")
    endpoints = {key[1] for key in samples(app) if key[0] == "dgemma_http_requests_total"}
    assert endpoints == {"/v1/models/{model}", "other"}


def test_a_histogram_counts_each_value_in_every_bucket_above_it() -> None:
    histogram = Histogram("h", "help", (1, 2.5))
    for value in (0.5, 1, 2, 99):
        histogram.observe(value)
    assert list(histogram.lines())[2:] == [
        'h_bucket{le="1"} 2',
        'h_bucket{le="2.5"} 3',
        'h_bucket{le="+Inf"} 4',
        "h_sum 102.5",
        "h_count 4",
    ]


def test_labels_are_escaped() -> None:
    counter = Counter("c", "help")
    value = 'a"b\\c\nd'
    counter.add(kind=value)
    (family,) = text_string_to_metric_families("\n".join(counter.lines()) + "\n")
    read: Any = family.samples[0].labels
    assert read == {"kind": value}
