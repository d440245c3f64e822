"""Check the device and the dtype that a model is loaded with."""

from __future__ import annotations

import torch

from dgemma.checkpoint.source import CheckpointSource
from dgemma.errors import DeviceError, InputError, suggestion

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check_device(name: str) -> torch.device:
    """The device called `name`, or an error if it is not available. "auto": a GPU if there is one."""
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name in ("auto", "gpu"):
        found = next(kind for kind, is_here in available.items() if is_here)
        if name == "gpu" and found == "cpu":
            raise DeviceError("no GPU is available here; `dgemma doctor` shows what this machine has.")
        return torch.device(found)
    try:
        device = torch.device(name)
    except RuntimeError:
        known = ("auto", "cpu", "gpu", "cuda", "mps")
        raise DeviceError(
            f"device {name!r} is not known{suggestion(name, known)} Known: {', '.join(known)}."
        ) from None
    if not available.get(device.type, False):
        raise DeviceError(
            f"device {name!r} is not available here; `dgemma doctor` shows what this machine has."
        )
    return device


def check_dtype(name: str, source: CheckpointSource) -> torch.dtype:
    if name == "auto":
        # Old files have torch_dtype. Files without a dtype, or with fp16, run in bf16.
        stored = source.raw_config.get("dtype", source.raw_config.get("torch_dtype"))
        return DTYPES.get(str(stored), torch.bfloat16)
    if name not in DTYPES:
        raise InputError(
            f"dtype {name!r} is not supported{suggestion(name, DTYPES)} "
            f"Supported: auto, {', '.join(DTYPES)}.",
            field="dtype",
        )
    return DTYPES[name]
