"""From one replica to a thousand, simulated: latencies, prefixes, failures, and what a router must remember.

    python -m benchmarks.fleets                      (20 minutes of one core)

DGX Sparks by the cost model: conversations of four turns whose system prompts are shared by Zipf's law, few
of them for each replica, and almost as many as it can take. The last fleet, of a thousand, is simulated for
an hour of its time.
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks import record
from dgemma.plan.fleet import Fleet, simulate
from dgemma.plan.hardware import Hardware, predicted_shape
from dgemma.plan.traffic import Traffic
from dgemma.scale.autoscaling import AutoscalingRule
from dgemma.scale.prefix_routes import PrefixRoutes

SIZES = (1, 2, 4, 16, 64, 256)
LARGEST = 1000
RATE_EACH = 0.1
# A replica takes between 1.5 and 2.5 of these requests in a second: with 2.5 the queue grows without end.
BUSY_EACH, BUSY_SIZES = 1.5, (1, 2, 4, 16, 64)
SHAPE = predicted_shape(Hardware.parse("dgx-spark"), "nvfp4", max_len=16_384, block_size=64)
TRAFFIC = Traffic(
    rate=RATE_EACH, prompt=800, answer=256, shared=500, system_prompts=200, turns=4, think_s=20
)  # fmt: skip
FAILING = {"mean_life_s": 6 * 3600.0, "start_s": 120.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--largest", type=int, default=LARGEST, help="replicas of the last fleet")
    parser.add_argument("--hours", type=float, default=1.0, help="of the last fleet")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one, or these")
    parser.add_argument("--suffix", default="", help="of the result file's name")
    args = parser.parse_args()
    gc.disable()  # nothing here is a cycle worth looking for
    found: dict[str, Any] = {"device": "dgx-spark"}
    for name in args.part or PARTS:
        found[name] = PARTS[name](args.largest, args.hours)
    record.write("fleets", found, args.suffix)


def sizes(rate: float, counts: Sequence[int]) -> list[dict[str, Any]]:
    return [
        run(Fleet(shape=SHAPE, replicas=count, routing=routing), 600.0, rate)
        for count in counts
        for routing in ("prefix", "load", "random")
    ]


def imbalances() -> list[dict[str, Any]]:
    """How many more requests the replica with the prefix may run. 1: hardly any."""
    long = replace(TRAFFIC, prompt=6000, shared=5000)
    return [
        {"imbalance": most, "prompt": traffic.prompt, **run(fleet, 300.0, rate, traffic)}
        for traffic, rate in ((TRAFFIC, RATE_EACH), (TRAFFIC, BUSY_EACH), (long, 0.5), (long, 0.9))
        for most in (1, 2, 3, 4, 8)
        for fleet in [Fleet(shape=SHAPE, replicas=16, imbalance=most)]
    ]


def router_memory(replicas: int) -> list[dict[str, Any]]:
    fleet = Fleet(shape=SHAPE, replicas=replicas, **FAILING)
    return [
        {"blocks": blocks, **run(replace(fleet, router_blocks=blocks), 300.0)}
        for blocks in (2_000, 20_000, 200_000)
    ]


def run(
    fleet: Fleet, duration_s: float, rate_each: float = RATE_EACH, traffic: Traffic = TRAFFIC
) -> dict[str, Any]:
    began = time.perf_counter()
    traffic = replace(traffic, rate=rate_each * fleet.replicas)
    found = simulate(fleet, traffic, duration_s=duration_s, warm_up_s=min(duration_s / 5, 120.0))
    row = {
        "replicas": fleet.replicas,
        "routing": fleet.routing,
        "requests_per_s_of_each": rate_each,
        "simulated_s": duration_s,
        "requests": found.finished,
        "unfinished": found.unfinished,
        "failures": found.failures,
        "retried": found.retried,
        "p50_s": round(found.quantile(0.5), 3),
        "p99_s": round(found.quantile(0.99), 3),
        "utilisation": round(found.utilisation, 3),
        "prefix_hit_share": round(found.hit_share, 4),
        "seconds": round(time.perf_counter() - began, 1),
    }
    print(row, flush=True)
    gc.collect()
    return row


def cold(start_s: float) -> dict[str, Any]:
    """Four times as many requests come as the first replicas can take, from one moment to the next."""
    rule = AutoscalingRule(min_replicas=8, max_replicas=64)
    fleet = Fleet(shape=SHAPE, replicas=8, autoscaling=rule, start_s=start_s)
    found = simulate(fleet, replace(TRAFFIC, rate=4 * BUSY_EACH * 8), duration_s=600.0)
    row = {
        "start_s": start_s,
        "requests": found.finished,
        "unfinished": found.unfinished,
        "p50_s": round(found.quantile(0.5), 3),
        "p99_s": round(found.quantile(0.99), 3),
        "most_replicas": max(count for _, count in found.num_replicas),
    }
    print(row, flush=True)
    gc.collect()
    return row


def router_bytes_per_block(blocks: int = 50_000) -> int:
    """Each known to be on eight replicas, the most that are remembered."""
    tracemalloc.start()
    routes: PrefixRoutes[int] = PrefixRoutes(blocks=blocks)
    for number in range(blocks):
        for replica in range(8):
            routes.sent([number.to_bytes(16, "little")], replica)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(routes) == blocks
    return held // blocks


def choose_us(count: int) -> dict[str, Any]:
    """Microseconds of a choice among `count` replicas, each of which has seen the system prompts."""
    routes: PrefixRoutes[int] = PrefixRoutes()
    loads = dict.fromkeys(range(count), 0)
    replicas = list(loads)
    prompts = [[bytes([prompt, block]) for block in range(12)] for prompt in range(200)]
    for number in range(20 * count):
        routes.sent(prompts[number % 200], number % count)
    began = time.perf_counter()
    for number in range(5000):
        routes.sent(prompts[number % 200], routes.choose(prompts[number % 200], loads, replicas))
    return {"replicas": count, "microseconds": round(1e6 * (time.perf_counter() - began) / 5000, 1)}


# By their names in the result file.
PARTS: dict[str, Callable[[int, float], Any]] = {
    "choices": lambda largest, _: [choose_us(count) for count in (2, 64, largest)],
    "router_bytes_per_block": lambda *_: router_bytes_per_block(),
    "sizes": lambda *_: sizes(RATE_EACH, SIZES),
    "busy_sizes": lambda *_: sizes(BUSY_EACH, BUSY_SIZES),
    "imbalances": lambda *_: imbalances(),
    "cold_starts": lambda *_: [cold(start_s) for start_s in (10.0, 60.0, 300.0)],
    "router_memory": lambda largest, _: router_memory(largest),
    "largest": lambda largest, hours: run(Fleet(shape=SHAPE, replicas=largest, **FAILING), 3600 * hours),
}

if __name__ == "__main__":
    main()
