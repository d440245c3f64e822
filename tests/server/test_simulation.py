"""Lives of a whole server from seeds: what an HTTP client is told, whatever befalls the engine or others.

`DGEMMA_SIMULATIONS` says how many seeds, `DGEMMA_FIRST_SEED` where they begin.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from engine.test_simulation import three_clients
from engine_life import World, answer_alone
from server_life import Exchange, ServerLife, ServerWorld, live, simulate
from sizes import cases

FIRST = int(os.environ.get("DGEMMA_FIRST_SEED", "0"))
SEEDS = int(os.environ.get("DGEMMA_SIMULATIONS", str(cases(1000, 60))))
REFUSED = {"400 context_length_exceeded", "400 invalid_value", "404 model_not_found", "400 invalid_request"}
ENGINE_ENDS = {"503 engine_restarted", "503 engine_down", "503 engine_stalled"}


@pytest.fixture(scope="module")
def lives() -> dict[int, ServerLife]:
    return {seed: simulate(seed) for seed in range(FIRST, FIRST + SEEDS)}


def nothing_is_left_behind(life: ServerLife) -> Iterator[str]:
    """No slot, block, place of a request or task; every request is counted once."""
    yield from life.problems


def everybody_is_answered_once(life: ServerLife) -> Iterator[str]:
    for name, exchange in life.exchanges.items():
        if exchange.has_left:
            continue
        if len(exchange.starts) != 1 or exchange.num_ends != 1:
            yield f"{name} has {len(exchange.starts)} beginnings and {exchange.num_ends} ends"
        elif exchange.status == 200 and exchange.is_streamed:
            is_done = exchange.events[-1:] == ["[DONE]"]
            if is_done == (exchange.error is not None):
                yield f"{name}: {exchange.events[-2:]}"
        elif exchange.status != 200 and exchange.error is None:
            yield f"{name} has status {exchange.status} without a reason"


def an_answer_is_the_one_given_alone(life: ServerLife) -> Iterator[str]:
    for client in life.scenario.clients:
        exchange = life.exchanges[client.name]
        if client.outcome != "answered" or exchange.error is not None:
            continue
        alone = answer_alone(client.request)
        choices = exchange.choices
        text = "".join(choice.get("text") or "" for choice in choices)
        (reason,) = [c["dgemma"]["finish_reason"] for c in choices if c.get("finish_reason") is not None]
        if reason == "deadline":
            if client.request.params.deadline_s is None:
                yield f"{client.name} has no deadline"
        elif (text, reason) != (alone.text, alone.finish_reason):
            yield f"{client.name} has {text!r} ({reason}), alone it would be {alone}"


def every_refusal_has_its_reason(life: ServerLife) -> Iterator[str]:
    scenario = life.scenario
    is_trouble = any("the engine dies" in line or "the engine hangs" in line for line in life.trace)
    for client in scenario.clients:
        outcome, fault = client.outcome, scenario.faults.get(client.name)
        if outcome in ("left", "answered", "429 rate_limit_exceeded"):
            fine = client.is_valid or outcome != "answered"
        elif outcome in REFUSED:
            fine = not client.is_valid
        elif outcome in ("500 engine_failure", "200 engine_failure"):
            fine = fault is not None and fault.struck
        elif outcome.endswith("draining"):
            fine = scenario.drains is not None
        else:
            fine = is_trouble and f"503 {outcome.split()[1]}" in ENGINE_ENDS
        if not fine:
            yield f"{client.name} (valid: {client.is_valid}, {fault}) has {outcome}"


INVARIANTS = [
    nothing_is_left_behind,
    everybody_is_answered_once,
    an_answer_is_the_one_given_alone,
    every_refusal_has_its_reason,
]


@pytest.mark.parametrize("invariant", INVARIANTS, ids=lambda invariant: invariant.__name__)
def test_in_every_life(
    lives: dict[int, ServerLife], invariant: Callable[[ServerLife], Iterator[str]]
) -> None:
    broken = {seed: wrong for seed, life in lives.items() if (wrong := list(invariant(life)))}
    report = "\n".join(f"seed {seed}: {wrong}" for seed, wrong in broken.items())
    assert not broken, (
        f"{len(broken)} of {len(lives)} lives:\n{report}\n"
        f"Replay: PYTHONPATH=src:tests python tests/server_life.py {next(iter(broken))}"
    )


def test_every_kind_of_reply_was_met(lives: dict[int, ServerLife]) -> None:
    counts = Counter(client.outcome for life in lives.values() for client in life.scenario.clients)
    print("\n".join(f"{count:7} {kind}" for kind, count in sorted(counts.items())))
    if len(lives) < 60:
        pytest.skip(f"{len(lives)} lives are too few to meet everything")
    kinds = [
        "answered", "left", "429 rate_limit_exceeded", "404 model_not_found", "500 engine_failure",
        "200 engine_failure", "503 engine_restarted", "503 draining",
    ]  # fmt: skip
    assert not [kind for kind in kinds if not counts[kind]]


def test_a_client_may_leave_at_every_turn_of_the_loop() -> None:
    """Every await of a request is such a turn: the others are answered as ever, and nothing stays behind."""
    sent: set[int] = set()
    for moment in range(1, 2000, cases(1, 5)):
        left: list[Exchange] = []

        def leave(world: World, turn: int, moment: int = moment, left: list[Exchange] = left) -> None:
            assert isinstance(world, ServerWorld)
            exchange = world.exchanges.get("client 1") or Exchange(is_streamed=False)
            if turn == moment and exchange.raw is not None and not exchange.raw.task.done():
                left.append(exchange)
                exchange.has_left = True
                exchange.raw.leave()

        scenario = three_clients()
        life = live(scenario, on_turn=leave)
        for invariant in INVARIANTS:
            assert not list(invariant(life)), f"left at turn {moment}"
        others = [client.outcome for client in scenario.clients if client.name != "client 1"]
        assert others == ["answered", "answered"], f"left at turn {moment}"
        if not left and sent:
            break
        sent |= {len(exchange.raw.sent) for exchange in left if exchange.raw is not None}
    else:
        pytest.fail("it never finished by itself")
    assert len(sent) >= 2  # before the first byte, and after some
