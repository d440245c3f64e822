"""What this machine has. Only `torch_facts` imports torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8")


@dataclass(frozen=True)
class Machine:
    system: str
    processor: str
    cores: int
    cpu_features: tuple[str, ...]
    memory_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class TorchFacts:
    version: str
    threads: int
    cpu_capability: str
    cuda_devices: tuple[str, ...]
    mps: bool


def inspect_machine() -> Machine:
    processor, features = _processor()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _number_in("/sys/fs/cgroup/memory.max")
    if limit is not None:  # a container may have less than the machine
        total = min(total, limit)
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=processor,
        cores=_cores(),
        cpu_features=features,
        memory_bytes=total,
        available_bytes=min(total, _available_bytes() or total),
    )


def torch_facts() -> TorchFacts:
    import torch

    devices = []
    for index in range(torch.cuda.device_count()) if torch.cuda.is_available() else ():
        properties = torch.cuda.get_device_properties(index)
        devices.append(f"{properties.name}, {properties.total_memory / 1e9:.1f} GB")
    return TorchFacts(
        version=torch.__version__,
        threads=torch.get_num_threads(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        cuda_devices=tuple(devices),
        mps=torch.backends.mps.is_available(),
    )


def package_versions() -> dict[str, str | None]:
    """Versions of what dgemma uses or can be compared with; None where it is not installed."""
    versions: dict[str, str | None] = {}
    for name in ("dgemma", "torch", "numpy", "rich", "transformers", "tokenizers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> tuple[str, tuple[str, ...]]:
    name, flags = platform.processor() or platform.machine(), set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = set(value.split())
                break
    except OSError:
        pass  # not Linux
    return name, tuple(flag for flag in _FLAGS if flag in flags)


def _available_bytes() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _number_in(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
