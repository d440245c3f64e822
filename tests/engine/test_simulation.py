"""Lives of an engine from seeds: faults, full memory, slow clients, clients that leave at any moment.

`DGEMMA_SIMULATIONS` says how many seeds, `DGEMMA_FIRST_SEED` where they begin.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from dgemma.engine.request import EngineRequest
from dgemma.engine.scheduler import SchedulerConfig
from dgemma.engine.service import Accepted, EngineFailureError
from dgemma.events import Commit, Draft, Finish, FinishReason
from dgemma.params import GenerationParams
from engine_life import (
    BATCH_POINTS,
    DONE,
    ENCODE_BLOCK,
    POINTS,
    Client,
    Fault,
    Life,
    Scenario,
    World,
    answer_alone,
    as_alone,
    live,
    simulate,
)
from sizes import cases
from virtual_time import DeadlockError, VirtualLoop, run_virtually

FIRST = int(os.environ.get("DGEMMA_FIRST_SEED", "0"))
SEEDS = int(os.environ.get("DGEMMA_SIMULATIONS", str(cases(250, 160))))
OUTCOMES = {
    "finished", "left", "cancelled", "BusyError", "DrainingError", "EngineFailureError", "EngineDeadError",
    "InputError", "EngineRestartedError",
}  # fmt: skip


@pytest.fixture(scope="module")
def lives() -> dict[int, Life]:
    return {seed: simulate(seed) for seed in range(FIRST, FIRST + SEEDS)}


def nothing_is_left_behind(life: Life) -> Iterator[str]:
    """No slot, block, caller or task; nobody waits forever; nobody touched the engine during a step."""
    yield from life.problems


def everybody_has_one_outcome(life: Life) -> Iterator[str]:
    for client in life.scenario.clients:
        if len(client.outcomes) != 1 or client.outcomes[0] not in OUTCOMES:
            yield f"{client.name} has {client.outcomes}"


def events_come_in_order(life: Life) -> Iterator[str]:
    for client in life.scenario.clients:
        for wrong in _disorder(client):
            yield f"{client.name}: {wrong}"


def _disorder(client: Client) -> Iterator[str]:
    request, events = client.request, client.events
    if events and not isinstance(events[0], Accepted):
        yield f"begins with {events[0]}"
    canvas = step = 0
    for number, event in enumerate(events[1:], 2):
        if isinstance(event, Draft):
            if not request.drafts or request.params.decode == "causal":
                yield f"a draft that nobody asked for: {event}"
            if event.canvas != canvas or event.step <= step:
                yield f"behind step {step} of canvas {canvas} comes {event}"
            step = event.step
        elif isinstance(event, Commit):
            if event.canvas != canvas:
                yield f"instead of canvas {canvas} comes {event}"
            canvas, step = canvas + 1, 0
        elif not isinstance(event, Finish) or number != len(events):
            yield f"event {number} of {len(events)} is {event}"
    if client.outcomes == ["finished"] and not isinstance(events[-1], Finish):
        yield f"ends with {events[-1]}"


def an_answer_is_the_one_given_alone(life: Life) -> Iterator[str]:
    """Whoever else was there, whatever befell them: the same tokens, text and end, and never a wrong one."""
    for client in life.scenario.clients:
        if not client.is_valid:
            continue
        alone = answer_alone(client.request)
        commits = [event for event in client.events if isinstance(event, Commit)]
        settled = tuple(token for commit in commits if commit.settled for token in commit.tokens)
        if settled != alone.tokens[: len(settled)]:
            yield f"{client.name} was told {settled}, not {alone.tokens}"
        if not client.events or not isinstance(client.events[-1], Finish):
            continue
        answer = client.events[-1].answer
        told = tuple(token for commit in commits for token in commit.tokens)
        if (told, "".join(commit.text for commit in commits)) != (answer.tokens, answer.text):
            yield f"{client.name} was told {commits}, but the answer is {answer}"
        if answer.finish_reason is FinishReason.DEADLINE:
            if client.request.params.deadline_s is None:
                yield f"{client.name} has no deadline, but {answer}"
            if len(answer.tokens) - answer.provisional_tokens != len(settled):
                yield f"{client.name}: {answer} does not say which tokens are settled"
        elif as_alone(answer) != alone:
            yield f"{client.name} has {answer}, alone it would be {alone}"


def faults_strike_only_their_own(life: Life) -> Iterator[str]:
    for client in life.scenario.clients:
        fault = life.scenario.faults.get(client.name)
        is_struck = fault is not None and fault.struck and not fault.passing
        ends = ("EngineFailureError", "EngineDeadError", "EngineRestartedError", "left", "cancelled")
        if is_struck and client.outcome not in ends:
            yield f"{client.name} was struck at {fault}, but {client.outcome}"
        if client.outcome != "EngineFailureError":
            continue
        assert client.error is not None
        if not is_struck or fault is None or client.error.__cause__ is not fault.error:
            yield f"{client.name} failed with {client.error!r} for {fault}"


def refusals_have_their_reason(life: Life) -> Iterator[str]:
    for client in life.scenario.clients:
        outcome = client.outcome
        if client.is_valid and outcome == "InputError":
            yield f"{client.name} is valid, but {client.error}"
        # Who is dead or draining refuses before it looks.
        may_be_invalid = ["InputError", "DrainingError", "cancelled"]
        may_be_invalid += ["EngineDeadError"] if life.stats.failure is not None else []
        if not client.is_valid and outcome not in may_be_invalid:
            yield f"{client.name} is invalid, but {outcome}"
        if outcome == "DrainingError" and life.scenario.drains is None:
            yield f"{client.name} met a drain, but there was none"
        if (
            outcome
            not in (
                "finished",
                "left",
                "cancelled",
                "EngineFailureError",
                "EngineDeadError",
                "EngineRestartedError",
            )
            and client.events
        ):
            yield f"{client.name} was accepted, but {outcome}"


def a_dead_engine_says_so_to_everybody(life: Life) -> Iterator[str]:
    dies = any("the engine dies" in line for line in life.trace)
    hangs = any("the engine hangs" in line for line in life.trace)
    restarts = life.scenario.restarts
    if ((dies or hangs) and not restarts) != (life.stats.failure is not None):
        yield f"the engine {'died' if dies else 'lives'}, but {life.stats}"
    # The limit grows with the longest step so far: a clock that jumps makes one long.
    why = r"OSError: the device is gone|StepTimeoutError: a step did not end within (30|\d{2,3}\.\d+) seconds"
    if life.stats.failure is not None and not re.fullmatch(why, life.stats.failure):
        yield f"the engine died of {life.stats.failure}"
    if life.stats.restarts != (dies + hangs if restarts else 0):
        yield f"the engine {dies=}, {hangs=}, but {life.stats}"
    if life.stats.is_stalled != (life.stats.failure is not None and hangs and not dies):
        yield f"the engine {hangs=}, but {life.stats}"


def kinds_met(life: Life) -> Counter[str]:
    """What this life has shown at all."""
    counts = Counter(life.counts)
    counts["prefix hit"] += life.stats.prefix_hit_tokens > 0
    counts["engine dead"] += life.stats.failure is not None
    for fault in life.scenario.faults.values():
        counts[f"fault at {fault.point}{', passing' * fault.passing}"] += fault.struck
    for client in life.scenario.clients:
        counts[client.outcome] += 1
        counts["finished, with a part that was repeated"] += (
            client.outcome == "finished" and client.name in life.repeated
        )
        counts["left without closing"] += client.outcome == "left" and not client.closes
        if client.outcome == "cancelled" and client.events:
            counts["cancelled between events" if client.is_pausing else "cancelled while waiting"] += 1
        for event in client.events:
            counts["drafts"] += isinstance(event, Draft)
            if isinstance(event, Finish):
                counts[f"finish: {event.answer.finish_reason}"] += 1
    return counts


INVARIANTS = [
    nothing_is_left_behind,
    everybody_has_one_outcome,
    events_come_in_order,
    an_answer_is_the_one_given_alone,
    faults_strike_only_their_own,
    refusals_have_their_reason,
    a_dead_engine_says_so_to_everybody,
]


@pytest.mark.parametrize("invariant", INVARIANTS, ids=lambda invariant: invariant.__name__)
def test_in_every_life(lives: dict[int, Life], invariant: Callable[[Life], Iterator[str]]) -> None:
    broken = {seed: wrong for seed, life in lives.items() if (wrong := list(invariant(life)))}
    report = "\n".join(f"seed {seed}: {wrong}" for seed, wrong in broken.items())
    seed = next(iter(broken), None)
    assert not broken, (
        f"{len(broken)} of {len(lives)} lives:\n{report}\n"
        f"Replay: PYTHONPATH=src:tests python tests/engine_life.py {seed}"
    )


def test_every_kind_of_trouble_was_met(lives: dict[int, Life]) -> None:
    """A simulation that meets no fault shows nothing."""
    counts = sum(map(kinds_met, lives.values()), Counter[str]())
    print("\n".join(f"{count:7} {kind}" for kind, count in sorted(counts.items())))
    if len(lives) < 150:
        pytest.skip(f"{len(lives)} lives are too few to meet everything")
    troubles = [
        *OUTCOMES,
        *(f"fault at {point}{suffix}" for point in POINTS for suffix in ("", DONE)),
        *(f"fault at {point}{suffix}, passing" for point in BATCH_POINTS for suffix in ("", DONE)),
        "fault at add", "finished, with a part that was repeated",
        *(f"finish: {reason}" for reason in FinishReason),
        "wait for blocks", "block let go", "prefix hit", "drain", "drain that ran out of time",
        "engine dead", "restart", "drafts", "jump with requests",
        "left without closing", "cancelled between events", "cancelled while waiting", "failed in company",
    ]  # fmt: skip
    assert not [kind for kind in troubles if not counts[kind]]


@pytest.mark.parametrize("seed", [FIRST + 7, FIRST, FIRST + 3][: cases(3, 1)])
def test_a_life_can_be_replayed_from_its_seed(seed: int) -> None:
    first, again = simulate(seed), simulate(seed)
    assert len(first.trace) > 10
    assert first.trace == again.trace
    assert first.trace != simulate(seed + 1).trace


def test_virtual_time_waits_for_nobody_and_names_a_deadlock() -> None:
    """Else a client that hangs would hang the test, and a slow one would slow it."""
    woken: list[float] = []

    async def sleep(loop: VirtualLoop) -> None:
        for seconds in (3e6, 1e6, 2e6):
            loop.call_later(seconds, woken.append, seconds)
        await asyncio.sleep(4e6)
        assert loop.time() == 4e6
        await asyncio.wait([asyncio.create_task(asyncio.sleep(0, "seen")), asyncio.create_task(fail())])
        assert ["nobody looked" in wrong for wrong in loop.leftovers()] == [True]
        await asyncio.Event().wait()

    async def fail() -> None:
        raise OSError

    began = time.monotonic()
    with pytest.raises(DeadlockError, match=r"at 4000000\.0 everybody waits"):
        run_virtually(sleep)
    assert woken == [1e6, 2e6, 3e6]
    assert time.monotonic() - began < 60


def three_clients() -> Scenario:
    """In two slots, and with memory for two: the third waits."""
    prompt = (2, 300, 301, 300, 301, 106)
    params = GenerationParams(max_tokens=8, max_denoising_steps=2, temperature=0.0, ignore_end=True)
    short = replace(params, max_tokens=4)
    requests = [
        EngineRequest(prompt=prompt, seed=1, params=short, id="client 0"),
        EngineRequest(prompt=(*prompt, 7), seed=2, params=params, id="client 1", drafts=True),
        EngineRequest(prompt=prompt, seed=3, params=short, id="client 2"),
    ]
    return Scenario(
        memory={"block_size": 4, "full_blocks": 5, "window_blocks": 8},
        limits=SchedulerConfig(max_num_seqs=2, chunk_size=ENCODE_BLOCK, encode_block=ENCODE_BLOCK),
        clients=[
            Client(requests[0], arrives_s=0.02),
            Client(requests[1], pause_s=0.01),
            Client(requests[2], arrives_s=0.01),
        ],
    )


def test_a_client_may_be_cancelled_at_every_turn_of_the_loop() -> None:
    events_seen = Counter[int]()
    for moment in range(3, 1000):  # in the third turn the clients begin

        def cancel(world: World, turn: int, moment: int = moment) -> None:
            if turn == moment:
                world.tasks[1].cancel()

        scenario = three_clients()
        life = live(scenario, on_turn=cancel)
        for invariant in INVARIANTS:
            assert not list(invariant(life)), f"cancelled at turn {moment}"
        one, cancelled, two = scenario.clients
        assert one.outcomes == two.outcomes == ["finished"], f"cancelled at turn {moment}"
        if cancelled.outcomes == ["finished"]:
            break
        assert cancelled.outcomes == ["cancelled"]
        events_seen[len(cancelled.events)] += 1
    else:
        pytest.fail("it never finished by itself")
    # Before it was accepted, and behind every event it could read: drafts, commits, not the last.
    assert len(cancelled.events) >= 6
    assert sorted(events_seen) == list(range(len(cancelled.events) + 1))


@pytest.mark.parametrize("point", [point + suffix for point in BATCH_POINTS for suffix in ("", DONE)])
def test_a_failure_in_a_batch_changes_no_bit_of_another_request(point: str) -> None:
    """The one at fault is found by trying each alone; the others' step then counts once."""
    scenario = three_clients()
    scenario.faults["client 1"] = Fault(point, visit=1)
    life = live(scenario)
    for invariant in INVARIANTS:
        assert not list(invariant(life))
    assert [client.outcomes for client in scenario.clients] == [
        ["finished"], ["EngineFailureError"], ["finished"],
    ]  # fmt: skip
    assert life.counts["failed in company"]
    assert isinstance(scenario.clients[1].error, EngineFailureError)
