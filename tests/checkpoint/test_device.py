"""Which device a name means on this machine."""

from __future__ import annotations

import pytest
import torch

from dgemma.checkpoint.device import check_device
from dgemma.errors import DeviceError


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
