"""Prometheus metrics of one application: `prometheus_client` with a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dgemma.engine.service import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128)
TOKENS_PER_FORWARD = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 128, 256)


class Metrics:
    """The server's own counters and histograms; the engine's numbers are read at each scrape."""

    def __init__(self) -> None:
        # A registry per application: two applications of one process do not share their counts.
        self._registry = CollectorRegistry()
        self.requests = self._counter(
            "dgemma_http_requests_total", "Requests by endpoint and status.", "endpoint", "status"
        )
        self.durations = self._histogram(
            "dgemma_http_request_duration_seconds",
            "From the request to the end of its response.",
            SECONDS,
            "endpoint",
        )
        self.first_block = self._histogram(
            "dgemma_time_to_first_block_seconds", "From the request to its first final text.", SECONDS
        )
        self.prompt_tokens = self._counter("dgemma_prompt_tokens_total", "Tokens of prompts.")
        self.completion_tokens = self._counter(
            "dgemma_completion_tokens_total", "Committed tokens of answers."
        )
        self.finished = self._counter("dgemma_answers_total", "Finished answers by reason.", "reason")
        self.cancelled = self._counter(
            "dgemma_requests_cancelled_total", "Requests whose client disconnected early."
        )
        self.key_requests = self._counter(
            "dgemma_key_requests_total", "Requests by API key and status.", "key", "status"
        )
        self.key_tokens = self._counter(
            "dgemma_key_tokens_total", "Tokens of prompts and answers by API key.", "key", "kind"
        )
        self.key_compile_seconds = self._counter(
            "dgemma_key_compile_seconds_total", "Time spent compiling response formats by API key.", "key"
        )
        self.steps = self._histogram(
            "dgemma_denoising_steps_per_canvas", "Denoise forwards of a canvas.", STEPS
        )
        self.tokens_per_forward = self._histogram(
            "dgemma_tokens_per_forward", "Committed tokens per forward of an answer.", TOKENS_PER_FORWARD
        )

    def render(self, stats: EngineStats, *, num_active: int) -> str:
        """The text format of Prometheus: the server's metrics, then the engine's."""
        return generate_latest(_Page(self._registry, stats, num_active)).decode()

    def _counter(self, name: str, help_: str, *labels: str) -> Counter:
        return Counter(name, help_, labels, registry=self._registry)

    def _histogram(self, name: str, help_: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, help_, labels, buckets=buckets, registry=self._registry)


class _Page(Collector):
    """One scrape: the registry without its `_created` series, and the engine's statistics."""

    def __init__(self, registry: CollectorRegistry, stats: EngineStats, num_active: int) -> None:
        self._registry = registry
        self._stats = stats
        self._num_active = num_active

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
        yield from self._engine_families()

    def _engine_families(self) -> Iterator[Metric]:
        stats = self._stats
        for name, help_, value in (
            ("dgemma_requests_in_progress", "Requests being read, waiting or answered.", self._num_active),
            ("dgemma_requests_waiting", "Requests in the engine's queue.", stats.num_waiting),
            ("dgemma_slots_in_use", "Canvases being denoised.", stats.slots_used),
            ("dgemma_slots", "Canvases that can be denoised at once.", stats.slots_total),
            ("dgemma_engine_stalled", "1 while a step takes longer than any should.", stats.is_stalled),
        ):
            yield GaugeMetricFamily(name, help_, value=value)
        used = {"full": stats.full_blocks_used, "window": stats.window_blocks_used}
        total = {"full": stats.full_blocks_total, "window": stats.window_blocks_total}
        yield _by_kind("dgemma_kv_blocks_in_use", "KV cache blocks in use by kind of layer.", used)
        yield _by_kind("dgemma_kv_blocks", "KV cache blocks by kind of layer.", total)
        yield CounterMetricFamily(
            "dgemma_prefix_hit_tokens", "Prompt tokens found in the prefix cache.", stats.prefix_hit_tokens
        )
        yield CounterMetricFamily(
            "dgemma_engine_restarts", "Restarts after a step hung or failed as a whole.", stats.restarts
        )
        for key, count in sorted(stats.counters.items()):
            help_ = f"The engine's count of {key.replace('_', ' ')}."
            yield CounterMetricFamily(f"dgemma_engine_{key}", help_, count)


def _by_kind(name: str, help_: str, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, help_, labels=("kind",))
    for kind, value in values.items():
        family.add_metric((kind,), value)
    return family
