"""How fast a server answers `/health`, asked from a process of its own.

A client that shares its event loop with those that attack the server measures its own delays. This one has
nothing else to do:

    python -m benchmarks.load_health PORT          (until its standard input ends; then the figures, as JSON)
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.load_client import ask
from dgemma.bench.server_bench import percentile

EVERY_S = 0.1
PATIENCE_S = 10.0


@contextmanager
def watched_health(port: int) -> Iterator[dict[str, Any]]:
    """Ask while the block runs. The figures are in the dictionary after it."""
    found: dict[str, Any] = {}
    watcher = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.load_health", str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
    )
    try:
        yield found
    finally:
        said, _ = watcher.communicate()
        found.update(json.loads(said))


async def watch(port: int) -> dict[str, Any]:
    """Asked until the standard input ends: latencies in milliseconds, and what was no answer."""
    milliseconds: list[float] = []
    failures: list[str] = []
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.buffer.read))
    while not ended.done():
        began = time.perf_counter()
        try:
            async with asyncio.timeout(PATIENCE_S):
                reply = await ask(port, "/health")
            failure = reply.failure if reply.status is None else f"status {reply.status}"
        except TimeoutError:
            reply, failure = None, f"nothing for {PATIENCE_S:g} s"
        if reply is not None and reply.status == 200:
            milliseconds.append(1e3 * (time.perf_counter() - began))
        else:
            failures.append(str(failure))
        await asyncio.wait([ended], timeout=EVERY_S)
    found: dict[str, Any] = {
        "asked": len(milliseconds) + len(failures),
        "unanswered": len(failures),
        "first_failures": failures[:3],
    }
    if milliseconds:
        found |= {
            "median_ms": round(statistics.median(milliseconds), 1),
            "p99_ms": round(percentile(milliseconds, 99), 1),
            "max_ms": round(max(milliseconds), 1),
            "above_100_ms": sum(value > 100 for value in milliseconds),
        }
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(watch(int(sys.argv[1])))))
