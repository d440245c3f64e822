"""Goodput of `dgemma serve` for 1, 4 and 16 clients, by default and exact, by `dgemma bench --server`.

    python -m benchmarks.server_goodput              (--requests N; --rounds N; --latency-target S)

One client asks when its last answer has come: that is one after another. The two servers are measured in
turn, round by round. 64 tokens of the bundled text model, with the options a client gets without asking.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks import record
from benchmarks.load_server import served
from dgemma.bench.server_bench import LoadPlan, run_server_bench
from dgemma.bench.timing import spread

CLIENTS = (1, 4, 16)
SERVERS = {"default": False, "exact": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency-target", type=float, default=20.0)
    args = parser.parse_args()
    loads: dict[str, dict[int, list[dict[str, Any]]]] = {name: {n: [] for n in CLIENTS} for name in SERVERS}
    for _ in range(args.rounds):
        for name, exact in SERVERS.items():
            with served(exact=exact) as server:
                plan = LoadPlan(
                    url=f"http://127.0.0.1:{server.port}", rates=(), concurrency=CLIENTS,
                    requests=args.requests, latency_target_s=args.latency_target,
                )  # fmt: skip
                for load in run_server_bench(plan, print)["loads"]:
                    loads[name][load["clients"]].append(load)
    findings: dict[str, Any] = {"requests": args.requests, "latency_target_s": args.latency_target}
    for name, by_clients in loads.items():
        alone = [load["goodput_per_s"] for load in by_clients[1]]
        for clients, found in by_clients.items():
            goodput = [load["goodput_per_s"] for load in found]
            findings[f"{name}, {clients} clients"] = {
                "goodput_per_s": spread(goodput),
                "times_one_after_another": spread([a / b for a, b in zip(goodput, alone, strict=True)]),
                "first_text_p50_s": spread([load["first_text_s"]["p50"] for load in found]),
                "first_text_p99_s": spread([load["first_text_s"]["p99"] for load in found]),
                "end_p99_s": spread([load["end_to_end_s"]["p99"] for load in found]),
                "lost": sum(load["lost"] for load in found),
            }
    findings["exact costs"] = {
        f"{n} clients": spread(
            [
                a["goodput_per_s"] / b["goodput_per_s"]
                for a, b in zip(loads["default"][n], loads["exact"][n], strict=True)
            ]
        )
        for n in CLIENTS
    }
    record.write("server_goodput", findings)


if __name__ == "__main__":
    main()
