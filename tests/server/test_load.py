"""A real server under more load than it can bear, with requests that fail inside it, and at its end.

The long version, with latencies and memory, is `python -m benchmarks.server_load`.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import load_faults
from benchmarks.load_faults import answers_alone, drain_one
from benchmarks.load_server import served
from benchmarks.load_traffic import make_pool
from benchmarks.server_load import OVERLOAD, Calm, Setup, overload

CLIENTS = 18
SETUP = Setup(slots=3, queue_len=2, threads=1, seed=5, pool=10, most_steps=4)
DRAIN_WITHIN_S = 60.0


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
        found["load"] = await overload(server, pool, calm, setup)
        found["failures_before_poison"] = [e for e in server.entries() if "failure" in e]
        found["poison"] = await load_faults.poison(server, pool, alone, company=2, rounds=1)
        rng = random.Random(SETUP.seed)
        found["drain"] = await drain_one(server, pool, alone, clients=7, rng=rng, within_s=DRAIN_WITHIN_S)
    return found


def test_under_overload_no_answer_is_lost_crossed_or_different(life: dict[str, Any]) -> None:
    answers = life["load"]["answers"]
    assert answers["wrong"] == 0, answers
    assert answers["counts"].get("same", 0) > 1, "some must have been answered"
    assert answers["counts"].get("refused", 0) > 0, "it was no overload"
    assert life["failures_before_poison"] == []


def test_after_the_load_slots_and_blocks_are_free(life: dict[str, Any]) -> None:
    for used in (life["load"]["in_use_after"], life["poison"]["in_use_after"]):
        assert any("slots" in name for name in used)
        assert any("blocks" in name for name in used)
        assert not any(used.values()), used


def test_a_request_that_fails_in_a_step_fails_alone(life: dict[str, Any]) -> None:
    found = life["poison"]
    assert found["told"] == {"500": found["poisoned"] // 2, "error event": found["poisoned"] // 2}
    assert found["others"]["wrong"] == 0, found["others"]
    assert found["others"]["counts"].get("same", 0) > 3


def test_a_signal_breaks_no_accepted_answer(life: dict[str, Any]) -> None:
    found = life["drain"]
    assert found["answers"]["wrong"] == 0, found
    assert found["open"] > 0
    assert found["status"] == 0
    assert found["newcomers"].keys() <= {"503", "no connection"}, found
    assert found["holds"]
