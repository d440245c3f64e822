"""Replicas on Ray Serve: the texts of one process, what a killed one costs, and the way through Ray.

    python -m benchmarks.replicas                    (needs dgemma[ray]; 15 minutes alone on two cores)

The plain server and the one of two replicas answer the same requests over a socket. Then one replica after
another is killed (SIGKILL) while requests run, streams among them, and all are replaced (SIGHUP). Last,
conversations of several turns, and how much of their prompts was found in a prefix cache: by the router that
knows prefixes, and by Ray's own, which takes the less loaded of two.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import httpx2
import psutil

from benchmarks import record
from benchmarks.load_server import MODEL, Served, served
from recipes.english.scenes import make_scene

REPLICAS = 2
REQUESTS = 40
TOKENS = 32  # one canvas
_TIMEOUT_S = 300.0


class HasPort(Protocol):
    """Something that answers on a port of this machine."""

    @property
    def port(self) -> int: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--conversations", type=int, default=50)
    parser.add_argument("--growth", action="store_true", help="only the last part")
    parser.add_argument("--suffix", default="", help="of the result file's name")
    args = parser.parse_args()
    findings: dict[str, Any] = {"model": MODEL, "replicas": REPLICAS}
    if args.growth:
        record.write("replicas", findings | {"more_under_load": grow()}, args.suffix)
        return
    with served(threads=1) as plain:
        expected = [answer(plain, number) for number in range(REQUESTS)]
        findings["plain_s"] = latencies(plain)
    began = time.perf_counter()
    flags = ("--replicas", str(REPLICAS))
    with served(flags, threads=1, starts_within_s=300, ends_within_s=60) as server:
        findings["start_s"] = round(time.perf_counter() - began, 1)
        findings["ray_mb"] = round(sum(p.memory_info().rss for p in processes(server)) / 1e6)
        found = [answer(server, number) for number in range(REQUESTS)]
        findings["requests"] = REQUESTS
        findings["other_texts_than_the_plain_server"] = count_others(found, expected)
        findings["replicas_s"] = latencies(server)
        findings["kills"] = kill_replicas(server, expected, args.kills)
        findings["rolling_replacement"] = replace_all(server, expected)
        findings["prefix_hit_share"] = {"prefix": converse(server, args.conversations)}
    with served((*flags, "--routing", "load"), threads=1, starts_within_s=300, ends_within_s=60) as server:
        findings["prefix_hit_share"]["load"] = converse(server, args.conversations)
    findings["more_under_load"] = grow()
    record.write("replicas", findings, args.suffix)


def body_of(number: int) -> dict[str, Any]:
    words = make_scene(number, seed=7).text.split()
    return {"model": MODEL, "prompt": " ".join(words[:6]), "max_tokens": TOKENS, "seed": number}


def answer(server: HasPort, number: int) -> str:
    response = httpx2.post(f"{address(server)}/v1/completions", json=body_of(number), timeout=_TIMEOUT_S)
    text: str = response.raise_for_status().json()["choices"][0]["text"]
    return text


def streamed(server: HasPort, number: int) -> str:
    text = ""
    body = body_of(number) | {"stream": True}
    with httpx2.stream(
        "POST", f"{address(server)}/v1/completions", json=body, timeout=_TIMEOUT_S
    ) as response:
        for line in response.raise_for_status().iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += event["choices"][0]["text"]
    return text


def address(server: HasPort) -> str:
    return f"http://127.0.0.1:{server.port}"


def latencies(server: HasPort) -> dict[str, float]:
    """Of one request at a time, of one token: what is not the model's work."""
    seconds = []
    body = body_of(0) | {"max_tokens": 1, "max_denoising_steps": 1}
    with httpx2.Client(timeout=_TIMEOUT_S) as client:
        for _ in range(200):
            began = time.perf_counter()
            client.post(f"{address(server)}/v1/completions", json=body).raise_for_status()
            seconds.append(time.perf_counter() - began)
    ordered = sorted(seconds[20:])
    return {
        "p50": round(statistics.median(ordered), 4),
        "p99": round(ordered[int(0.99 * len(ordered))], 4),
    }


def processes(server: Served) -> list[psutil.Process]:
    first = psutil.Process(server.process.pid)
    return [first, *first.children(recursive=True)]


def replicas_of(server: Served) -> list[psutil.Process]:
    return [p for p in processes(server) if "ServeReplica" in " ".join(p.cmdline())]


