"""Work is done one piece at a time, and a client with much to do delays others by one piece."""

from __future__ import annotations

import asyncio
import threading

import pytest

from dgemma.server.turns import Turns
from server.served import run


def test_clients_take_turns_however_much_one_has_to_do() -> None:
    done: list[str] = []
    may_begin = threading.Event()

    async def all_of() -> None:
        turns = Turns()

        def work(name: str) -> str:
            may_begin.wait()
            done.append(name)
            return name

        names = [*(f"a{number}" for number in range(5)), "b0", "b1", "c0"]
        tasks = [asyncio.create_task(turns.run(name[0], lambda name=name: work(name))) for name in names]
        await asyncio.sleep(0)
        may_begin.set()
        assert await asyncio.gather(*tasks) == names

    run(all_of())
    assert done == ["a0", "a1", "b0", "c0", "a2", "b1", "a3", "a4"]


def test_one_piece_at_a_time_and_a_failure_is_its_own() -> None:
    running: list[int] = []

    async def all_of() -> None:
        turns = Turns()

        def work(number: int) -> int:
            running.append(number)
            assert len(running) == 1
            running.pop()
            if number % 3 == 0:
                raise ValueError(number)
            return number

        found = await asyncio.gather(
            *(turns.run("x", lambda number=number: work(number)) for number in range(30)),
            return_exceptions=True,
        )
        assert [entry for entry in found if isinstance(entry, int)] == [n for n in range(30) if n % 3]

    run(all_of())


@pytest.mark.parametrize("which", ["running", "waiting", "next"])
def test_who_leaves_holds_up_nobody(which: str) -> None:
    may_end = threading.Event()

    async def all_of() -> None:
        turns = Turns()
        running = asyncio.create_task(turns.run("a", may_end.wait))
        waiting = asyncio.create_task(turns.run("b", lambda: 1))
        last = asyncio.create_task(turns.run("c", lambda: 2))
        await asyncio.sleep(0)
        if which == "running":
            running.cancel()
            await asyncio.sleep(0)
            assert not last.done()  # the work itself goes on, and so does its turn
        elif which == "waiting":
            waiting.cancel()
        may_end.set()
        if which == "next":  # its turn comes in the same moment
            await running
            waiting.cancel()
        assert await last == 2
        await asyncio.gather(running, waiting, return_exceptions=True)
        assert await turns.run("d", lambda: 3) == 3

    run(all_of())
