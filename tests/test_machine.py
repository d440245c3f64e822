"""How many threads and how much memory: what this process may use, less what others use."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from dgemma import machine
from dgemma.machine import CpuSample, choose_threads, memory_facts, sample_cpu


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)


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
    (machine._CGROUP / "cpu.max").write_text(quota)
    assert choose_threads() == threads


def test_only_the_cores_of_this_process_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_cores", lambda: [1])
    other, ours = SimpleNamespace(user=100.0), SimpleNamespace(user=3.0, nice=1.0, system=2.0, idle=9.0)
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [other, ours])
    assert sample_cpu().busy_s == 6.0


@pytest.mark.parametrize(
    ("limit", "used", "statistics", "expected"),
    [
        ("8000", "6000", "anon 5000\ninactive_file 700\nactive_file 300\n", (8000, 3000)),
        ("8000", "9000", "anon 9000\n", (8000, 0)),
        ("8000", "1000", "anon 1000\n", (8000, 5000)),  # others on the machine have the rest
        ("8000", None, None, (8000, 5000)),
        ("max", "6000", "anon 5000\n", (20_000, 5000)),
        ("90000", "6000", "anon 5000\n", (20_000, 5000)),
    ],
)
def test_a_container_has_what_its_limit_leaves(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    limit: str,
    used: str | None,
    statistics: str | None,
    expected: tuple[int, int],
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=20_000, available=5000))
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    for name, content in (("max", limit), ("current", used), ("stat", statistics)):
        if content is not None:
            (tmp_path / f"memory.{name}").write_text(content)
    found = memory_facts()
    assert (found.memory_bytes, found.available_bytes) == expected
