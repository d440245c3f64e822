"""Compilations take turns: those that have used least go first, and few hold much memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from dgemma.errors import DgemmaError
from dgemma.server.fair_turns import LONG_S, MAX_COMPILING, MAX_LONG, FairTurns


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Workers:
    """Threads that compute for some processor seconds, with a check after each 5 ms."""

    def __init__(self, turns: FairTurns) -> None:
        self.turns = turns
        self.threads: list[threading.Thread] = []
        self.num_running = 0
        self.most_running = 0
        self.finished: list[str] = []
        self._lock = threading.Lock()

    def start(
        self, name: str, seconds: float, tenant: str = "", on_spun: Callable[[Any], None] | None = None
    ) -> Any:
        job = self.turns.add(tenant)

        def work() -> None:
            with suppress(DgemmaError):
                self.turns.begin(job)
                while job.used_s < seconds:
                    with self._lock:
                        self.num_running += 1
                        self.most_running = max(self.most_running, self.num_running)
                    spin(0.005)
                    with self._lock:
                        self.num_running -= 1
                    if on_spun is not None:
                        on_spun(job)
                    self.turns.give_way(job)
                self.finished.append(name)
            self.turns.end(job)

        thread = threading.Thread(target=work)
        self.threads.append(thread)
        thread.start()
        return job

    def join(self) -> None:
        for thread in self.threads:
            thread.join(120)


@pytest.mark.parametrize("max_running", [1, 2])
def test_no_more_than_the_limit_run_at_once_also_when_all_have_used_the_same(max_running: int) -> None:
    workers = Workers(FairTurns(max_running))
    for number in range(6):
        workers.start(str(number), 0.06)
    workers.join()
    assert sorted(workers.finished) == [*"012345"]
    assert workers.most_running <= max_running


def test_a_compilation_that_has_used_much_gives_way_to_a_new_one() -> None:
    workers = Workers(FairTurns(1))

    def another_comes(old: Any) -> None:
        if old.used_s >= 0.2 and len(workers.threads) == 1:
            workers.start("new", 0.1)

    workers.start("old", 0.6, on_spun=another_comes)
    workers.join()
    assert workers.finished == ["new", "old"]


def test_a_tenant_that_has_used_much_gives_way_to_another() -> None:
    now = 0.0
    turns = FairTurns(max_running=1, clock=lambda: now)
    heavy, light = turns.add("heavy"), turns.add("light")
    turns._count(heavy, 0.4)
    turns._count(light, 0.1)
    again = turns.add("heavy")  # a new job of the tenant, which itself has used nothing
    again.is_running = True
    assert turns._is_overtaken(again)
    with turns._lock:
        turns._start_next()
        assert not light.is_running, "there is place for one"
        again.is_running = False
        turns._start_next()
    assert light.is_running
    assert not turns._is_overtaken(light)
    now = 300.0  # after ten half-lives nothing is held against it
    assert not turns._is_overtaken(again)


def test_of_long_compilations_only_a_few_go_on() -> None:
    turns = FairTurns(max_running=8)
    workers = Workers(turns)
    longest = LONG_S + 0.15
    seen: list[int] = []

    def count(_: Any) -> None:
        with turns._lock:
            seen.append(sum(job.used_s > LONG_S + 0.1 for job in turns._jobs))

    for number in range(MAX_LONG + 2):
        workers.start(str(number), longest, on_spun=count)
    workers.join()
    assert sorted(workers.finished) == [str(number) for number in range(MAX_LONG + 2)]
    assert 0 < max(seen) <= MAX_LONG


def test_an_abandoned_compilation_ends_at_its_next_check() -> None:
    turns = FairTurns()
    job = turns.add("")
    turns.begin(job)
    turns.abandon(job)
    with pytest.raises(DgemmaError, match=r"^$"):
        turns.give_way(job)


def test_an_abandoned_compilation_that_waits_ends_at_once() -> None:
    turns = FairTurns(1)
    workers = Workers(turns)
    turns.begin(turns.add(""))  # runs, and never gives way
    waits = workers.start("waits", 0.1)
    turns.abandon(waits)
    workers.join()
    assert not workers.threads[0].is_alive()
    assert workers.finished == []


def test_where_all_places_are_taken_the_longest_makes_room() -> None:
    turns = FairTurns()
    jobs = [turns.add("") for _ in range(MAX_COMPILING)]
    assert not turns.make_room(""), "all are new"
    turns._count(jobs[3], LONG_S + 1)
    turns._count(jobs[5], LONG_S + 2)
    assert turns.make_room("")
    assert [number for number, job in enumerate(jobs) if job.is_abandoned] == [5]


def test_a_tenant_has_half_of_the_places_and_displaces_only_its_own() -> None:
    turns = FairTurns()
    other = turns.add("other")
    turns._count(other, LONG_S + 5)
    own = [turns.add("own") for _ in range(MAX_COMPILING // 2)]
    assert not turns.make_room("own")
    assert turns.make_room("third")
    turns._count(own[0], LONG_S + 1)
    assert turns.make_room("own")
    assert own[0].is_abandoned
    assert not other.is_abandoned
