"""What a device cannot hold is refused before weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dgemma
from dgemma import loading
from dgemma.errors import DeviceError

QUANTIZED = Path(__file__).parent / "data" / "quantized"


class WeightsAreReadError(Exception):
    pass


@pytest.fixture
def apples_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with Apple's GPU, on which no weight is read."""

    def read(*_: Any, **__: Any) -> None:
        raise WeightsAreReadError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(loading, "load_transformer", read)


@pytest.mark.parametrize("device", ["mps", "auto"])
@pytest.mark.parametrize("name", ["ct-fp8-block", "ct-fp8-channel", "ct-nvfp4", "modelopt-nvfp4", "ct-mixed"])
def test_eight_bit_floats_are_refused_on_apples_gpu(apples_gpu: None, name: str, device: str) -> None:
    rule = r"\(.*\) with 8-bit floats, which device 'mps' does not have. Choose device cpu"
    with pytest.raises(DeviceError, match=f"{name} is quantized {rule}"):
        dgemma.load(QUANTIZED / name, device=device)


@pytest.mark.parametrize(
    ("name", "device"),
    [("ct-int4", "mps"), ("ct-int8", "mps"), ("awq-gemm", "mps"), ("ct-fp8-block", "cpu")],
)
def test_other_weights_and_other_devices_go_on(apples_gpu: None, name: str, device: str) -> None:
    with pytest.raises(WeightsAreReadError):
        dgemma.load(QUANTIZED / name, device=device)
