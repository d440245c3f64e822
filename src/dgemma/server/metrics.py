"""Counters, gauges and histograms in Prometheus' text form."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from dgemma.engine.service import EngineStats

Labels = tuple[tuple[str, str], ...]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128)
TOKENS_PER_FORWARD = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 128, 256)


@dataclass
class Counter:
    name: str
    help: str
    values: dict[Labels, float] = field(default_factory=dict)

    def add(self, amount: float = 1, **labels: str) -> None:
        key = tuple(sorted(labels.items()))
        self.values[key] = self.values.get(key, 0) + amount

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self.help, "counter")
        for labels, value in sorted(self.values.items()):
            yield f"{self.name}{_labelled(labels)} {_number(value)}"


@dataclass
class Histogram:
    name: str
    help: str
    bounds: Sequence[float]  # upper ones, ascending
    _series: dict[Labels, list[float]] = field(default_factory=dict)  # counts per bucket, above all, sum

    def observe(self, value: float, **labels: str) -> None:
        key = tuple(sorted(labels.items()))
        series = self._series.setdefault(key, [0.0] * (len(self.bounds) + 2))
        series[bisect_left(self.bounds, value)] += 1
        series[-1] += value

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self.help, "histogram")
        for labels, series in sorted(self._series.items()):
            below = 0.0
            for bound, count in zip((*self.bounds, None), series, strict=False):
                below += count
                le = "+Inf" if bound is None else _number(bound)
                yield f"{self.name}_bucket{_labelled((*labels, ('le', le)))} {_number(below)}"
            yield f"{self.name}_sum{_labelled(labels)} {_number(series[-1])}"
            yield f"{self.name}_count{_labelled(labels)} {_number(below)}"


class Metrics:
    """What the server itself counts; the engine's numbers are read when somebody asks."""

    def __init__(self) -> None:
        self.requests = Counter("dgemma_http_requests_total", "Requests by endpoint and status.")
        self.durations = Histogram(
            "dgemma_http_request_duration_seconds", "From the request to the end of its answer.", SECONDS
        )
        self.first_block = Histogram(
            "dgemma_time_to_first_block_seconds", "From the request to its first final text.", SECONDS
        )
        self.prompt_tokens = Counter("dgemma_prompt_tokens_total", "Tokens of prompts.")
        self.completion_tokens = Counter("dgemma_completion_tokens_total", "Committed tokens of answers.")
        self.finished = Counter("dgemma_answers_total", "Finished answers by reason.")
        self.cancelled = Counter("dgemma_requests_cancelled_total", "Requests whose client left early.")
        self.steps = Histogram("dgemma_denoising_steps_per_canvas", "Denoise forwards of a canvas.", STEPS)
        self.tokens_per_forward = Histogram(
            "dgemma_tokens_per_forward", "Committed tokens per forward of an answer.", TOKENS_PER_FORWARD
        )
        for counter in (self.prompt_tokens, self.completion_tokens, self.cancelled):
            counter.add(0)  # a series that begins at 0 has a rate from the start

    def render(self, stats: EngineStats, *, num_inside: int) -> str:
        parts = (value for value in vars(self).values() if isinstance(value, Counter | Histogram))
        lines = [line for part in parts for line in part.lines()]
        lines += _engine_lines(stats, num_inside)
        return "\n".join(lines) + "\n"


def _engine_lines(stats: EngineStats, num_inside: int) -> Iterator[str]:
    yield from _gauge("dgemma_requests_in_progress", "Requests being read, waiting or answered.", num_inside)
    yield from _gauge("dgemma_requests_waiting", "Requests in the engine's queue.", stats.num_waiting)
    yield from _gauge("dgemma_slots_in_use", "Canvases being refined.", stats.slots_used)
    yield from _gauge("dgemma_slots", "Canvases that can be refined at once.", stats.slots_total)
    used = (("full", stats.full_pages_used), ("window", stats.window_pages_used))
    total = (("full", stats.full_pages_total), ("window", stats.window_pages_total))
    yield from _gauges("dgemma_kv_pages_in_use", "Cache pages in use by kind of layer.", used)
    yield from _gauges("dgemma_kv_pages", "Cache pages by kind of layer.", total)
    name = "dgemma_prefix_hit_tokens_total"
    yield from _head(name, "Prompt tokens that were not read again.", "counter")
    yield f"{name} {_number(stats.prefix_hit_tokens)}"
    for key, value in sorted(stats.counters.items()):
        name = f"dgemma_engine_{key}_total"
        yield from _head(name, f"The engine's count of {key.replace('_', ' ')}.", "counter")
        yield f"{name} {_number(value)}"


def _gauge(name: str, help_: str, value: float) -> Iterator[str]:
    yield from _head(name, help_, "gauge")
    yield f"{name} {_number(value)}"


def _gauges(name: str, help_: str, values: Iterable[tuple[str, float]]) -> Iterator[str]:
    yield from _head(name, help_, "gauge")
    for kind, value in values:
        yield f"{name}{_labelled((('kind', kind),))} {_number(value)}"


def _head(name: str, help_: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {help_}"
    yield f"# TYPE {name} {kind}"


def _labelled(labels: Labels) -> str:
    if not labels:
        return ""
    escaped = (
        (name, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for name, value in labels
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
