"""Whether a server's memory stays flat: light mixed traffic over a real socket, sampled for as long as asked.

    python -m benchmarks.soak --minutes 60
    python -m benchmarks.soak --plot RESULT.json --out docs/soak.svg

Clients ask for chats, streams, gaps, edits, decisions, schemas, responses and messages, each text new; some
leave in the middle, some send what is refused. Every ten seconds the memory, threads and open files of the
server and of its processes are noted. The slope is that of a line through the means of ten parts of the
curve after the warm-up, with Student's interval. It is flat if the interval's upper end is below a limit.
Bounds of caches are set low, so that they are full before the warm-up ends: by flags, and by a variable of
oneDNN, which keeps up to 1,024 compiled products of about 1 MB each where the processor has AMX. What decides
is resident memory: the share of a page (PSS) changes with what other processes of the machine map.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from scipy import stats

from benchmarks import record
from benchmarks.load_client import CHAT, COMPLETIONS, HOST, Leaving, ask
from benchmarks.load_server import Served, served
from benchmarks.load_traffic import MODEL, make_mixed_pool

EVERY_S = 10.0
LIMIT_MB_PER_HOUR = 8.0
PARTS = 10
FLAGS = (
    "--max-num-seqs", "4", "--max-stored-responses", "40", "--compile-timeout", "5",
    "--request-timeout", "30", "--traces",
)  # fmt: skip
CAPACITY = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
BROKEN = (b"POST / HTTP/1.1\r\nhost: localhost\r\n", b"\x16\x03\x01\x00", b"GET /\r\n\r\n")
Request = tuple[str, dict[str, Any]]


def image() -> str:
    from PIL import Image

    with io.BytesIO() as file:
        Image.new("RGB", (64, 64), (200, 30, 30)).save(file, "PNG")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def requests(seed: int) -> Iterator[Request]:
    """Without end; no text comes twice."""
    picture = image()
    for round_ in itertools.count():
        rng = random.Random(seed + round_)
        good = [(one.path, one.body) for one in make_mixed_pool(seed + round_, 20, most_steps=8)]
        word = f"{rng.getrandbits(40):x}"
        said = [{"role": "user", "content": f"What is {word}?"}]
        short = {"model": MODEL, "max_tokens": 32, "max_denoising_steps": 4}
        several: list[Request] = [
            ("/v1/responses", {"model": MODEL, "input": f"What is {word}?", "max_output_tokens": 32}),
            ("/v1/messages", {"model": MODEL, "max_tokens": 32, "messages": said, "stream": True}),
            ("/tokenize", {"model": MODEL, "prompt": word * 50}),
            (CHAT, {**short, "messages": said, "diffusing": True, "stream": True, "n": 2}),
            (CHAT, {**short, "messages": said, "regex": f"[a-z]{{3,9}} {word}"}),
            (CHAT, {**short, "messages": said, "logprobs": True, "top_logprobs": 2}),
        ]
        refused: list[Request] = [
            (CHAT, {"model": MODEL, "messages": [{"role": word, "content": 3}]}),
            (CHAT, {"model": word, "messages": said}),
            (CHAT, {**short, "messages": said, "regex": f"({word}"}),
            (CHAT, {**short, "messages": said, "regex": f"(a|b)*a(a|b){{{rng.randint(20, 4000)}}}"}),
            (CHAT, {**short, "messages": said, "json_schema": {"type": word}}),
            (CHAT, {**short, "messages": [{"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": picture}}]}]}),
            (COMPLETIONS, {"model": MODEL, "prompt": "word " * rng.randint(3000, 20_000)}),
            (f"/v1/{word}", {}),
        ]  # fmt: skip
        mixed = [*good, *several, *refused]
        rng.shuffle(mixed)
        yield from mixed


def leaving(rng: random.Random) -> Leaving | None:
    if rng.random() < 0.75:
        return None
    return Leaving(rng.uniform(0.01, 2.0), after_events=rng.choice((None, 1, 3)), abruptly=rng.random() < 0.5)


async def broken_request(port: int, rng: random.Random) -> None:
    """Bytes that are no request, or a head without its end."""
    with suppress(OSError):
        _, writer = await asyncio.open_connection(HOST, port)
        writer.write(rng.choice(BROKEN))
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()


async def client(port: int, seed: int, every_s: float, ends_at: float, counts: Counter[str]) -> None:
    rng = random.Random(seed)
    for number, (path, body) in enumerate(requests(1000 * seed)):
        if time.monotonic() > ends_at:
            return
        if number % 20 == 0:
            await broken_request(port, rng)
        reply = await ask(port, path, body, leaving=leaving(rng))
        outcome = "left" if reply.has_left else str(reply.status or reply.failure)
        counts[f"{path if reply.status != 404 else 'unknown'} {outcome}"] += 1
        await asyncio.sleep(rng.uniform(0, 2 * every_s))


def sample(process: psutil.Process) -> dict[str, float]:
    """Of the server and all that it started. Shared pages count once in the sum of PSS."""
    found: Counter[str] = Counter()
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            memory = one.memory_full_info()
            found += Counter(
                rss_mb=memory.rss / 1e6, pss_mb=memory.pss / 1e6, threads=one.num_threads(),
                files=one.num_fds(), processes=1,
            )  # fmt: skip
    return {name: round(value, 2) for name, value in found.items()}


async def watch(server: Served, ends_at: float) -> list[dict[str, float]]:
    process, began = psutil.Process(server.process.pid), time.monotonic()
    curve = []
    while (now := time.monotonic()) < ends_at and server.process.poll() is None:
        curve.append({"at_s": round(now - began, 1)} | await asyncio.to_thread(sample, process))
        if len(curve) % 6 == 1:
            print(json.dumps(curve[-1]), flush=True)
        await asyncio.sleep(EVERY_S)
    return curve


def slope(curve: Sequence[dict[str, float]], name: str, warm_up_s: float) -> dict[str, float]:
    """Per hour, and its 95 % interval. Neighbouring samples resemble each other; means of parts do less."""
    warm = [point for point in curve if point["at_s"] >= warm_up_s]
    size = len(warm) // PARTS
    if size == 0:
        raise SystemExit(
            f"{len(warm)} samples after the warm-up; {PARTS} are the least. Give more --minutes."
        )
    parts = [warm[begin : begin + size] for begin in range(len(warm) % PARTS, len(warm), size)]
    hours = [statistics.fmean(point["at_s"] for point in part) / 3600 for part in parts]
    if len({point[name] for point in warm}) == 1:
        return {"per_hour": 0.0, "low": 0.0, "high": 0.0}
    fit = stats.linregress(hours, [statistics.fmean(point[name] for point in part) for part in parts])
    margin = float(stats.t.ppf(0.975, len(parts) - 2) * fit.stderr)
    per_hour = float(fit.slope)
    return {
        "per_hour": round(per_hour, 3),
        "low": round(per_hour - margin, 3),
        "high": round(per_hour + margin, 3),
    }


async def check(server: Served) -> None:
    """A server that started without what it needs would be watched refusing."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    reply = await ask(server.port, CHAT, body)
    if reply.status != 200:
        raise SystemExit(f"the server answers no chat: {reply.status} {reply.body.decode()[:500]}")


