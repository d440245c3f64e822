"""The check of a device computes on it what it has: Apple's GPU has no float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dgemma import selfcheck
from dgemma.model.quantized_linear import QuantizedExpertLinear
from dgemma.model.quantized_tensor import QuantKind


class OnApplesGpu(Tensor):
    """A tensor of a device without float64."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is Tensor.double:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found.as_subclass(Tensor) if func is Tensor.cpu else found


def test_products_are_compared_in_float64_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = QuantizedExpertLinear.multiply_grouped
    monkeypatch.setattr(
        QuantizedExpertLinear,
        "multiply_grouped",
        lambda *arguments: multiply(*arguments).as_subclass(OnApplesGpu),
    )
    finding = selfcheck._quantized_experts(QuantKind.INT4, "cpu", torch.float32)
    assert finding.passed, finding
