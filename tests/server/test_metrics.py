"""What /metrics says is valid for Prometheus' own reader, and adds up."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from dgemma.engine.service import EngineStats
from dgemma.server.http.metrics import Metrics
from dgemma.server.http.middleware import RequestMiddleware
from server.fake_engine import FakeEngine, Script
from server.served import CHAT, COMPLETIONS, HELLO, ONCE, app_of, ask, post

ROOT = Path(__file__).parent.parent.parent


def samples(app: RequestMiddleware) -> dict[tuple[str, ...], float]:
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
    assert found["dgemma_kv_blocks_in_use", "full"] == 3
    assert found["dgemma_kv_blocks", "window"] == 16
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


def test_two_applications_of_a_process_count_apart() -> None:
    busy, idle = app_of(), app_of()
    post(busy, CHAT, HELLO)
    assert ("dgemma_answers_total", "stop") in samples(busy)
    assert ("dgemma_answers_total", "stop") not in samples(idle)


def test_a_histogram_counts_each_value_in_every_bucket_above_it() -> None:
    metrics = Metrics()
    for value in (1, 2, 3, 999):
        metrics.steps.observe(value)
    page = metrics.render(EngineStats(), num_active=0)
    (family,) = (
        family
        for family in text_string_to_metric_families(page)
        if family.name == "dgemma_denoising_steps_per_canvas"
    )
    buckets = {sample.labels["le"]: sample.value for sample in family.samples if "le" in sample.labels}
    assert [buckets[bound] for bound in ("1.0", "2.0", "3.0", "128.0", "+Inf")] == [1, 2, 3, 3, 4]
    assert {sample.name.rpartition("_")[2]: sample.value for sample in family.samples[-2:]} == {
        "count": 4,
        "sum": 1005,
    }


def test_labels_are_escaped() -> None:
    value = 'a"b\\c\nd'
    metrics = Metrics()
    metrics.finished.labels(reason=value).inc()
    found: Any = [
        sample.labels
        for family in text_string_to_metric_families(metrics.render(EngineStats(), num_active=0))
        for sample in family.samples
        if sample.name == "dgemma_answers_total"
    ]
    assert found == [{"reason": value}]


def test_each_metric_of_the_dashboard_is_exported() -> None:
    """Also that each panel has one."""
    app = app_of(FakeEngine(Script(text="x")))
    post(app, CHAT, HELLO)
    exported = {key[0] for key in samples(app)}
    dashboard = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text())
    for panel in dashboard["panels"]:
        named = {name for target in panel["targets"] for name in re.findall(r"dgemma_\w+", target["expr"])}
        assert named, panel["title"]
        assert named <= exported, panel["title"]


def test_each_metric_of_the_alerts_is_exported() -> None:
    app = app_of(FakeEngine(Script(text="x")))
    post(app, CHAT, HELLO)
    exported = {key[0] for key in samples(app)}
    (group,) = yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]:
        named = set(re.findall(r"dgemma_\w+", rule["expr"]))
        assert named <= exported, rule["alert"]
        assert named or rule["alert"] == "DgemmaDown"  # which Prometheus itself knows
