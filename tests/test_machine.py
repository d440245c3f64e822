"""How many threads: the cores this process may use, less those that others use."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from dgemma import machine
from dgemma.machine import CpuSample, choose_threads, sample_cpu


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(machine, "_CGROUP_CPU", tmp_path / "cpu.max")


def since(monkeypatch: pytest.MonkeyPatch, *, elapsed_s: float, busy_s: float, own_s: float) -> CpuSample:
    monkeypatch.setattr(machine, "sample_cpu", lambda: CpuSample(100 + elapsed_s, 50 + busy_s, 5 + own_s))
    return CpuSample(100.0, 50.0, 5.0)


@pytest.mark.parametrize(
    ("busy_s", "own_s", "threads"),
    [(0.0, 0.0, 4), (1.0, 1.0, 4), (2.0, 1.0, 3), (3.0, 1.0, 2), (4.0, 0.1, 1), (4.0, 4.0, 4), (0.5, 2.0, 4)],
)
def test_cores_that_others_use_are_left_to_them(
    four_cores: None, monkeypatch: pytest.MonkeyPatch, busy_s: float, own_s: float, threads: int
) -> None:
    assert choose_threads(since(monkeypatch, elapsed_s=1.0, busy_s=busy_s, own_s=own_s)) == threads


def test_too_short_a_time_says_nothing(four_cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_threads(since(monkeypatch, elapsed_s=0.1, busy_s=0.4, own_s=0.0)) == 4
    assert choose_threads() == 4


@pytest.mark.parametrize(
    ("quota", "threads"), [("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("broken", 4)]
)
def test_a_containers_quota_is_kept(four_cores: None, quota: str, threads: int) -> None:
    machine._CGROUP_CPU.write_text(quota)
    assert choose_threads() == threads


def test_only_the_cores_of_this_process_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_cores", lambda: [1])
    other, ours = SimpleNamespace(user=100.0), SimpleNamespace(user=3.0, nice=1.0, system=2.0, idle=9.0)
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [other, ours])
    assert sample_cpu().busy_s == 6.0
