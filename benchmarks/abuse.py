"""Abuse of a real server through raw sockets and hostile bodies, with `/health` asked throughout.

    python -m benchmarks.abuse [--seconds N]

A server of the bundled text model, in a process of its own on this machine. Each part runs for some seconds
beside a process that asks `/health` ten times a second on a new connection: its latencies, and those that
got no answer. idle: 500 silent connections. slowloris: 200 heads that arrive byte by byte. heads: heads that
never end. bodies: 40 bodies of 8 MB, held before their last byte. prompts: 8 clients with prompts of 8 MB.
formats: 16 hostile regular expressions, and how long an honest schema takes beside them, and alone.
prefixes: what a key learns of another key's prompts from `cached_tokens`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from benchmarks import record
from benchmarks.load_client import CHAT, COMPLETIONS, HOST, ask
from benchmarks.load_health import watched_health
from benchmarks.load_server import Served, bearer, two_keys
from benchmarks.load_traffic import MODEL

POST = (
    f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    f"authorization: {bearer('bad')['authorization']}\r\n"
)
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "integer"} for name in ("year", "month", "day")},
    "required": ["year", "month", "day"],
}
# Determinizing it takes exponential time in its length; the number makes each one new.
HOSTILE = "(a|b)*a(a|b){{{0}}}|" + "(x|y|z)*x(x|y|z){{{0}}}"


async def connect(server: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(HOST, server.port)


async def idle(server: Served, ends: float) -> dict[str, Any]:
    """Silent connections, opened again a second after they are closed."""

    async def one() -> None:
        while time.monotonic() < ends:
            with suppress(OSError):
                reader, writer = await connect(server)
                with suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(1), ends - time.monotonic())
                writer.close()
            await asyncio.sleep(1)

    await asyncio.gather(*(one() for _ in range(500)))
    return {"connections": 500}


async def slowloris(server: Served, ends: float) -> dict[str, Any]:
    async def one() -> None:
        while time.monotonic() < ends:
            with suppress(OSError):
                _, writer = await connect(server)
                for byte in b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-slow: " + b"y" * 1000:
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(0.1)
                    if time.monotonic() > ends:
                        break
                writer.close()

    await asyncio.gather(*(one() for _ in range(200)))
    return {"connections": 200}


async def heads(server: Served, ends: float) -> dict[str, Any]:
    refused = 0

    async def one() -> None:
        nonlocal refused
        while time.monotonic() < ends:
            with suppress(OSError):
                reader, writer = await connect(server)
                for _ in range(100):
                    writer.write(b"x: " + b"y" * 10_000 + b"\r\n" if _ else b"GET / HTTP/1.1\r\n")
                    await writer.drain()
                refused += (await reader.read(12)).endswith(b"431")
                writer.close()

    await asyncio.gather(*(one() for _ in range(8)))
    return {"refused_with_431": refused}


async def bodies(server: Served, ends: float) -> dict[str, Any]:
    before = server.rss_mb()
    peak = before

    async def one() -> None:
        nonlocal peak
        with suppress(OSError):
            _, writer = await connect(server)
            writer.write(f"{POST}content-length: {8 << 20}\r\n\r\n".encode() + b" " * ((8 << 20) - 1))
            with suppress(TimeoutError):
                await asyncio.wait_for(writer.drain(), max(0.1, ends - time.monotonic()))
            while time.monotonic() < ends:
                peak = max(peak, server.rss_mb())
                await asyncio.sleep(0.2)
            writer.close()

    await asyncio.gather(*(one() for _ in range(40)))
    return {"bodies": 40, "rss_mb_before": round(before), "rss_mb_peak": round(peak)}


async def prompts(server: Served, ends: float) -> dict[str, Any]:
    content = "word " * ((8 << 20) // 5 - 100)
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 8}
    seconds: list[float] = []
    statuses: set[int | None] = set()

    async def one() -> None:
        while time.monotonic() < ends:
            reply = await ask(server.port, CHAT, body, headers=bearer("bad"))
            seconds.append(reply.seconds)
            statuses.add(reply.status)

    await asyncio.gather(*(one() for _ in range(8)))
    return {"requests": len(seconds), "statuses": sorted(map(str, statuses)), "max_s": round(max(seconds), 2)}


async def formats(server: Served, ends: float) -> dict[str, Any]:
    """Hostile regular expressions of one key; a schema of another key, and one of the same."""

    async def honest(key: str, number: int) -> float:
        schema = {**SCHEMA, "title": f"{key} {number}"}  # a new one, not compiled before
        body = {"model": MODEL, "messages": [{"role": "user", "content": "A date."}], "json_schema": schema,
                "max_tokens": 32, "max_denoising_steps": 1}  # fmt: skip
        reply = await ask(server.port, CHAT, body, headers=bearer(key))
        assert reply.status == 200, reply.body[:200]
        return reply.seconds

    async def hostile(number: int) -> str:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}],
                "regex": HOSTILE.format(20 + number % 7) + str(number)}  # fmt: skip
        return str((await ask(server.port, CHAT, body, headers=bearer("bad"))).status)

    await honest("good", -1)
    alone = [await honest("good", number) for number in range(5)]
    memory = server.rss_mb()
    attack = [asyncio.create_task(hostile(number)) for number in range(16)]
    await asyncio.sleep(0.5)
    other, same, peak = list[float](), list[float](), memory
    for number in range(4):
        other.append(await honest("good", 100 + number))
        same.append(await honest("bad", 100 + number))
        peak = max(peak, server.rss_mb())
    statuses = await asyncio.gather(*attack)
    return {
        "honest_alone_s": [round(seconds, 2) for seconds in alone],
        "honest_of_another_key_s": [round(seconds, 2) for seconds in other],
        "honest_of_the_same_key_s": [round(seconds, 2) for seconds in same],
        "hostile_statuses": {status: statuses.count(status) for status in sorted(set(statuses))},
        "rss_mb_before": round(memory),
        "rss_mb_beside": round(peak),
    }


async def prefixes(server: Served, ends: float) -> dict[str, Any]:
    """What `cached_tokens` says to a key that guesses another key's whole prompt, and to that key itself."""
    found: dict[str, list[int]] = {"bad": [], "good": []}
    for secret in ("seventeen", "forty-two", "eighty-six"):
        prompt = (
            f"The code is {secret}. " + "The weather report of the harbour town, as it was read out. " * 5
        )
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "max_denoising_steps": 1}
        for key in ("good", "bad", "good"):
            reply = await ask(server.port, COMPLETIONS, body, headers=bearer(key))
            found[key].append(json.loads(reply.body)["usage"]["prompt_tokens_details"]["cached_tokens"])
    return {"cached_tokens_of_another_key": found["bad"], "of_its_own": found["good"][1::2]}


PARTS: dict[str, Callable[[Served, float], Coroutine[Any, Any, dict[str, Any]]]] = {
    "idle": idle, "slowloris": slowloris, "heads": heads, "bodies": bodies, "prompts": prompts,
    "formats": formats, "prefixes": prefixes,
}  # fmt: skip


async def run(server: Served, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, part in PARTS.items():
        with watched_health(server.port) as health:
            await asyncio.sleep(1)  # until the watcher has started
            result = await part(server, time.monotonic() + seconds)
        found[name] = {**result, "health": health}
        print(name, json.dumps(found[name]), flush=True)
    found["log_lines"] = len(server.entries())
    found["server_errors"] = sum(entry.get("level") == "error" for entry in server.entries())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="of each part")
    args = parser.parse_args()
    with two_keys(["--max-connections", "128"], threads=1) as server:
        found = asyncio.run(run(server, args.seconds))
    record.write("abuse", found)


if __name__ == "__main__":
    main()
