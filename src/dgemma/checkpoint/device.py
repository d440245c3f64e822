"""Check the device and the dtype that a model is loaded with."""

from __future__ import annotations

import math

import torch

from dgemma.checkpoint.source import CheckpointSource
from dgemma.errors import DeviceError, InputError, suggestion
from dgemma.machine import has_fast_bf16, memory_facts

# Of the available memory; the rest is for the KV cache, activations and other programs.
_MAX_WEIGHTS_SHARE = 0.7

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


def check_dtype(name: str, source: CheckpointSource, device: torch.device) -> torch.dtype:
    if name == "auto":
        dtype = stored_dtype(source)
        is_slow = dtype is torch.bfloat16 and device.type == "cpu" and not has_fast_bf16()
        return torch.float32 if is_slow and _fits_in_float32(source) else dtype
    if name not in DTYPES:
        raise InputError(
            f"dtype {name!r} is not supported{suggestion(name, DTYPES)} "
            f"Supported: auto, {', '.join(DTYPES)}.",
            field="dtype",
        )
    return DTYPES[name]


def stored_dtype(source: CheckpointSource) -> torch.dtype:
    """The dtype that config.json names."""
    # Old files have torch_dtype. Files without a dtype, or with fp16, run in bf16.
    stored = source.raw_config.get("dtype", source.raw_config.get("torch_dtype"))
    return DTYPES.get(str(stored), torch.bfloat16)


def _fits_in_float32(source: CheckpointSource) -> bool:
    entries = (*source.entries.values(), *source.vision.values())
    plain = sum(4 * math.prod(entry.shape) for entry in entries)
    quantized = sum(entry.nbytes for entry in source.quantized.values())
    return plain + quantized <= _MAX_WEIGHTS_SHARE * memory_facts().available_bytes