async def run(server: Served, args: argparse.Namespace) -> dict[str, Any]:
    await check(server)
    counts: Counter[str] = Counter()
    ends_at = time.monotonic() + 60 * args.minutes
    clients = [
        asyncio.create_task(client(server.port, seed + 1, args.every, ends_at, counts))
        for seed in range(args.clients)
    ]
    curve = await watch(server, ends_at)
    _, late = await asyncio.wait(clients, timeout=60)  # a starved server answers late
    for one in late:
        one.cancel()
    warm_up_s = 60 * args.warm_up
    slopes = {name: slope(curve, name, warm_up_s) for name in ("rss_mb", "pss_mb", "threads", "files")}
    return {
        "minutes": args.minutes,
        "unanswered_at_the_end": len(late),
        "warm_up_minutes": args.warm_up,
        "flags": FLAGS,
        "exact": args.exact,
        "onednn_primitive_cache_capacity": os.environ[CAPACITY],
        "requests": sum(counts.values()),
        "outcomes": dict(sorted(counts.items())),
        "server_errors": sum(entry.get("level") == "error" for entry in server.entries()),
        "is_alive": server.process.poll() is None,
        "in_use_after": await server.at_rest(),
        "slope": slopes,
        "limit_mb_per_hour": LIMIT_MB_PER_HOUR,
        "is_flat": slopes["rss_mb"]["high"] <= LIMIT_MB_PER_HOUR,
        "curve": curve,
    }


def plot(result: Path, out: Path) -> None:
    from benchmarks.figures import Panel, Series, draw
    from dgemma.training.curves import BLUE, GREEN, ORANGE, write_figure

    found = json.loads(result.read_text())
    minutes = [point["at_s"] / 60 for point in found["curve"]]

    def series(name: str, field: str, colour: str) -> Series:
        points = list(zip(minutes, (point[field] for point in found["curve"]), strict=True))
        return Series(name=name, points=points, colour=colour)

    high = max(point["rss_mb"] for point in found["curve"])
    panels = [
        Panel(
            title="Memory of the server's processes, MB", x_label="minutes", y_label="MB",
            series=[series("resident", "rss_mb", BLUE), series("proportional", "pss_mb", GREEN)],
            y_range=(0, 1.1 * high),
        ),
        Panel(
            title="Threads and open files", x_label="minutes", y_label="number",
            series=[series("threads", "threads", BLUE), series("files", "files", ORANGE)],
        ),
    ]  # fmt: skip
    fitted = found["slope"]["rss_mb"]
    note = (
        f"{found['requests']:,} requests; after {found['warm_up_minutes']:g} minutes "
        f"{fitted['per_hour']:+.1f} MB per hour (95 %: {fitted['low']:+.1f} to {fitted['high']:+.1f})"
    )
    write_figure(draw(panels, heading=f"{found['minutes']:g} minutes of mixed requests", note=note), out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--warm-up", type=float, default=15.0, help="minutes that the slope leaves out")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--every", type=float, default=1.0, help="mean seconds between a client's requests")
    parser.add_argument("--exact", action="store_true", help="products of few shapes: oneDNN keeps few")
    parser.add_argument("--plot", type=Path, metavar="RESULT", help="draw a result file, and end")
    parser.add_argument("--out", type=Path, default=Path("docs/soak.svg"))
    args = parser.parse_args()
    if args.plot:
        plot(args.plot, args.out)
        return
    os.environ.setdefault(CAPACITY, "64")
    with served(FLAGS, threads=1, exact=args.exact, starts_within_s=600.0) as server:
        record.write("soak", asyncio.run(run(server, args)), "-exact" if args.exact else "")


if __name__ == "__main__":
    main()
