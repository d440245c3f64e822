"""Load and faults on the real server: what it does at three times what it can do.

    python -m benchmarks.server_load                   (--minutes N; --parts load poison watchdog drain keys)

A server of the bundled text model, in the exact way, in a process of its own on this machine.
load: latency alone and capacity; then mixed traffic at three times that, a fifth of the clients leaving in
the middle. Every answer is compared with the same request's alone. Memory, pages and slots, latencies.
poison: requests that fail inside a step, among others.
watchdog: a step that runs out of memory, and one that never ends.
drain: SIGTERM at random moments.
keys: what a wrong one opens, and what its refusal's time tells.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import secrets
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import load_faults, record
from benchmarks.load_client import Leaving, Reply, ask
from benchmarks.load_faults import Alone, answers_alone
from benchmarks.load_server import Served, served
from benchmarks.load_traffic import Ask, Tally, make_pool
from dgemma.bench.server_bench import percentile

OVERLOAD = 3.0
LEAVERS = 0.2
COME_AGAIN = 0.5
MOST_RETRIES = 2
DRAIN_WITHIN_S = 60.0
MOST_TIMES_ALONE = 3.0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How the server runs, and how long we do.

    By default so that an answer takes at most about three times as long as alone: nobody waits for a slot.
    A piece of a prompt is no longer than a canvas, so a step costs at most `slots` times what it does alone.
    """

    minutes: float = 10.0
    slots: int = 2
    queue_len: int = 0
    prefill_chunk: int = 64
    threads: int | None = None
    seed: int = 1
    pool: int = 80
    most_steps: int | None = None

    @property
    def flags(self) -> list[str]:
        values = {
            "max-num-seqs": self.slots,
            "queue-len": self.queue_len,
            "prefill-chunk": self.prefill_chunk,
        }
        return [part for name, value in values.items() for part in (f"--{name}", str(value))]


def main() -> None:
    parts = {"load": load, "poison": poison, "watchdog": watchdog, "drain": drain, "keys": keys}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=Setup.minutes, help="of overload")
    parser.add_argument("--slots", type=int, default=Setup.slots, help="--max-num-seqs of the server")
    parser.add_argument("--queue-len", type=int, default=Setup.queue_len)
    parser.add_argument("--prefill-chunk", type=int, default=Setup.prefill_chunk)
    parser.add_argument("--threads", type=int, help="of the server; without, as many as the machine says")
    parser.add_argument("--seed", type=int, default=Setup.seed)
    parser.add_argument("--parts", nargs="*", choices=parts, default=list(parts))
    parser.add_argument("--suffix", default="", help="of the result file's name")
    args = parser.parse_args()
    setup = Setup(
        minutes=args.minutes,
        slots=args.slots,
        queue_len=args.queue_len,
        prefill_chunk=args.prefill_chunk,
        threads=args.threads,
        seed=args.seed,
        # So many that being asked alone, twice, takes less than the load.
        pool=max(24, min(Setup.pool, int(15 * args.minutes))),
    )
    # Whoever ends us ends our servers too: each is closed on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    findings: dict[str, Any] = {"flags": ["--exact", *setup.flags], "server_threads": args.threads}
    for name in args.parts:
        findings[name] = asyncio.run(parts[name](setup))
        print(name, findings[name], flush=True)
    record.write("server_load", findings, args.suffix)


async def load(setup: Setup) -> dict[str, Any]:
    pool = make_pool(setup.seed, setup.pool, most_steps=setup.most_steps)
    with served(setup.flags, threads=setup.threads) as server:
        alone, _ = await answers_alone(server, pool)
        # Now that shared beginnings are known, as they will be under load.
        again, replies = await answers_alone(server, pool)
        assert again == alone, "an answer alone differs from the same alone"
        calm = Calm.of(pool, alone, replies)
        calm.per_s, calm.tokens_per_s = await capacity(server, pool, setup)
        found = await overload(server, pool, calm, setup)
        found["our_errors_in_the_log"] = sum("failure" in entry for entry in server.entries())
        return found


@dataclass
class Calm:
    """What there is to compare with: each request alone, and what the server can do."""

    alone: Alone
    seconds: dict[int, float]  # by the number of the request
    first_draft_s: dict[int, float]
    per_s: float = 0.0  # requests
    tokens_per_s: float = 0.0

    @classmethod
    def of(cls, pool: Sequence[Ask], alone: Alone, replies: Sequence[Reply]) -> Calm:
        pairs = list(zip(pool, replies, strict=True))
        drafts = {one.number: reply.first_draft_s for one, reply in pairs if reply.first_draft_s is not None}
        return cls(alone, {one.number: reply.seconds for one, reply in pairs}, drafts)


