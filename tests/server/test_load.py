"""A real server under more load than it can bear, with requests that fail inside it, and at its end.

The long version, with latencies and memory, is `python -m benchmarks.server_load`.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import load_client, load_faults
from benchmarks.load_client import Reply
from benchmarks.load_faults import Alone, answers_alone, drain_one
from benchmarks.load_server import Served, served
from benchmarks.load_traffic import MODEL, Ask, make_pool
from benchmarks.server_load import OVERLOAD, Calm, Setup, overload

CLIENTS = 18
SETUP = Setup(slots=3, queue_len=2, threads=1, seed=5, pool=10, most_steps=4)
DRAIN_WITHIN_S = 300.0
NEWCOMER = {"model": MODEL, "messages": []}  # of `drain_one`, behind its signal


@pytest.fixture(scope="module")
def life() -> dict[str, Any]:
    """One server from its start to its end, and what its clients saw."""
    return asyncio.run(lived())


async def lived() -> dict[str, Any]:
    pool = make_pool(SETUP.seed, SETUP.pool, most_steps=SETUP.most_steps)
    flags = [*SETUP.flags, "--drain-timeout", str(DRAIN_WITHIN_S)]
    found: dict[str, Any] = {}
    with served(flags, threads=SETUP.threads, poisoned=True) as server:
        alone, replies = await answers_alone(server, pool)
        calm = Calm.of(pool, alone, replies)
        # About that: slots share what they read of the weights.
        calm.per_s = 2 / statistics.mean(calm.seconds.values())
        # By their number: on a busy machine a fixed time has too few clients for an overload.
        setup = replace(SETUP, minutes=CLIENTS / (OVERLOAD * calm.per_s) / 60)
        # Once more, if we had no time ourselves to send so much.
        found["loads"] = [await overload(server, pool, calm, setup)]
        while not is_overload(found["loads"][-1]) and len(found["loads"]) < 5:
            found["loads"].append(await overload(server, pool, calm, setup))
        found["failures_before_poison"] = [e for e in server.entries() if "failure" in e]
        found["poison"] = await load_faults.poison(server, pool, alone, company=2, rounds=1)
        rng = random.Random(SETUP.seed)
        found["drains"] = [await drained(server, pool, alone, rng)]
    while not found["drains"][-1]["open"] and len(found["drains"]) < 5:  # the signal came too late
        with served(flags, threads=SETUP.threads) as server:
            found["drains"].append(await drained(server, pool, alone, rng))
    return found


def is_overload(load: dict[str, Any]) -> bool:
    counts = load["answers"]["counts"]
    return bool(counts.get("same", 0) > 1 and counts.get("refused", 0) > 0)


async def drained(server: Served, pool: Sequence[Ask], alone: Alone, rng: random.Random) -> dict[str, Any]:
    """As `drain_one`, but nobody comes behind the signal before the server has heard it."""

    def has_heard() -> bool:
        return any(entry.get("event") == "draining" for entry in server.entries())

    async def ask(port: int, path: str, body: Any = None, **options: Any) -> Reply:
        while body == NEWCOMER and not has_heard() and server.process.poll() is None:
            await asyncio.sleep(0.01)
        return await load_client.ask(port, path, body, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_faults, "ask", ask)
        return await drain_one(server, pool, alone, clients=7, rng=rng, within_s=DRAIN_WITHIN_S)


def test_under_overload_no_answer_is_lost_crossed_or_different(life: dict[str, Any]) -> None:
    for load in life["loads"]:
        assert load["answers"]["wrong"] == 0, load["answers"]
    assert is_overload(life["loads"][-1]), "some must have been answered, and some refused"
    assert life["failures_before_poison"] == []


def test_after_the_load_slots_and_blocks_are_free(life: dict[str, Any]) -> None:
    for used in (part["in_use_after"] for part in (*life["loads"], life["poison"])):
        assert any("slots" in name for name in used)
        assert any("blocks" in name for name in used)
        assert not any(used.values()), used


def test_a_request_that_fails_in_a_step_fails_alone(life: dict[str, Any]) -> None:
    found = life["poison"]
    assert found["told"] == {"500": found["poisoned"] // 2, "error event": found["poisoned"] // 2}
    assert found["others"]["wrong"] == 0, found["others"]
    assert found["others"]["counts"].get("same", 0) > 3


def test_a_signal_breaks_no_accepted_answer(life: dict[str, Any]) -> None:
    for found in life["drains"]:
        assert found["answers"]["wrong"] == 0, found
        assert found["status"] == 0
        assert found["newcomers"].keys() <= {"503", "no connection"}, found
        assert found["holds"]
    assert life["drains"][-1]["open"] > 0
