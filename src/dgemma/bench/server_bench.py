"""Load on any OpenAI-compatible server: how much it answers in time, at given rates or for given clients.

Open loop: requests arrive in a Poisson process and never wait for answers, and each time counts from the
arrival that was scheduled. A server that stalls, or a client that is late, cannot hide its queue
(no coordinated omission). Closed loop: each client sends its next request when its last has ended, so a
slow server is asked less; times count from the sending.

Prompts repeat in turn: a server with a prefix cache will have seen them, from the second round on.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dgemma.bench.server_client import (
    Exchange,
    base_url,
    exchange,
    find_model,
    open_client,
    plain,
    wrong_plan_error,
)
from dgemma.errors import InputError

PROMPTS = (
    "Explain in a few sentences why the sea is salty.",
    "Write a short letter that thanks a neighbour for watering the plants.",
    "List five things to check before a long journey by car.",
    "What is the difference between weather and climate?",
    "Tell a short story about a lighthouse keeper who finds a map.",
    "Describe how bread is made, step by step.",
)
Send = Callable[..., Coroutine[Any, Any, Exchange]]
_LATE_S = 0.05  # a client later than that measures itself
_MOST_REASONS = 5


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """What to send: each rate, then each number of clients, one after another, `requests` for each."""

    url: str  # with or without /v1
    model: str | None = None  # None: the first one that the server lists
    rates: tuple[float, ...] = (1.0,)  # arrivals per second, open loop
    concurrency: tuple[int, ...] = ()  # clients, closed loop
    requests: int = 50
    max_tokens: int = 64
    prompts: tuple[str, ...] = PROMPTS
    stream: bool = True
    latency_target_s: float = 10.0  # end to end
    first_text_target_s: float | None = None
    seed: int = 0  # of the arrivals
    timeout_s: float = 300.0  # for one answer
    api_key: str | None = field(default=None, repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict)  # of each body; None takes a field out
    chat: bool = True  # else /v1/completions

    def check(self) -> None:
        """Raise an InputError for what cannot be sent or measured."""
        for name, least in (("requests", 1), ("max_tokens", 1)):
            if getattr(self, name) < least:
                raise InputError.about(name, f"is {getattr(self, name)}; it must be at least {least}.")
        for name in ("latency_target_s", "first_text_target_s", "timeout_s"):
            _check_positive(name, getattr(self, name))
        for rate in self.rates:
            _check_positive("rates", rate)
        if any(clients < 1 for clients in self.concurrency):
            raise InputError.about("concurrency", f"has {min(self.concurrency)}; it must be at least 1.")
        if not self.rates and not self.concurrency:
            raise InputError.about("rates", "is empty, and so is concurrency; give one of them.")
        if not self.prompts:
            raise InputError.about("prompts", "is empty; give at least one.")
        try:
            json.dumps(dict(self.extra), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InputError.about("extra", f"is no JSON ({error}); give plain values.") from None

    @property
    def path(self) -> str:
        return "/chat/completions" if self.chat else "/completions"

    def body(self, model: str, number: int) -> dict[str, Any]:
        """The request with this number; the same for each load."""
        prompt = self.prompts[number % len(self.prompts)]
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        fields = {"model": model, **asked, "max_tokens": self.max_tokens, "stream": self.stream}
        if self.stream:
            fields["stream_options"] = {"include_usage": True}
        return {name: value for name, value in {**fields, **self.extra}.items() if value is not None}

    def arrivals(self, rate: float) -> list[float]:
        """Seconds from the start, of a Poisson process; another rate has the same ones on another scale."""
        rng, at, found = random.Random(self.seed), 0.0, []  # noqa: S311
        for _ in range(self.requests):
            at += rng.expovariate(rate)
            found.append(at)
        return found

    def is_in_time(self, found: Exchange) -> bool:
        """Whether a whole answer met the targets. One without any text meets no target for its first."""
        first = math.inf if found.first_text_at is None else found.first_text_at
        return found.ended_at - found.scheduled_at <= self.latency_target_s and (
            self.first_text_target_s is None or first - found.scheduled_at <= self.first_text_target_s
        )


def run_server_bench(plan: LoadPlan, log: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure each load of the plan, after one request that is not counted.

    A request that fails is counted, never raised. Only a server that cannot be reached,
    or that rejects the first request for what it is (wrong key, model, path or field), is an InputError.
    """
    plan.check()
    return asyncio.run(_run(plan, base_url(plan.url), log))