async def capacity(server: Served, pool: Sequence[Ask], setup: Setup) -> tuple[float, float]:
    """Requests and tokens per second when there are always as many clients as slots."""
    ends_at = time.perf_counter() + max(5.0, min(60.0, 12 * setup.minutes))
    order, finished = itertools.cycle(random.Random(setup.seed).sample(pool, len(pool))), 0

    async def worker() -> None:
        nonlocal finished
        while time.perf_counter() < ends_at:
            one = next(order)
            reply = await ask(server.port, one.path, one.body_alone)
            finished += reply.status == 200
            if reply.status == 429:  # asked for two answers where there is room for one
                await asyncio.sleep(0.02)

    began, before = time.perf_counter(), (await server.metrics())["dgemma_completion_tokens_total"]
    await asyncio.gather(*(worker() for _ in range(setup.slots)))
    seconds = time.perf_counter() - began
    tokens = (await server.metrics())["dgemma_completion_tokens_total"] - before
    return finished / seconds, tokens / seconds


@dataclass
class Crowd:
    """Clients of an overloaded server, and what they saw."""

    server: Served
    calm: Calm
    rng: random.Random
    tally: Tally
    refusals_s: list[float] = field(default_factory=list)
    retries: int = 0
    accepted: list[tuple[int, float]] = field(default_factory=list)  # request, seconds
    first_draft_s: list[tuple[int, float]] = field(default_factory=list)

    async def client(self, one: Ask, number: int) -> None:
        leaving = self._leaving(one) if self.rng.random() < LEAVERS else None
        comes_again = self.rng.random() < COME_AGAIN
        for attempt in range(1 + MOST_RETRIES):
            id_ = f"{number}-{attempt}"
            reply = await ask(self.server.port, one.path, one.body, request_id=id_, leaving=leaving)
            kind = self.tally.judge(one, reply, id_)
            if kind == "same" and one.deadline_s is None:
                self.accepted.append((one.number, reply.seconds))
                if reply.first_draft_s is not None:
                    self.first_draft_s.append((one.number, reply.first_draft_s))
            if kind != "refused":
                return
            self.refusals_s.append(reply.seconds)
            if not comes_again or attempt == MOST_RETRIES:
                return
            self.retries += 1
            await asyncio.sleep(reply.retry_after_s or 1.0)

    def _leaving(self, one: Ask) -> Leaving:
        """Before the answer is whole, which in a crowd takes longer than alone; or after some event."""
        rng, longest = self.rng, self.calm.seconds[one.number]
        events = rng.randint(1, 8) if one.is_streamed and rng.random() < 0.7 else None
        return Leaving(rng.uniform(0.02, longest), events, abruptly=rng.random() < 0.5)


async def overload(server: Served, pool: Sequence[Ask], calm: Calm, setup: Setup) -> dict[str, Any]:
    """Arrivals that do not wait for answers, and what came of them."""
    rng = random.Random(setup.seed + 1)
    crowd = Crowd(server, calm, rng, Tally(calm.alone))
    memory: list[tuple[float, float]] = []
    watching = asyncio.create_task(watch_memory(server, memory))
    rate, clients = OVERLOAD * calm.per_s, list[asyncio.Task[None]]()
    before, began = await server.metrics(), time.perf_counter()
    while (now := time.perf_counter()) < began + 60 * setup.minutes:
        clients.append(asyncio.create_task(crowd.client(rng.choice(pool), len(clients))))
        await asyncio.sleep(max(0.0, now + rng.expovariate(rate) - time.perf_counter()))
    seconds, after = time.perf_counter() - began, await server.metrics()
    await asyncio.gather(*clients)
    watching.cancel()
    in_use = await server.at_rest()
    latency = _compared(crowd.accepted, calm.seconds)
    return {
        "pool": len(pool),
        "alone": _latency([calm.seconds[one.number] for one in pool if one.deadline_s is None]),
        "capacity": {"requests_per_s": round(calm.per_s, 3), "tokens_per_s": round(calm.tokens_per_s, 1)},
        "minutes": round(seconds / 60, 2),
        "clients": len(clients),
        "clients_per_s": round(len(clients) / seconds, 2),
        "came_again": crowd.retries,
        "answers": crowd.tally.summary(),
        "latency": latency,
        "first_draft": _compared(crowd.first_draft_s, calm.first_draft_s),
        "refusal_s": _latency(crowd.refusals_s),
        "steps": _steps(before, after, seconds),
        "memory": _memory(memory, setup.minutes),
        "in_use_after": in_use,
        "holds": {
            "nothing_lost_crossed_or_different": not crowd.tally.num_wrong,
            "nothing_in_use_after": not any(in_use.values()),
            "p99_within_3_times_alone": latency.get("p99_times_alone", 0.0) <= MOST_TIMES_ALONE,
        },
    }


async def watch_memory(server: Served, samples: list[tuple[float, float]]) -> None:
    """(minutes, MB), every second."""
    began = time.perf_counter()
    while True:
        samples.append(((time.perf_counter() - began) / 60, server.rss_mb()))
        await asyncio.sleep(1.0)


