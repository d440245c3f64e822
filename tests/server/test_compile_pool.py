"""Response formats are compiled in another process: its replies, refusals and its end reach who asked."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from dgemma.errors import InputError
from dgemma.server import compile_pool, fair_turns
from dgemma.server.compile_pool import CompilePool
from dgemma.server.http.errors import ApiError
from dgemma.server.response_format import RequestedFormat
from dgemma.structured_output.budget import DEFAULT_SECONDS
from dgemma.structured_output.compiler import GrammarCompiler
from dgemma.structured_output.response_format import RegexFormat
from server.compile_in_process import CompileInProcess
from server.fake_engine import FakeText
from server.test_fair_turns import spin
from text.test_template_process import has_ended

# Takes all of its time: the automaton of each part is small, their product is not.
ENDLESS = "|".join(f".*{number}.*" for number in range(200))


def wanted(pattern: str) -> RequestedFormat:
    return RequestedFormat(response_format=RegexFormat(pattern), field="regex")


def real_compiler() -> GrammarCompiler:
    return FakeText().compiler(None)  # type: ignore[arg-type]


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.01)


def pid_of(pool: CompilePool) -> int:
    assert pool._process is not None
    return pool._process._process.pid


def test_a_constraint_of_the_process_is_that_of_this_one_and_cached() -> None:
    compiler = real_compiler()

    async def both() -> tuple[Any, Any, bool]:
        pool = CompilePool(compiler)
        first = await pool.compile(wanted("(ab|c)+"), timeout_s=60)
        second = await pool.compile(wanted("(ab|c)+"), timeout_s=0)  # from the cache
        return first, second, compiler.cached(RegexFormat("(ab|c)+")) is not None

    first, second, is_cached = asyncio.run(both())
    assert is_cached
    assert second.token_dfa is first.token_dfa
    here = real_compiler().compile(RegexFormat("(ab|c)+"))
    for name in ("class_of_token", "transitions", "accepts", "distance"):
        assert (getattr(first.token_dfa, name) == getattr(here.token_dfa, name)).all(), name
    assert (first.end_tokens, first.complete_after) == (here.end_tokens, here.complete_after)


def test_a_copy_of_a_compiler_has_neither_tokenizer_nor_cache() -> None:
    compiler = real_compiler()
    compiler.compile(RegexFormat("a"))
    copied = pickle.loads(pickle.dumps(compiler))
    assert compiler.cached(RegexFormat("a")) is not None
    assert copied.cached(RegexFormat("a")) is None
    assert not hasattr(copied, "_tokenizer")


def test_a_refusal_names_the_clients_field_and_is_remembered() -> None:
    async def refused() -> tuple[list[str], set[int]]:
        pool, told, pids = CompilePool(real_compiler()), [], set()
        for _ in range(2):
            with pytest.raises(ApiError) as caught:
                await pool.compile(wanted("a{99999999}"), timeout_s=60)
            told.append(str(caught.value))
            pids.add(next(pool._ids))
        return told, pids

    told, ids = asyncio.run(refused())
    assert told[0].startswith("regex: ")
    assert told[0] == told[1]
    assert ids == {1, 2}, "the second was not asked of the process"


def test_processor_time_is_counted_also_of_one_whose_client_left() -> None:
    async def left() -> list[float]:
        pool, used = CompilePool(real_compiler()), list[float]()
        await pool.compile(wanted("a"), timeout_s=60)
        task = asyncio.create_task(pool.compile(wanted(ENDLESS), timeout_s=60, on_used=used.append))
        process = psutil.Process(pid_of(pool))
        before_s = process.cpu_times().user
        await eventually(lambda: process.cpu_times().user > before_s + 0.3)
        task.cancel()
        await eventually(lambda: bool(used))
        return used

    (used_s,) = asyncio.run(left())
    assert 0 < used_s < DEFAULT_SECONDS, "and it did not go on"


def test_its_time_limit_is_wall_clock() -> None:
    async def slow() -> None:
        pool = CompilePool(real_compiler())
        await pool.compile(wanted("a"), timeout_s=60)
        await pool.compile(wanted(ENDLESS), timeout_s=0.2)

    with pytest.raises(ApiError, match=r"regex was not compiled within 0\.2 seconds") as caught:
        asyncio.run(slow())
    assert caught.value.status == 504


def test_a_process_that_is_killed_is_told_and_started_again() -> None:
    async def killed() -> tuple[Any, int, int]:
        pool = CompilePool(real_compiler())
        await pool.compile(wanted("a"), timeout_s=60)
        first = pid_of(pool)
        task = asyncio.create_task(pool.compile(wanted(ENDLESS), timeout_s=60))
        await asyncio.sleep(0.2)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(ApiError) as caught:
            await task
        await pool.compile(wanted("b"), timeout_s=60)
        return caught.value.status, first, pid_of(pool)

    status, first, second = asyncio.run(killed())
    assert status == 429
    assert first != second


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_ends_with_its_pool_and_imports_no_torch() -> None:
    async def compiled() -> CompilePool:
        pool = CompilePool(real_compiler())
        await pool.compile(wanted("a"), timeout_s=60)
        return pool

    pool = asyncio.run(compiled())
    pid = pid_of(pool)
    with open(f"/proc/{pid}/maps") as maps:
        assert "torch" not in maps.read()
    del pool
    gc.collect()
    ends = time.monotonic() + 60
    while not has_ended(pid):
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_a_mistake_of_ours_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "CompileProcess", CompileInProcess)

    class Broken(EndlessCompiler):
        def compile(self, *args: Any, **options: Any) -> Any:
            raise ZeroDivisionError

    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        asyncio.run(CompilePool(Broken()).compile(wanted("a"), timeout_s=60))  # type: ignore[arg-type]


class EndlessCompiler:
    """Compiles one pattern at once and all others never."""

    def __init__(self) -> None:
        self.num_begun = 0

    def cached(self, response_format: Any, *, allow_thought: bool) -> None:
        return None

    def store(self, response_format: Any, token_dfa: Any, *, allow_thought: bool) -> Any:
        return token_dfa

    def compile(self, response_format: Any, *, allow_thought: bool, on_check: Callable[[], None]) -> Any:
        self.num_begun += 1
        while response_format.pattern != "fast":
            spin(0.005)
            on_check()
        return real_compiler().compile(RegexFormat("a"))


def test_a_displaced_compilation_is_told_to_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "CompileProcess", CompileInProcess)
    monkeypatch.setattr(fair_turns, "MAX_COMPILING", 1)
    monkeypatch.setattr(fair_turns, "LONG_S", 0.02)

    async def both() -> tuple[Any, Any]:
        pool = CompilePool(EndlessCompiler())  # type: ignore[arg-type]

        def is_long() -> bool:
            process: Any = pool._process
            return process is not None and any(job.used_s > 0.05 for job in process.worker._turns._jobs)

        slow = asyncio.create_task(pool.compile(wanted("slow"), timeout_s=60))
        await eventually(is_long)
        fast = await pool.compile(wanted("fast"), timeout_s=60)
        return await asyncio.gather(slow, return_exceptions=True), fast

    (slow,), fast = asyncio.run(both())
    assert fast.num_states
    assert isinstance(slow, ApiError)
    assert slow.status == 429
    assert "takes long to compile" in str(slow)


def test_where_all_places_are_taken_a_client_is_told_to_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "CompileProcess", CompileInProcess)
    monkeypatch.setattr(fair_turns, "MAX_COMPILING", 0)
    monkeypatch.setattr(fair_turns.FairTurns, "_displace", lambda *_: False)
    with pytest.raises(ApiError, match="too many response formats") as caught:
        asyncio.run(CompilePool(EndlessCompiler()).compile(wanted("fast"), timeout_s=60))  # type: ignore[arg-type]
    assert caught.value.status == 429


class RefusingCompiler(EndlessCompiler):
    """Refuses every pattern, with much in memory when it does."""

    def __init__(self) -> None:
        super().__init__()
        self.built: list[weakref.ref[Any]] = []

    def compile(self, response_format: Any, *, allow_thought: bool, on_check: Callable[[], None]) -> Any:
        self.num_begun += 1
        states = {0}
        self.built.append(weakref.ref(states))
        raise InputError("too many states", field="regex", code="invalid_value")


def test_a_refusal_is_remembered_without_what_was_built_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that is kept keeps the variables of every frame it came through."""
    monkeypatch.setattr(compile_pool, "CompileProcess", CompileInProcess)
    compiler = RefusingCompiler()

    async def refused() -> list[str]:
        pool = CompilePool(compiler)  # type: ignore[arg-type]
        told = []
        for _ in range(3):
            with pytest.raises(ApiError) as caught:
                await pool.compile(wanted("a"), timeout_s=60)
            told.append(str(caught.value))
            del caught
        assert pool._refusals
        gc.collect()
        assert [ref() for ref in compiler.built] == [None]
        return told

    assert asyncio.run(refused()) == ["regex: too many states"] * 3
    assert compiler.num_begun == 1
