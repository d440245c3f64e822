"""What measuring itself promises: ways run in turn, right spreads and ratios, memory that is seen."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

from dgemma.bench import memory, timing
from dgemma.bench.memory import peak_growth_bytes
from dgemma.bench.timing import alternate, ratios, spread

CPU = torch.device("cpu")
PIECE = 64_000
needs_a_peak = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="this system cannot start a peak anew"
)


@pytest.fixture
def advance(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that only moves when told to."""
    now = 100.0

    def move(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    return move


def test_ways_take_turns_after_one_round_of_warming_up(advance: Callable[[float], None]) -> None:
    order: list[str] = []
    slow, fast = iter([50.0, 3.0, 4.0]), iter([70.0, 1.0, 2.0])  # the first round is never like the others

    def run(name: str, seconds: Iterator[float]) -> None:
        order.append(name)
        advance(next(seconds))

    ways = {"slow": lambda: run("slow", slow), "fast": lambda: run("fast", fast)}
    assert alternate(ways, 2, clock=lambda: timing.time.perf_counter()) == {
        "slow": [3.0, 4.0],
        "fast": [1.0, 2.0],
    }
    assert order == ["slow", "fast"] * 3


def test_a_spread_is_median_least_and_most() -> None:
    assert spread([5.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 5.0}
    assert spread([4.0, 1.0, 2.0, 3.0])["median"] == 2.5
    assert spread([7.0]) == {"median": 7.0, "min": 7.0, "max": 7.0}


def test_a_spread_keeps_five_digits_however_short_the_time() -> None:
    assert spread([0.00001234567])["median"] == 0.000012346
    assert spread([1234.567])["median"] == 1234.6


def test_ratios_are_taken_round_by_round_against_the_base() -> None:
    # The machine was twice as slow in the second round: for all ways alike.
    seconds = {"base": [1.0, 2.0], "other": [3.0, 6.0], "third": [0.5, 2.0]}
    assert ratios(seconds, "base") == {
        "other": {"median": 3.0, "min": 3.0, "max": 3.0},
        "third": {"median": 0.75, "min": 0.5, "max": 1.0},
    }


@needs_a_peak
def test_peak_growth_sees_an_allocation_of_known_size() -> None:
    grown = peak_growth_bytes(lambda: torch.ones(16_000_000), CPU)
    assert grown is not None
    assert 60_000_000 < grown < 80_000_000  # 64 MB, freed again before anybody looks
    nothing = peak_growth_bytes(lambda: None, CPU)
    assert nothing is not None
    assert nothing < 8_000_000


@needs_a_peak
def test_peak_growth_sees_memory_that_an_earlier_run_had_freed() -> None:
    """In a process of its own: the heap of this one has holes that other tests have left."""
    program = "from bench.test_timing import run_twice; run_twice()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=300)


def run_twice() -> None:
    fence: list[torch.Tensor] = []

    def run() -> None:
        pieces = [torch.ones(PIECE // 4) for _ in range(1000)]  # too small to be given back one by one
        fence.append(torch.ones(PIECE // 4))  # what stays behind them keeps the heap from shrinking
        del pieces

    for _ in range(2):
        grown = peak_growth_bytes(run, CPU)
        assert grown is not None
        assert grown > 0.9 * 1000 * PIECE


def test_peak_growth_on_cuda_is_the_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 350)
    assert peak_growth_bytes(lambda: calls.append("run"), torch.device("cuda")) == 250
    assert calls == ["reset", "run"]


@pytest.mark.parametrize("case", ["device", "no /proc", "no glibc", "peak cannot be reset", "no peak"])
def test_peak_growth_is_none_where_it_cannot_be_told(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "status"
    status.write_text("Name: python\nVmRSS: 5 kB\n")
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "clear_refs")
    if case == "no /proc":
        monkeypatch.setattr(memory, "_STATUS", tmp_path / "nothing")
    elif case == "no glibc":
        monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    elif case == "peak cannot be reset":
        monkeypatch.setattr(memory, "_CLEAR", tmp_path / "nothing" / "clear_refs")
    elif case == "no peak":
        monkeypatch.setattr(memory, "_STATUS", status)
    device = torch.device("meta") if case == "device" else CPU
    assert peak_growth_bytes(lambda: None, device) is None


def test_peak_growth_is_the_difference_of_two_peaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("not glibc")
    status, clear = tmp_path / "status", tmp_path / "clear_refs"
    status.write_text("VmHWM:\t    1000 kB\n")
    monkeypatch.setattr(memory, "_STATUS", status)
    monkeypatch.setattr(memory, "_CLEAR", clear)
    runs = count(1)

    def run() -> None:
        assert clear.read_text() == "5"
        status.write_text(f"VmHWM:\t    {1000 + 500 * next(runs)} kB\n")

    assert peak_growth_bytes(run, CPU) == 500 * 1024
    assert next(runs) == 2
