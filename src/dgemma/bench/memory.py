"""Peak memory growth of a call. Linux only on a CPU: no portable call resets the peak of a process."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def peak_growth_bytes(run: Callable[[], Any], device: torch.device) -> int | None:
    """Peak bytes of `run` beyond the memory allocated before; None if it cannot be measured."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        allocated = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - allocated
    if device.type != "cpu" or not _STATUS.exists():
        return None
    # Otherwise `run` would reuse memory that an earlier run freed, which is not counted.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:  # not glibc
        return None
    gc.collect()  # what `run` happened to collect would hide as much of its growth
    trim(0)
    try:
        _CLEAR.write_text("5")  # reset the peak
    except OSError:
        return None
    before = _peak_bytes()
    if before is None:
        return None
    run()
    after = _peak_bytes()
    return None if after is None else after - before


def _peak_bytes() -> int | None:
    found = re.search(r"VmHWM:\s+(\d+)", _STATUS.read_text())
    return None if found is None else int(found[1]) * 1024