def _latency(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {"requests": 0}
    return {
        "requests": len(seconds),
        "p50_s": round(statistics.median(seconds), 4),
        "p99_s": round(percentile(seconds, 99), 4),
    }


def _compared(measured: Sequence[tuple[int, float]], alone: dict[int, float]) -> dict[str, Any]:
    """Beside the same requests alone: as two distributions, and each request beside itself."""
    if not measured:
        return {"requests": 0}
    crowded, calm = [seconds for _, seconds in measured], [alone[number] for number, _ in measured]
    ratios = [a / b for a, b in zip(crowded, calm, strict=True)]
    return {
        **_latency(crowded),
        "alone": _latency(calm),
        "p50_times_alone": round(statistics.median(crowded) / statistics.median(calm), 2),
        "p99_times_alone": round(percentile(crowded, 99) / percentile(calm, 99), 2),
        "each_times_itself_alone": {
            "p50": round(statistics.median(ratios), 2),
            "p99": round(percentile(ratios, 99), 2),
            "max": round(max(ratios), 2),
        },
    }


def _steps(before: dict[str, float], after: dict[str, float], seconds: float) -> dict[str, float]:
    """What steps were like: how many canvases shared one, and how long it took if they never paused."""

    def counted(name: str) -> float:
        return after[f"dgemma_{name}_total"] - before[f"dgemma_{name}_total"]

    steps = max(1.0, counted("engine_steps"))
    return {
        "per_s": round(steps / seconds, 2),
        "canvases_per_step": round(counted("engine_denoise_forwards") / steps, 2),
        "tokens_per_s": round(counted("completion_tokens") / seconds, 1),
        "prefix_hit_tokens": counted("prefix_hit_tokens"),
    }


def _memory(samples: Sequence[tuple[float, float]], minutes: float) -> dict[str, float]:
    """Resident megabytes, and how they grow by the minute once the server is warm."""
    warm = min(2.0, minutes / 4)
    later = [sample for sample in samples if sample[0] >= warm]
    found = {"start_mb": samples[0][1], "warm_mb": later[0][1] if later else 0.0, "end_mb": samples[-1][1]}
    found["most_mb"] = max(mb for _, mb in samples)
    if len(later) > 2:
        found["slope_mb_per_min"] = statistics.linear_regression(*zip(*later, strict=True)).slope
    return {name: round(value, 2) for name, value in found.items()} | {"samples": len(samples)}


async def poison(setup: Setup) -> dict[str, Any]:
    pool = make_pool(setup.seed + 2, 24, most_steps=setup.most_steps or 16)
    slots, flags = max(4, setup.slots), ["--max-num-seqs", str(max(4, setup.slots)), "--queue-len", "8"]
    with served(flags, threads=setup.threads, poisoned=True) as server:
        alone, _ = await answers_alone(server, pool)
        return await load_faults.poison(server, pool, alone, company=slots - 1, rounds=3)


async def watchdog(setup: Setup) -> dict[str, Any]:
    pool = make_pool(setup.seed + 4, 24, most_steps=setup.most_steps or 8)
    flags = ["--max-num-seqs", "4", "--queue-len", "8", "--step-timeout", "5"]
    with served(flags, threads=setup.threads, poisoned=True) as server:
        alone, _ = await answers_alone(server, pool)
        return await load_faults.watchdog(server, pool, alone, company=3)


async def drain(setup: Setup, rounds: int = 5) -> dict[str, Any]:
    pool = make_pool(setup.seed + 3, 24, most_steps=setup.most_steps)
    rng, flags = random.Random(setup.seed), ["--max-num-seqs", "4", "--queue-len", "8"]
    with served(flags, threads=setup.threads) as server:
        alone, _ = await answers_alone(server, pool)
    found = [
        await load_faults.drain(
            flags, pool, alone, clients=14, rng=rng, threads=setup.threads, within_s=DRAIN_WITHIN_S
        )
        for _ in range(rounds)
    ]
    broken = sum(one["answers"]["wrong"] for one in found)
    return {"broken": broken, "holds": all(one["holds"] for one in found), "rounds": found}


async def keys(setup: Setup, rounds: int = 3000) -> dict[str, Any]:
    key = secrets.token_hex(load_faults.KEY_LEN // 2)
    with served(threads=setup.threads, key=key) as server:
        found = await load_faults.wrong_keys(server, key, list(load_faults.near_keys(key).values()))
        timing = await asyncio.to_thread(load_faults.key_timing, server.port, key, rounds, setup.seed)
        small_ms = await asyncio.to_thread(load_faults.whole_reply_ms, server.port)
    return {**found, "timing": timing, "small_reply_on_a_kept_connection_ms": small_ms}


if __name__ == "__main__":
    main()