async def _run(plan: LoadPlan, base: str, log: Callable[[str], None]) -> dict[str, Any]:
    now = asyncio.get_running_loop().time
    loads: list[dict[str, Any]] = []
    async with open_client(base, plan.api_key) as client:
        model = await find_model(client, plan.model)

        async def send(number: int, scheduled_at: float | None = None) -> Exchange:
            return await exchange(
                client,
                plan.path,
                plan.body(model, number),
                scheduled_at=now() if scheduled_at is None else scheduled_at,
                timeout_s=plan.timeout_s,
            )

        log("warming up")
        first = await send(0)
        if first.is_wrong_plan:
            raise wrong_plan_error(base, plan.path, first)
        if first.fate != "ok":
            log(f"the first request was {first.fate}: {first.reason} {first.detail}".rstrip())
        for rate in plan.rates:
            log(f"{rate:g} requests/s, {plan.requests} requests")
            began, exchanges = now(), await _open_loop(plan.arrivals(rate), send)
            loads.append({"rate": rate, "clients": None, **summary(plan, began, exchanges, now())})
        for clients in plan.concurrency:
            log(f"{clients} clients, {plan.requests} requests")
            began, exchanges = now(), await _closed_loop(clients, plan.requests, send)
            figures = summary(plan, began, exchanges, now(), is_open=False)
            loads.append({"rate": None, "clients": clients, **figures})
    kept = {name: value for name, value in vars(plan).items() if name not in ("api_key", "prompts", "url")}
    return {
        "url": base,
        "model": model,
        "plan": {**kept, "extra": dict(plan.extra), "num_prompts": len(plan.prompts)},
        "loads": loads,
    }


async def _open_loop(arrivals: Sequence[float], send: Send) -> list[Exchange]:
    """Send each request at its time, whatever became of the others."""
    now = asyncio.get_running_loop().time
    began = now()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for number, due in enumerate(arrivals):
            await asyncio.sleep(max(0.0, began + due - now()))
            tasks.append(group.create_task(send(number, began + due)))
    return [task.result() for task in tasks]


async def _closed_loop(clients: int, requests: int, send: Send) -> list[Exchange]:
    """Let so many clients share the requests; each has one under way."""
    numbers = iter(range(requests))
    found: list[Exchange] = []

    async def client() -> None:
        for number in numbers:
            found.append(await send(number))  # noqa: PERF401  clients take turns

    async with asyncio.TaskGroup() as group:
        for _ in range(min(clients, requests)):
            group.create_task(client())
    return found


def summary(
    plan: LoadPlan, began: float, exchanges: Sequence[Exchange], ended: float, *, is_open: bool = True
) -> dict[str, Any]:
    """The figures of one load.

    Rates are over `busy_s`: from the start to the last arrival or whole answer, whichever is later. A request
    that hangs until its timeout makes `duration_s` longer, not the others' goodput smaller. Latencies are
    those of whole answers only: read them beside the counts.
    """
    whole = [found for found in exchanges if found.fate == "ok"]
    last_arrival = max(found.scheduled_at for found in exchanges)
    busy_s = max([last_arrival, *(found.ended_at for found in whole)]) - began
    good = sum(map(plan.is_in_time, whole))
    tokens, tokens_from = _tokens(whole)
    late = [found.sent_at - found.scheduled_at for found in exchanges]
    firsts = [found.first_text_at - found.scheduled_at for found in whole if found.first_text_at is not None]
    return {
        "sent": len(exchanges),
        **{fate: sum(x.fate == fate for x in exchanges) for fate in ("ok", "refused", "failed", "lost")},
        "in_time": good,
        "goodput_per_s": _per_s(good, busy_s),
        "arrivals_per_s": _per_s(len(exchanges), last_arrival - began) if is_open else None,
        "output_tokens": tokens,
        "output_tokens_per_s": None if tokens is None else _per_s(tokens, busy_s),
        "tokens_from": tokens_from,
        "first_text_s": percentiles(firsts),
        "end_to_end_s": percentiles([found.ended_at - found.scheduled_at for found in whole]),
        "client_late_p99_s": percentile(late, 99) if is_open else None,
        "busy_s": busy_s,
        "duration_s": ended - began,
        "reasons": _reasons(exchanges),
    }


