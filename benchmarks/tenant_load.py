"""Two API keys on one server at three times its capacity, and one of them misbehaves.

    python -m benchmarks.tenant_load                    (--rounds N --alone MINUTES --crowd MINUTES)

A server of the bundled text model, in the exact way, in a process of its own on this machine. In turn, some
times: the well-behaved key alone, which is a user who reads each answer before asking again; then the same
beside a key that sends three times the capacity and waits for nothing: ordinary requests, of which a fifth
leave, hostile regular expressions, prompts of 8 MB, broken and stalled bodies, readers that do not read,
sixteen answers at once, wrong keys. Every answer is compared with the same request's alone. Latency of the
well-behaved key, memory, file descriptors, `/health`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from benchmarks import record
from benchmarks.abuse import HOSTILE, POST
from benchmarks.load_client import CHAT, HOST, Leaving, Reply, ask
from benchmarks.load_faults import Alone, answers_alone
from benchmarks.load_health import watched_health
from benchmarks.load_server import KEYS, Served, bearer, two_keys
from benchmarks.load_traffic import MODEL, Ask, Tally, make_mixed_pool
from dgemma.bench.server_bench import percentile

OVERLOAD = 3.0
# What the well-behaved user needs to read an answer, on average.
READS_S = 1.0
LEAVERS = 0.2
# Of a canvas: answers in less than a second, so that there are thousands of requests.
MOST_STEPS = 4
FLAGS = ("--max-num-seqs", "2", "--max-key-seqs", "1", "--queue-len", "16", "--prefill-chunk", "64",
         "--dtype", "float32")  # fmt: skip
MOST_TIMES_ALONE = 2.0


@dataclass
class Traffic:
    """What the clients of both keys sent, and what came of it."""

    server: Served
    good: Sequence[Ask]
    bad: Sequence[Ask]
    alone: Alone
    rng: random.Random
    tallies: dict[str, Tally] = field(default_factory=dict)
    misdeeds: Counter[str] = field(default_factory=Counter)  # kind and status
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"alone": [], "crowd": []})
    samples: list[tuple[int, float, int]] = field(default_factory=list)  # requests so far, MB, files
    num_sent: int = 0

    def __post_init__(self) -> None:
        self.tallies = {name: Tally(self.alone) for name in KEYS}

    async def be_good(self, phase: str, seconds: float) -> None:
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends:
            one, id_ = self.rng.choice(self.good), self._next_id()
            reply = await ask(self.server.port, one.path, one.body, request_id=id_, headers=bearer("good"))
            if self.tallies["good"].judge(one, reply, id_) == "same":
                self.seconds[phase].append(reply.seconds)
            await asyncio.sleep(self.rng.expovariate(1 / READS_S))

    async def send_bad(self) -> None:
        if self.rng.random() < 0.7:
            await self._ordinary()
            return
        deeds: tuple[tuple[str, Callable[[], Awaitable[str]]], ...] = (
            ("hostile regex", self._hostile_regex), ("8 MB prompt", self._long_prompt),
            ("broken JSON", self._broken), ("wrong key", self._wrong_key), ("no reader", self._no_reader),
            ("stalled body", self._stalled), ("sixteen answers", self._many),
        )  # fmt: skip
        name, deed = self.rng.choice(deeds)
        self.misdeeds[f"{name}: {await deed()}"] += 1

    def sample(self) -> None:
        self.samples.append((self.num_sent, self.server.rss_mb(), self.server.num_files()))

    def _next_id(self) -> str:
        self.num_sent += 1
        return f"request-{self.num_sent}"

    async def _ordinary(self) -> None:
        one, id_, leaving = self.rng.choice(self.bad), self._next_id(), None
        if self.rng.random() < LEAVERS:
            leaving = Leaving(self.rng.uniform(0.02, 3.0), abruptly=self.rng.random() < 0.5)
        reply = await ask(
            self.server.port, one.path, one.body, request_id=id_, headers=bearer("bad"), leaving=leaving
        )
        self.tallies["bad"].judge(one, reply, id_)

    async def _chat(self, fields: dict[str, Any], key: dict[str, str] | None = None) -> str:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "A page."}], **fields}
        reply = await ask(
            self.server.port, CHAT, body, request_id=self._next_id(), headers=key or bearer("bad")
        )
        return _status(reply)

    async def _hostile_regex(self) -> str:
        return await self._chat({"regex": HOSTILE.format(self.rng.randint(20, 30)) + str(self.num_sent)})

    async def _long_prompt(self) -> str:
        content = "word " * ((8 << 20) // 5 - 100)
        return await self._chat({"messages": [{"role": "user", "content": content}]})

    async def _wrong_key(self) -> str:
        return await self._chat({}, {"authorization": f"Bearer {self.rng.random()}"})

    async def _many(self) -> str:
        return await self._chat({"n": 16, "max_tokens": 16, "max_denoising_steps": 2})

    async def _broken(self) -> str:
        body = self.rng.choice((b"{", b"[]", b"\xff" * 50, b'{"a": 1, "a": 2}', b'{"model": NaN}'))
        return await self._raw(f"content-length: {len(body)}\r\n\r\n".encode() + body, wait_s=30)

    async def _stalled(self) -> str:
        return await self._raw(b'content-length: 1000\r\n\r\n{"model": ', wait_s=5)

    async def _no_reader(self) -> str:
        """A stream that nobody reads for a while; then the client goes."""
        fields = {"max_tokens": 192, "stream": True, "diffusing": True}
        body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "A page."}], **fields})
        return await self._raw(f"content-length: {len(body)}\r\n\r\n{body}".encode(), wait_s=5, reads=False)

    async def _raw(self, rest: bytes, *, wait_s: float, reads: bool = True) -> str:
        self._next_id()
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(HOST, self.server.port, limit=1024)
            writer.write(POST.encode() + rest)
            line = b""
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    line = await reader.readline() if reads else await asyncio.sleep(wait_s, b"")
            writer.transport.abort()
            return line.split()[1].decode() if line else "left"
        return "no connection"


def _status(reply: Reply) -> str:
    return reply.failure or str(reply.status)


async def send(rate: float, seconds: float, one: Callable[[], Awaitable[None]], rng: random.Random) -> None:
    """Arrivals that do not wait for answers, for so long; then until the last is answered."""
    ends, clients = time.perf_counter() + seconds, set[asyncio.Future[None]]()
    at = time.perf_counter()
    while (at := at + rng.expovariate(rate)) < ends:
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        client = asyncio.ensure_future(one())
        clients.add(client)
        client.add_done_callback(clients.discard)
    await asyncio.gather(*clients)


async def capacity(server: Served, pool: Sequence[Ask], seconds: float, rng: random.Random) -> float:
    """Requests per second where each key always has one under way."""
    ends, finished = time.perf_counter() + seconds, 0

    async def worker(name: str) -> None:
        nonlocal finished
        while time.perf_counter() < ends:
            one = rng.choice(pool)
            reply = await ask(server.port, one.path, one.body_alone, headers=bearer(name))
            assert reply.status == 200, reply.body
            finished += 1

    began = time.perf_counter()
    await asyncio.gather(*(worker(name) for name in KEYS))
    return finished / (time.perf_counter() - began)


async def run(server: Served, args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(args.seed)
    mixed = make_mixed_pool(args.seed, args.pool, most_steps=MOST_STEPS)
    pool = [one for one in mixed if one.deadline_s is None and "n" not in one.fields]
    alone, _ = await answers_alone(server, pool, bearer("good"))
    # Gaps and edits take several rounds of the engine, and ten times as long. Only the other key asks for
    # them, so that p99 is not the figure of these few.
    good = [one for one in pool if "suffix" not in one.fields and not one.path.startswith("/v1/edit")]
    per_s = await capacity(server, good, args.capacity, rng)
    traffic = Traffic(server, good, pool, alone, rng)
    print(f"{len(pool)} requests, {per_s:.2f} per second", flush=True)
    rests, p99s = list[dict[str, float]](), list[dict[str, float]]()
    for number in range(args.rounds):
        counts = {phase: len(seconds) for phase, seconds in traffic.seconds.items()}
        await traffic.be_good("alone", 60 * args.alone)
        watching = asyncio.create_task(_sample(traffic))
        await asyncio.gather(
            traffic.be_good("crowd", 60 * args.crowd),
            send(OVERLOAD * per_s, 60 * args.crowd, traffic.send_bad, rng),
        )
        watching.cancel()
        rests.append({**await server.at_rest(30, bearer("good")), "files": server.num_files()})
        p99s.append({phase: _p99(some[counts[phase] :]) for phase, some in traffic.seconds.items()})
        print(f"round {number + 1}: {traffic.num_sent} requests, {p99s[-1]}, {rests[-1]}", flush=True)
    return {"capacity_per_s": round(per_s, 3), "p99_by_round": p99s, **_summary(traffic, rests)}


async def _sample(traffic: Traffic) -> None:
    while True:
        traffic.sample()
        await asyncio.sleep(1)


def _p99(seconds: Sequence[float]) -> float:
    return round(percentile(seconds, 99), 3) if seconds else 0.0


def _summary(traffic: Traffic, rests: Sequence[dict[str, float]]) -> dict[str, Any]:
    alone, crowd = (sorted(traffic.seconds[phase]) for phase in ("alone", "crowd"))
    ratio = percentile(crowd, 99) / percentile(alone, 99)
    # Once the caches are warm: the first sixth is not counted.
    sixths = [traffic.samples[len(traffic.samples) * n // 6 :][: len(traffic.samples) // 6] for n in range(6)]
    later = [sample for sixth in sixths[1:] for sample in sixth]
    slope = statistics.linear_regression([n for n, _, _ in later], [mb for _, mb, _ in later]).slope
    wrong = sum(tally.num_wrong for tally in traffic.tallies.values())
    server_errors = sorted(kind for kind in traffic.misdeeds if ": 5" in kind and ": 504" not in kind)
    return {
        "requests": traffic.num_sent,
        "good": traffic.tallies["good"].summary(),
        "bad": traffic.tallies["bad"].summary(),
        "misdeeds": dict(sorted(traffic.misdeeds.items())),
        "latency_s": {
            phase: {"requests": len(some), "p50": round(statistics.median(some), 3), "p99": _p99(some)}
            for phase, some in (("alone", alone), ("crowd", crowd))
        },
        "p50_times_alone": round(statistics.median(crowd) / statistics.median(alone), 2),
        "p99_times_alone": round(ratio, 2),
        "memory_mb": {
            "mean_by_sixth": [round(statistics.mean(mb for _, mb, _ in sixth), 1) for sixth in sixths],
            "slope_per_1000_requests": round(1000 * slope, 2),
        },
        "most_files": max(files for _, _, files in traffic.samples),
        "at_rest": rests,
        "our_errors_in_the_log": sum("failure" in entry for entry in traffic.server.entries()),
        "holds": {
            "nothing_lost_crossed_or_different": not wrong,
            "no_other_5xx": not server_errors,
            "p99_within_twice_alone": ratio <= MOST_TIMES_ALONE,
            "files_as_before": len({rest["files"] for rest in rests}) == 1,
            "nothing_in_use_after": not any(v for rest in rests for k, v in rest.items() if k != "files"),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", type=float, default=3.0, help="minutes of each round")
    parser.add_argument("--crowd", type=float, default=10.0, help="minutes of each round")
    parser.add_argument("--capacity", type=float, default=60.0, help="seconds of measuring it")
    parser.add_argument("--pool", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1, help="of the server")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    # Whoever ends us ends our server too: it is closed on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with two_keys(FLAGS, threads=args.threads) as server, watched_health(server.port) as health:
        found = asyncio.run(run(server, args))
    record.write("tenant_load", {"flags": ["--exact", *FLAGS], **found, "health": health})


if __name__ == "__main__":
    main()
