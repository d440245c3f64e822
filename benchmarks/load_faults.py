"""Parts of `benchmarks.server_load`: requests that fail inside a step, signals, wrong keys."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import random
import signal
import socket
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.load_client import CHAT, COMPLETIONS, HOST, Reply, ask
from benchmarks.load_server import HANG, NO_MEMORY, POINTS, Served, poisoned_seed, served
from benchmarks.load_traffic import MODEL, Ask, Choice, Tally, choices_of
from dgemma.bench.server_bench import percentile

Alone = Mapping[int, tuple[Choice, ...]]
KEY_LEN = 64
_WARM_UP = 20


async def answers_alone(
    server: Served, pool: Sequence[Ask], headers: dict[str, str] | None = None
) -> tuple[dict[int, tuple[Choice, ...]], list[Reply]]:
    """One request after another, each without its deadline."""
    replies = [await ask(server.port, one.path, one.body_alone, headers=headers) for one in pool]
    bad = [(one.body, reply) for one, reply in zip(pool, replies, strict=True) if not reply.is_done]
    if bad or any(reply.status != 200 for reply in replies):
        raise RuntimeError(f"not even alone: {bad[:1] or [r.body for r in replies if r.status != 200][:1]}")
    return {one.number: choices_of(reply) for one, reply in zip(pool, replies, strict=True)}, replies


@asynccontextmanager
async def _company(server: Served, pool: Sequence[Ask], tally: Tally, size: int) -> AsyncIterator[None]:
    """So many clients that ask for ordinary answers, one after another, while the block runs."""
    is_over = False

    async def ordinary(worker: int) -> None:
        for number in itertools.count():
            one, id_ = pool[(size * number + worker) % len(pool)], f"{worker}-{number}"
            if is_over:
                return
            reply = await ask(server.port, one.path, one.body, request_id=id_)
            if (reply.error() or {}).get("code") == "engine_restarted":
                tally.counts["told of the restart"] += 1
            elif tally.judge(one, reply, id_) == "refused":
                await asyncio.sleep(0.2)

    workers = [asyncio.create_task(ordinary(worker)) for worker in range(size)]
    try:
        yield
    finally:
        is_over = True
        await asyncio.gather(*workers)


async def poison(
    server: Served, pool: Sequence[Ask], alone: Alone, *, company: int, rounds: int
) -> dict[str, Any]:
    """Poisoned requests among ordinary ones, which must not notice."""
    tally, told, ways = Tally(alone), Counter[str](), _poisonings(rounds)
    async with _company(server, pool, tally, company):
        for seed, stream, what in ways:
            told[await _poisoned_reply(server, seed, stream, what)] += 1
    after = [await ask(server.port, one.path, one.body_alone, request_id="after") for one in pool[:3]]
    for one, reply in zip(pool[:3], after, strict=True):
        tally.judge(one, reply, "after")
    return {
        "poisoned": len(ways),
        "told": dict(told),
        "others": tally.summary(),
        "in_use_after": await server.at_rest(),
        "holds": told.keys() <= {"500", "error event"} and not tally.num_wrong,
    }


def _poisonings(rounds: int) -> list[tuple[int, bool, str]]:
    found = []
    for number in range(rounds):
        for point, stream in itertools.product(POINTS, (False, True)):
            # A prompt is kept before there are steps; what fails later does so in the middle of an answer.
            after = 0 if point == "_store_encoded" else (3, 0, 1)[number % 3]
            found.append((poisoned_seed(point, after, number), stream, f"{point} {after}"))
    return found


async def _poisoned_reply(server: Served, seed: int, stream: bool, what: str) -> str:
    """-> how the failure was told, which depends on whether the reply had begun."""
    body = {"model": MODEL, "prompt": f"A page {what} is", "seed": seed, "max_tokens": 64, "stream": stream}
    while (reply := await ask(server.port, COMPLETIONS, body)).status == 429:
        await asyncio.sleep(0.1)
    error = reply.error() or {}
    if not reply.is_complete or error.get("code") != "engine_failure":
        return f"{what}, stream {stream}: {reply.status} {reply.failure or reply.body[-200:]!r}"
    if reply.status == 500 and not reply.is_stream:
        return "500"
    return "error event" if stream and not reply.is_done else f"{what}: {reply.status}"


async def watchdog(server: Served, pool: Sequence[Ask], alone: Alone, *, company: int) -> dict[str, Any]:
    """A step that runs out of memory, and one that hangs, among ordinary requests."""
    tally = Tally(alone)

    async def struck(seed: int) -> Reply:
        body = {"model": MODEL, "prompt": "A page is", "seed": seed, "max_tokens": 32}
        while (reply := await ask(server.port, COMPLETIONS, body)).status == 429:
            await asyncio.sleep(0.1)
        return reply

    async with _company(server, pool, tally, company):
        await asyncio.sleep(2)
        no_memory = await struck(NO_MEMORY)
        hung = await struck(HANG)
        await asyncio.sleep(5)
    metrics = await server.metrics()
    return {
        "out_of_memory": {
            "status": no_memory.status,
            "counted": metrics["dgemma_engine_out_of_memory_total"],
        },
        "hang": {
            "status": hung.status,
            "code": (hung.error() or {}).get("code"),
            "told_after_s": round(hung.seconds, 2),
            "restarts": metrics["dgemma_engine_restarts_total"],
        },
        "others": tally.summary(),
        "in_use_after": await server.at_rest(),
    }


async def drain(
    flags: Sequence[str],
    pool: Sequence[Ask],
    alone: Alone,
    *,
    clients: int,
    rng: random.Random,
    threads: int | None,
    within_s: float,
) -> dict[str, Any]:
    """Open requests, a signal at a random moment, and what became of all."""
    with served([*flags, "--drain-timeout", str(within_s)], threads=threads) as server:
        return await drain_one(server, pool, alone, clients=clients, rng=rng, within_s=within_s)


async def drain_one(
    server: Served, pool: Sequence[Ask], alone: Alone, *, clients: int, rng: random.Random, within_s: float
) -> dict[str, Any]:
    tally, refusals = Tally(alone), Counter[str]()
    asked = rng.choices(pool, k=clients)
    sent = [asyncio.Event() for _ in asked]
    replies = [
        asyncio.create_task(ask(server.port, one.path, one.body, request_id=f"open-{i}", sent=sent[i]))
        for i, one in enumerate(asked)
    ]
    await asyncio.gather(*(event.wait() for event in sent))
    # A moment that a fast machine has too: after so many answers or refusals.
    moment = rng.randrange(clients // 2 + 1)
    while sum(reply.done() for reply in replies) < moment:
        await asyncio.sleep(0.002)
    num_open = sum(not reply.done() for reply in replies)
    server.process.send_signal(signal.SIGTERM)
    began = time.perf_counter()
    exited = asyncio.create_task(asyncio.to_thread(server.process.wait, within_s + 30))
    # A signal takes a moment to be heard.
    while not exited.done() and not any(entry["event"] == "draining" for entry in server.entries()):
        await asyncio.sleep(0.02)
    while not exited.done():
        refusals[_refusal(await ask(server.port, CHAT, {"model": MODEL, "messages": []}))] += 1
        await asyncio.sleep(0.1)
    try:
        status: int | None = exited.result()
    except subprocess.TimeoutExpired:
        status = None
    ended_s = time.perf_counter() - began
    for i, (one, reply) in enumerate(zip(asked, await asyncio.gather(*replies), strict=True)):
        # Sent before the signal, read after it: refused is a proper answer too.
        if reply.status == 503 and reply.error() is not None and reply.retry_after_s:
            tally.counts["refused"] += 1
        else:
            tally.judge(one, reply, f"open-{i}")
    return {
        "after_answers": moment,
        "open": num_open,
        "answers": tally.summary(),
        "newcomers": dict(refusals),
        "status": status,
        "ended_after_s": round(ended_s, 2),
        "holds": status == 0
        and not tally.num_wrong
        and ended_s <= within_s + 5
        and refusals.keys() <= {"503", "no connection"},
    }


def _refusal(reply: Reply) -> str:
    """How somebody was turned away who came after the signal."""
    if reply.status is None:
        # Nobody listens any more; or the end came while the connection waited to be accepted: the system
        # resets such ones. Nobody who came after the signal had been accepted.
        kinds = ("ConnectionRefusedError", "ConnectionResetError")
        is_refused = (reply.failure or "").startswith(kinds)
        return "no connection" if is_refused else f"dropped: {reply.failure}"
    is_fine = reply.error() is not None and reply.retry_after_s is not None
    return str(reply.status) if is_fine else f"{reply.status} {reply.body[:200]!r}"


async def wrong_keys(server: Served, key: str, wrong: Sequence[str]) -> dict[str, Any]:
    """Every endpoint but the open ones: 401, in the right form, and nothing else."""
    gets = ("/v1/models", f"/v1/models/{MODEL}", "/metrics", "/openapi.json", "/v1/nothing", "/", "/docs")
    asks: list[tuple[str, dict[str, Any] | None]] = [(path, None) for path in gets]
    for path in (CHAT, COMPLETIONS):
        asks += [(path, {"model": MODEL, "prompt": "A page"}), (path, {}), (path, None)]
    given = [None, "Bearer", "Bearer ", key, f"Basic {key}", *(f"Bearer {one}" for one in wrong)]
    let_in = []
    for (path, body), value in itertools.product(asks, given):
        headers = {} if value is None else {"authorization": value}
        reply = await ask(server.port, path, body, headers=headers)
        error = reply.error() or {}
        if reply.status != 401 or error.get("code") != "invalid_api_key" or MODEL in str(error):
            let_in.append(f"{path}: {reply.status}")
    right = {"authorization": f"Bearer {key}"}
    fits = (await ask(server.port, "/v1/models", headers=right)).status
    is_open = [(await ask(server.port, path)).status for path in ("/health", "/ready")]
    return {
        "requests": len(asks) * len(given),
        "other_than_401": let_in,
        "right_key": fits,
        "health_and_ready": is_open,
        "holds": not let_in and fits == 200 and is_open == [200, 200],
    }


def near_keys(key: str) -> dict[str, str]:
    """Wrong keys of the same length that share nothing, half, or all but the last character with it."""
    other = "".join("x" if char != "x" else "y" for char in key)
    half = len(key) // 2
    return {"0": other, "half": key[:half] + other[half:], "all but one": key[:-1] + other[-1]}


def key_timing(port: int, key: str, rounds: int, seed: int) -> dict[str, Any]:
    """Microseconds of a refusal by how much of the key was right, in turn, in random order."""
    keys, rng = near_keys(key), random.Random(seed)
    times: dict[str, list[float]] = {name: [] for name in keys}
    with socket.create_connection((HOST, port), timeout=30) as connection:
        for number in range(rounds + _WARM_UP):
            for name in rng.sample(list(keys), len(keys)):
                microseconds = _refusal_us(connection, keys[name])
                if number >= _WARM_UP:
                    times[name].append(microseconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    found = max(medians.values()) - min(medians.values())
    chance = _by_chance(list(times.values()), rng)
    return {
        "rounds": rounds,
        "us": {
            name: {
                "median": round(medians[name], 1),
                "quartiles": [round(percentile(values, 25), 1), round(percentile(values, 75), 1)],
            }
            for name, values in times.items()
        },
        "widest_difference_us": round(found, 2),
        # What the same measurements give when it is drawn by lot which key each belongs to.
        "by_chance_us": {
            "median": round(statistics.median(chance), 2),
            "p99": round(percentile(chance, 99), 2),
        },
        "within_noise": found <= percentile(chance, 99),
    }


def _refusal_us(connection: socket.socket, key: str) -> float:
    """From the last byte asked to the first of the reply, which is then read to its end."""
    request = f"GET /v1/models HTTP/1.1\r\nhost: {HOST}\r\nauthorization: Bearer {key}\r\n\r\n".encode()
    began = time.perf_counter()
    connection.sendall(request)
    reply = connection.recv(1 << 16)
    microseconds = 1e6 * (time.perf_counter() - began)
    head, end, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 401 "), head
    assert end, head
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < length:
        if hasattr(socket, "TCP_QUICKACK"):  # or a server that waits for it makes this take hours
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        body += connection.recv(1 << 16)
    return microseconds


def whole_reply_ms(port: int, rounds: int = 50) -> float:
    """The median of a small reply on a connection that is kept: more than a few are somebody's waiting."""
    connection = http.client.HTTPConnection(HOST, port, timeout=30)
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        times.append(1e3 * (time.perf_counter() - began))
    connection.close()
    return round(statistics.median(times), 3)


def _by_chance(groups: Sequence[Sequence[float]], rng: random.Random, draws: int = 300) -> list[float]:
    found = []
    for _ in range(draws):
        # Shuffled round by round: what disturbs one moment disturbs all keys of it.
        mixed = zip(*(rng.sample(row, len(row)) for row in zip(*groups, strict=True)), strict=True)
        medians = [statistics.median(group) for group in mixed]
        found.append(max(medians) - min(medians))
    return found