def _per_s(count: int, seconds: float) -> float:
    """A rate too high for the clock has no time between its arrivals."""
    return count / seconds if seconds > 0 else 0.0


def percentile(values: Sequence[float], percent: float) -> float:
    """By nearest rank: the smallest of the values that at least so many percent of them do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    return {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)} if values else None


def _tokens(whole: Sequence[Exchange]) -> tuple[int | None, str | None]:
    """The tokens of whole answers, and who counted them: "usage", "deltas" or, if it differs, "both".

    Unknown, if there is an answer without usage that was no stream.
    """
    total, sources = 0, set()
    for found in whole:
        count, source = (found.usage_tokens, "usage")
        if count is None:
            count, source = (found.num_texts, "deltas")
        if count is None:
            return None, None
        total += count
        sources.add(source)
    return total, "both" if len(sources) > 1 else next(iter(sources), None)


def _reasons(exchanges: Sequence[Exchange]) -> list[dict[str, Any]]:
    """Why requests were not answered whole, the most frequent first, with what the first of each said."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for one in exchanges:
        if one.fate != "ok":
            entry = {"fate": one.fate, "reason": one.reason, "count": 0, "example": one.detail}
            found.setdefault((str(one.fate), one.reason), entry)["count"] += 1
    return sorted(found.values(), key=lambda entry: -entry["count"])[:_MOST_REASONS]


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise InputError.about(name, f"has {value:g}; it must be a number above 0.")


# The page

_COUNTS = ("sent", "ok", "refused", "failed", "lost")


def page(found: Mapping[str, Any]) -> str:
    """A table of the loads for a terminal, what went wrong, and a sentence with the most goodput."""
    plan, loads = found["plan"], found["loads"]
    lines = [
        f"{found['url']}, model {plain(found['model'])}: {'chat' if plan['chat'] else 'completions'}"
        f"{', streamed' if plan['stream'] else ''}, at most {plan['max_tokens']} tokens; "
        f"seconds, p50/p90/p99 of whole answers",
        f"{'load':<12}{'arrived/s':>9}"
        + "".join(f"{name:>8}" for name in _COUNTS)
        + f"{'goodput/s':>11}{'tokens/s':>10}{'first text':>20}{'end to end':>20}{'client late':>13}",
    ]
    for load in loads:
        lines.append(
            f"{_name(load):<12}{_number(load['arrivals_per_s']):>9}"
            + "".join(f"{load[count]:>8}" for count in _COUNTS)
            + f"{_number(load['goodput_per_s']):>11}{_number(load['output_tokens_per_s']):>10}"
            + f"{_triple(load['first_text_s']):>20}{_triple(load['end_to_end_s']):>20}"
            + f"{_number(load['client_late_p99_s']):>13}"
        )
        lines += [
            f"  {entry['count']} {entry['fate']}: {entry['reason']}"
            + (f" ({entry['example']})" if entry["example"] else "")
            for entry in load["reasons"]
        ]
    if any(load["tokens_from"] in ("deltas", "both") for load in loads):
        lines.append("The server does not give the usage of every answer: deltas with text count as tokens.")
    if late := [_name(load) for load in loads if (load["client_late_p99_s"] or 0.0) > _LATE_S]:
        lines.append(f"The client itself was late at {', '.join(late)}: this machine is too busy for that.")
    return "\n".join([*lines, _verdict(plan, loads)])


def _verdict(plan: Mapping[str, Any], loads: Sequence[Mapping[str, Any]]) -> str:
    target = f"within {plan['latency_target_s']:g} s"
    if plan["first_text_target_s"] is not None:
        target += f" and with their first text within {plan['first_text_target_s']:g} s"
    best = max(loads, key=lambda load: load["goodput_per_s"])
    if best["in_time"] == 0:
        return f"No request was answered whole {target}."
    return (
        f"The most goodput was {_number(best['goodput_per_s'])} requests/s, at {_name(best)}: "
        f"{best['in_time']} of {best['sent']} were answered whole {target}."
    )


def _name(load: Mapping[str, Any]) -> str:
    return f"{load['rate']:g}/s" if load["clients"] is None else f"{load['clients']} clients"


def _number(value: float | None) -> str:
    """Three digits of what is above one, thousandths below; never an exponent."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 1 else f"{value:.3f}"


def _triple(values: Mapping[str, float] | None) -> str:
    return "-" if values is None else "/".join(_number(value) for value in values.values())