def kill_replicas(server: Served, expected: list[str], count: int) -> dict[str, Any]:
    rng = random.Random(0)
    wrong, failed, back = 0, 0, []
    for _ in range(count):
        with ThreadPoolExecutor(8) as pool:
            numbers = [rng.randrange(REQUESTS) for _ in range(8)]
            asked = [
                pool.submit((answer, streamed)[at % 2], server, number) for at, number in enumerate(numbers)
            ]
            time.sleep(rng.uniform(0.2, 1.5))
            rng.choice(replicas_of(server)).kill()
            began = time.perf_counter()
            for one, number in zip(asked, numbers, strict=True):
                try:
                    wrong += one.result() != expected[number]
                except (httpx2.HTTPError, AssertionError) as error:
                    print(f"failed: {error!r}", flush=True)
                    failed += 1
        while len(replicas_of(server)) < REPLICAS or not answers_on_all(server):
            time.sleep(0.5)
        back.append(round(time.perf_counter() - began, 1))
        print(f"killed one; back after {back[-1]} s", flush=True)
    return {
        "kills": count,
        "requests": 8 * count,
        "failed": failed,
        "other_texts": wrong,
        "capacity_back_s": back,
    }


def replace_all(server: Served, expected: list[str]) -> dict[str, Any]:
    """Requests all the time, while each replica is replaced by a new one."""
    before = {replica.pid for replica in replicas_of(server)}
    server.process.send_signal(signal.SIGHUP)
    found = ask_until(
        lambda: any(entry["event"] == "all replicas are replaced" for entry in server.entries()),
        server,
        expected,
    )
    return {"new_processes": len({replica.pid for replica in replicas_of(server)} - before), **found}


def ask_until(is_done: Callable[[], bool], server: HasPort, expected: list[str]) -> dict[str, Any]:
    """Four requests at once, every second one a stream, until it is done or time is up."""
    rng, asked, began = random.Random(2), [], time.perf_counter()
    wrong = failed = 0
    with ThreadPoolExecutor(4) as pool:
        while not (done := is_done()) and time.perf_counter() - began < _TIMEOUT_S:
            while sum(not one.done() for one, _ in asked) < 4:
                number = rng.randrange(REQUESTS)
                asked.append((pool.submit((answer, streamed)[len(asked) % 2], server, number), number))
            time.sleep(0.2)
        seconds = time.perf_counter() - began
        for one, number in asked:
            try:
                wrong += one.result() != expected[number]
            except (httpx2.HTTPError, AssertionError) as error:
                print(f"failed: {error!r}", flush=True)
                failed += 1
    return {
        "seconds": round(seconds, 1),
        "is_done": done,
        "requests": len(asked),
        "failed": failed,
        "other_texts": wrong,
    }


def grow() -> dict[str, Any]:
    """Twice as many requests at once as one replica has slots, and what --max-replicas makes of it."""
    flags = ("--replicas", "1", "--max-replicas", "2", "--max-num-seqs", "4")
    with served(flags, threads=1, starts_within_s=300, ends_within_s=60) as server:
        expected = [answer(server, number) for number in range(8)]
        before, began = slots(server), time.perf_counter()
        wrong = asked = 0
        with ThreadPoolExecutor(8) as pool:
            while slots(server) == before and time.perf_counter() - began < _TIMEOUT_S:
                found = list(pool.map(lambda number: answer(server, number), range(8)))
                asked += len(found)
                wrong += count_others(found, expected)
        return {
            "slots_before": before,
            "slots_after": slots(server),
            "seconds": round(time.perf_counter() - began, 1),
            "requests": asked,
            "other_texts": wrong,
        }


def count_others(found: list[str], expected: list[str]) -> int:
    return sum(one != other for one, other in zip(found, expected, strict=True))


def slots(server: Served) -> int:
    metrics = httpx2.get(f"{address(server)}/metrics", timeout=_TIMEOUT_S).text
    (line,) = (line for line in metrics.splitlines() if line.startswith("dgemma_slots "))
    return int(float(line.split()[1]))


def answers_on_all(server: Served) -> bool:
    return slots(server) >= 16 * REPLICAS


def converse(server: HasPort, count: int) -> float:
    """Turns of conversations in random order: the share of prompt tokens that was in a cache."""
    rng = random.Random(1)
    texts = {number: " ".join(make_scene(900 + number, seed=7).text.split()[:40]) for number in range(count)}
    cached = total = 0
    order = [number for number in range(count) for _ in range(4)]
    rng.shuffle(order)
    for number in order:
        body = body_of(number) | {"prompt": texts[number], "max_denoising_steps": 2}
        found = httpx2.post(f"{address(server)}/v1/completions", json=body, timeout=_TIMEOUT_S)
        usage = found.raise_for_status().json()
        cached += usage["usage"]["prompt_tokens_details"]["cached_tokens"]
        total += usage["usage"]["prompt_tokens"]
        texts[number] += usage["choices"][0]["text"]
    return round(cached / total, 4)


if __name__ == "__main__":
    main()
