"""The planner against the real server: the same requests at the same times, simulated and answered.

    python -m benchmarks.plan_check                  (8 minutes alone on two cores)

How long steps take is measured first at the server itself, with 1 to 16 clients that always have a request
under way; how many steps each canvas takes, with one request at a time. Three loads are then sent over a
socket in a Poisson process, and simulated with the same arrivals.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import httpx2

import dgemma
from benchmarks import record
from benchmarks.load_server import MODEL, Served, served
from dgemma.bench.server_bench import LoadPlan, percentile, run_server_bench
from dgemma.plan.fleet import Fleet, LoadResult, simulate
from dgemma.plan.hardware import shape_of
from dgemma.plan.measure import ROWS
from dgemma.plan.step_times import MeasuredTimes
from dgemma.plan.traffic import Arrivals, Dialogue, Traffic, TrafficRequest
from recipes.english.scenes import make_scene

SHARES = (0.3, 0.6, 0.85)  # of what one request after another would fill
REQUESTS = 150
PROMPTS = 40
TOKENS = 64
SEED = 7
_SECONDS_EACH = 20.0
_CACHE_BYTES = 8_000_000_000


@dataclass(frozen=True)
class Asked:
    """What one of the prompts makes of the server."""

    prompt: int
    tokens: int
    steps: tuple[int, ...]


class SameArrivals(Arrivals):
    def __init__(self, plan: LoadPlan, rate: float, asked: list[Asked]) -> None:
        self._plan, self._rate, self._asked = plan, rate, asked

    def beginnings(self) -> Iterator[TrafficRequest]:
        for number, at in enumerate(self._plan.arrivals(self._rate)):
            kind = self._asked[number % len(self._asked)]
            told = Dialogue(number % len(self._asked), [], 0)
            yield TrafficRequest(told, [told.number] * kind.prompt, kind.tokens, at, steps=list(kind.steps))

    def next_turn(self, before: TrafficRequest, at: float) -> TrafficRequest | None:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--suffix", default="", help="of the result file's name")
    args = parser.parse_args()
    lm = dgemma.load("bundled:text")
    with served(threads=1, exact=False) as server:
        prompts = [" ".join(make_scene(n, seed=SEED).text.split()[:20]) for n in range(PROMPTS)]
        asked = [ask(server, prompt) for prompt in prompts]
        times = calibrate(server, prompts)
        shape = shape_of(
            times, lm.config, cache_bytes=_CACHE_BYTES, max_len=2048, max_num_seqs=16, block_size=32
        )
        alone_s = sum(sum(kind.steps) for kind in asked) / len(asked) * times.seconds(1, 0, 0)
        rows = []
        for share in SHARES:
            rate = share * _gain(times) / alone_s
            plan = LoadPlan(
                url=f"http://127.0.0.1:{server.port}", model=MODEL, rates=(rate,), requests=REQUESTS,
                max_tokens=TOKENS, prompts=tuple(prompts), chat=False, extra={"seed": SEED},
            )  # fmt: skip
            (real,) = run_server_bench(plan, print)["loads"]
            last = plan.arrivals(rate)[-1]
            found = simulate(
                Fleet(shape=shape, replicas=1),
                Traffic(rate=rate),
                duration_s=last,
                arrivals=SameArrivals(plan, rate, asked),
            )
            rows.append({"share": share, "rate": round(rate, 3), **compared(real, found)})
            print(rows[-1], flush=True)
    record.write(
        "plan_check",
        {
            "model": "bundled:text", "requests": REQUESTS, "prompts": PROMPTS, "max_tokens": TOKENS,
            "mean_steps_of_an_answer": sum(sum(kind.steps) for kind in asked) / len(asked),
            "times": asdict(times), "loads": rows,
        },
        args.suffix,
    )  # fmt: skip


def calibrate(server: Served, prompts: list[str]) -> MeasuredTimes:
    """Seconds of a step by the canvases in it, all that a server does beside it included."""
    pairs = []
    for count in ROWS:
        ends = time.perf_counter() + _SECONDS_EACH
        with ThreadPoolExecutor(count) as pool:

            def client(first: int, ends: float = ends) -> None:
                number = first
                while time.perf_counter() < ends:
                    ask(server, prompts[number % len(prompts)])
                    number += 7

            clients = [pool.submit(client, number) for number in range(count)]
            time.sleep(2.0)
            began, before = time.perf_counter(), counters(server)
            time.sleep(max(0.0, ends - began))
            seconds, after = time.perf_counter() - began, counters(server)
            for one in clients:
                one.result()
        steps = after["steps"] - before["steps"]
        rows = (after["denoise_forwards"] - before["denoise_forwards"]) / steps
        pairs.append((rows, seconds / steps))
        print(f"{count} clients: {rows:.2f} canvases in a step of {seconds / steps:.4f} s", flush=True)
    return MeasuredTimes(pairs, encode_s=0.0, token_s=0.0)


def counters(server: Served) -> dict[str, float]:
    text = httpx2.get(f"http://127.0.0.1:{server.port}/metrics", timeout=60).text
    names = {"steps": "dgemma_engine_steps_total", "denoise_forwards": "dgemma_engine_denoise_forwards_total"}
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    found = {name: float(value) for name, value, *_ in lines}
    return {name: found[full] for name, full in names.items()}


def _gain(times: Any) -> float:
    """How much more sixteen canvases do in a second than one."""
    return float(16 * times.seconds(1, 0, 0) / times.seconds(16, 0, 0))


def ask(server: Served, prompt: str) -> Asked:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "seed": SEED}
    found = httpx2.post(f"http://127.0.0.1:{server.port}/v1/completions", json=body, timeout=300)
    reply = found.raise_for_status().json()
    usage, steps = reply["usage"], reply["choices"][0]["dgemma"]["steps"]
    return Asked(usage["prompt_tokens"], usage["completion_tokens"], tuple(steps))


def compared(real: dict[str, Any], found: LoadResult) -> dict[str, Any]:
    rows: dict[str, Any] = {"answered": real["ok"], "simulated": found.finished}
    pairs = {
        "p50_s": (real["end_to_end_s"]["p50"], percentile(list(found.answer_s), 50)),
        "p99_s": (real["end_to_end_s"]["p99"], percentile(list(found.answer_s), 99)),
        "first_text_p50_s": (real["first_text_s"]["p50"], percentile(list(found.first_text_s), 50)),
        "tokens_per_s": (real["output_tokens"] / real["busy_s"], found.tokens / found.ended_s),
    }
    for name, (measured, simulated) in pairs.items():
        rows[name] = {
            "measured": round(measured, 3),
            "simulated": round(simulated, 3),
            "ratio": round(simulated / measured, 3),
        }
    return rows


if __name__ == "__main__":
    main()
