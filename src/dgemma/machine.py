"""Facts about this computer: processor, cores, memory, torch and installed packages.

`memory_facts` needs no torch; processor facts come from torch, which is imported when they are requested.
"""

from __future__ import annotations

import math
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

# Instruction sets that determine the speed of matrix products: name here -> name in torch.
_CPU_FEATURES = {
    "avx2": "avx2",
    "avx512f": "avx512_f",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "amx_bf16": "amx_bf16",
    "amx_int8": "amx_int8",
}
_CGROUP = Path("/sys/fs/cgroup")  # of a Linux container: its own
_MIN_SAMPLE_S = 0.2  # times are counted in hundredths of a second


@dataclass(frozen=True)
class MemoryFacts:
    memory_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class MachineFacts:
    system: str
    processor: str
    cores: int
    cpu_features: tuple[str, ...]
    memory_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class GpuFacts:
    name: str
    memory_bytes: int

    def __str__(self) -> str:
        return f"{self.name}, {self.memory_bytes / 1e9:.1f} GB"


@dataclass(frozen=True)
class TorchFacts:
    version: str
    threads: int
    cpu_capability: str
    cuda_devices: tuple[GpuFacts, ...]
    mps: bool


def memory_facts() -> MemoryFacts:
    """Physical memory, and the part that is available without swapping."""
    memory = psutil.virtual_memory()
    limit = _cgroup_limit()
    if limit is None or limit >= memory.total:
        return MemoryFacts(memory_bytes=memory.total, available_bytes=memory.available)
    left = max(0, limit - _cgroup_used())
    return MemoryFacts(memory_bytes=limit, available_bytes=min(left, memory.available))


def size_text(num_bytes: int) -> str:
    """In the unit that says something: `805.5 kB`, `50.5 GB`."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


def inspect_machine() -> MachineFacts:
    """Facts about the computer. Imports torch."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    memory = memory_facts()
    return MachineFacts(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=capabilities.get("cpu_name") or platform.processor() or platform.machine(),
        cores=len(_cores()),
        cpu_features=tuple(ours for ours, theirs in _CPU_FEATURES.items() if capabilities.get(theirs)),
        memory_bytes=memory.memory_bytes,
        available_bytes=memory.available_bytes,
    )


def has_fast_bf16() -> bool:
    """Whether the processor multiplies bfloat16 matrices itself; else float32 is faster. Imports torch."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def torch_facts() -> TorchFacts:
    import torch

    devices = []
    for index in range(torch.cuda.device_count()) if torch.cuda.is_available() else ():
        properties = torch.cuda.get_device_properties(index)
        devices.append(GpuFacts(properties.name, properties.total_memory))
    return TorchFacts(
        version=torch.__version__,
        threads=torch.get_num_threads(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        cuda_devices=tuple(devices),
        mps=torch.backends.mps.is_available(),
    )


def package_versions() -> dict[str, str | None]:
    """Versions of the packages that dgemma uses or is compared with; None: not installed."""
    import importlib.metadata  # slow to import, and only for reports

    versions: dict[str, str | None] = {}
    for name in ("dgemma", "torch", "numpy", "rich", "transformers", "tokenizers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


@dataclass(frozen=True)
class CpuSample:
    """Seconds until now: by the clock, of the cores that this process may use, and of this process alone."""

    clock_s: float
    busy_s: float
    own_s: float


def sample_cpu() -> CpuSample:
    cores, times = _cores(), psutil.cpu_times(percpu=True)
    busy = sum(_busy_s(times[core]) for core in cores if core < len(times))
    own = psutil.Process().cpu_times()
    return CpuSample(time.monotonic(), busy, own.user + own.system)


def choose_threads(since: CpuSample | None = None) -> int:
    """One thread for each core that this process may use and others, since then, did not."""
    usable = min(len(_cores()), _cpu_quota())
    if since is not None:
        now = sample_cpu()
        elapsed_s = now.clock_s - since.clock_s
        if elapsed_s >= _MIN_SAMPLE_S:
            others_s = now.busy_s - since.busy_s - (now.own_s - since.own_s)
            usable -= max(0.0, others_s / elapsed_s)
    return max(1, round(usable))


def _busy_s(times: Any) -> float:
    names = ("user", "nice", "system", "irq", "softirq", "steal")  # not every system has all
    return sum(getattr(times, name, 0.0) for name in names)


def _cores() -> list[int]:
    """Logical cores that this process may use."""
    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):  # not on macOS
        return list(process.cpu_affinity())
    return list(range(psutil.cpu_count() or 1))


def _cpu_quota() -> float:
    """Cores' worth of time that a Linux container may use."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # not Linux, or "max"
        return math.inf


def _cgroup_limit() -> int | None:
    """The memory limit of a Linux container, which psutil does not read; None where there is none."""
    try:
        return int((_CGROUP / "memory.max").read_text())
    except (OSError, ValueError):  # not Linux, or "max"
        return None


def _cgroup_used() -> int:
    """Memory that the container holds, without cached files, which make room when it is needed."""
    try:
        used = int((_CGROUP / "memory.current").read_text())
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        facts = dict(line.split() for line in lines)
        return used - int(facts.get("inactive_file", 0)) - int(facts.get("active_file", 0))
    except (OSError, ValueError):
        return 0
