"""Plain servers behind sglang-router: the same texts, what the router costs, and what a killed server costs.

    python -m benchmarks.proxy                       (needs sglang-router==0.3.2; 10 minutes on two cores)

The same requests as in `benchmarks.replicas`: to a plain server, and through the router to one of two. Then
one server after another is killed (SIGKILL) while requests run, half of them streams, and started again, as a
supervisor would do it. Last, conversations, and how much of their prompts was found in a prefix cache, for
three of the router's policies.
"""

from __future__ import annotations

import argparse
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from benchmarks import record
from benchmarks.load_server import MODEL, Served, end, served
from benchmarks.replicas import REQUESTS, address, answer, converse, count_others, latencies, streamed

WORKERS = 2
POLICIES = ("cache_aware", "random", "power_of_two")
_STARTS_WITHIN_S = 120.0


@dataclass(frozen=True)
class Router:
    port: int
    process: subprocess.Popen[bytes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--conversations", type=int, default=50)
    parser.add_argument("--suffix", default="", help="of the result file's name")
    args = parser.parse_args()
    findings: dict[str, Any] = {"model": MODEL, "servers": WORKERS, "router": "sglang-router 0.3.2"}
    with Workers() as workers:
        expected = [answer(workers[0], number) for number in range(REQUESTS)]
        with routing(workers, "cache_aware") as router:
            found = [answer(router, number) for number in range(REQUESTS)]
            findings["requests"] = REQUESTS
            findings["other_texts_than_the_plain_server"] = count_others(found, expected)
            # In turns, so that what else the machine does meets both.
            rounds = [(latencies(workers[0]), latencies(router)) for _ in range(3)]
            findings["plain_s"], findings["routed_s"] = (list(each) for each in zip(*rounds, strict=True))
            findings["kills"] = kill_workers(workers, router, expected, args.kills)
    findings["prefix_hit_share"] = {}
    for policy in POLICIES:
        with Workers() as workers, routing(workers, policy) as router:
            findings["prefix_hit_share"][policy] = converse(router, args.conversations)
            print(policy, findings["prefix_hit_share"][policy], flush=True)
    record.write("proxy", findings, args.suffix)


class Workers:
    """Plain servers, each on a port that it keeps when it is started again."""

    def __enter__(self) -> Workers:
        self._stack = ExitStack()
        self._ports = [free_port() for _ in range(WORKERS)]
        self._servers = [self._start(port) for port in self._ports]
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, number: int) -> Served:
        return self._servers[number]

    def __len__(self) -> int:
        return len(self._servers)

    def start_again(self, number: int) -> None:
        self._servers[number] = self._start(self._ports[number])

    def _start(self, port: int) -> Served:
        return self._stack.enter_context(served(("--port", str(port)), threads=1))


@contextmanager
def routing(workers: Workers, policy: str) -> Iterator[Router]:
    port = free_port()
    urls = [address(workers[number]) for number in range(len(workers))]
    command = [
        sys.executable,
        "-m",
        "sglang_router.launch_router",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    command += ["--policy", policy, "--health-check-interval-secs", "2", "--health-success-threshold", "1"]
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        process = subprocess.Popen(
            [*command, "--worker-urls", *urls], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            router = Router(port, process)
            wait_for(router)
            yield router
        finally:
            end(process)


def wait_for(router: Router) -> None:
    ends_at = time.monotonic() + _STARTS_WITHIN_S
    while time.monotonic() < ends_at and router.process.poll() is None:
        try:
            if httpx2.get(f"http://127.0.0.1:{router.port}/readiness", timeout=5).is_success:
                return
        except httpx2.HTTPError:
            pass
        time.sleep(0.2)
    raise RuntimeError("the router did not start")


def kill_workers(workers: Workers, router: Router, expected: list[str], count: int) -> dict[str, Any]:
    rng = random.Random(0)
    asked_of = {"whole": 0, "streamed": 0}
    failed = {"whole": 0, "streamed": 0}
    wrong, back = 0, []
    for _ in range(count):
        victim = rng.randrange(len(workers))
        with ThreadPoolExecutor(8) as pool:
            numbers = [rng.randrange(REQUESTS) for _ in range(8)]
            kinds = ["whole" if at % 2 else "streamed" for at in range(8)]
            asked = [
                pool.submit(answer if kind == "whole" else streamed, router, number)
                for kind, number in zip(kinds, numbers, strict=True)
            ]
            time.sleep(rng.uniform(0.2, 1.5))
            workers[victim].process.kill()
            workers[victim].process.wait()
            began = time.perf_counter()
            workers.start_again(victim)
            back.append(round(time.perf_counter() - began, 1))
            for one, kind, number in zip(asked, kinds, numbers, strict=True):
                asked_of[kind] += 1
                try:
                    wrong += one.result() != expected[number]
                except (httpx2.HTTPError, AssertionError, ValueError) as error:
                    print(f"failed, {kind}: {error!r}", flush=True)
                    failed[kind] += 1
        print(f"killed one; started again after {back[-1]} s", flush=True)
    return {
        "kills": count,
        "requests": asked_of,
        "failed": failed,
        "other_texts": wrong,
        "started_again_s": back,
    }


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
