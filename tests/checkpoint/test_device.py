"""Which device and dtype a name means on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dgemma.checkpoint import device
from dgemma.checkpoint.device import check_device, check_dtype
from dgemma.checkpoint.source import CheckpointSource, open_checkpoint
from dgemma.errors import DeviceError, InputError
from dgemma.machine import MemoryFacts


@pytest.fixture(params=[(), ("mps",), ("cuda",), ("cuda", "mps")], ids=lambda here: "+".join(here) or "none")
def here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The accelerators that this machine says it has."""
    found: tuple[str, ...] = request.param
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in found)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in found)
    return found


def test_auto_is_the_first_accelerator_or_the_processor(here: tuple[str, ...]) -> None:
    assert check_device("auto").type == (here or ("cpu",))[0]


def test_gpu_is_the_first_accelerator_and_never_the_processor(here: tuple[str, ...]) -> None:
    if here:
        assert check_device("gpu").type == here[0]
    else:
        with pytest.raises(DeviceError, match="no GPU is available here"):
            check_device("gpu")


def test_a_named_device_is_that_one_or_refused(here: tuple[str, ...]) -> None:
    assert check_device("cpu").type == "cpu"
    for name in ("cuda", "mps"):
        if name in here:
            assert check_device(name).type == name
        else:
            with pytest.raises(DeviceError, match=f"device '{name}' is not available here"):
                check_device(name)


def test_an_unknown_device_is_answered_with_the_known_ones() -> None:
    with pytest.raises(DeviceError, match=r"device 'gpus' is not known.* Known: auto, cpu, gpu, cuda, mps"):
        check_device("gpus")


@pytest.fixture
def bundled() -> CheckpointSource:
    """Stored in bfloat16."""
    return open_checkpoint(Path(device.__file__).parent.parent / "data" / "models" / "sudoku")


CPU = torch.device("cpu")


def set_machine(monkeypatch: pytest.MonkeyPatch, *, fast_bf16: bool, available: int = 1 << 40) -> None:
    monkeypatch.setattr(device, "has_fast_bf16", lambda: fast_bf16)
    monkeypatch.setattr(device, "memory_facts", lambda: MemoryFacts(1 << 40, available))


def test_a_processor_without_bf16_instructions_computes_in_float32(
    bundled: CheckpointSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_machine(monkeypatch, fast_bf16=False)
    assert check_dtype("auto", bundled, CPU) is torch.float32
    assert check_dtype("bfloat16", bundled, CPU) is torch.bfloat16, "as it was asked for"
    assert check_dtype("auto", bundled, torch.device("cuda")) is torch.bfloat16
    set_machine(monkeypatch, fast_bf16=True)
    assert check_dtype("auto", bundled, CPU) is torch.bfloat16


def test_weights_that_do_not_fit_in_float32_stay_bfloat16(
    bundled: CheckpointSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    enough = int(2 * bundled.nbytes / 0.7) + 1
    set_machine(monkeypatch, fast_bf16=False, available=enough)
    assert check_dtype("auto", bundled, CPU) is torch.float32
    set_machine(monkeypatch, fast_bf16=False, available=enough - 2)
    assert check_dtype("auto", bundled, CPU) is torch.bfloat16


def test_an_unknown_dtype_is_answered_with_the_known_ones(bundled: CheckpointSource) -> None:
    with pytest.raises(InputError, match=r"dtype 'bf16' is not supported.* Supported: auto, "):
        check_dtype("bf16", bundled, CPU)
