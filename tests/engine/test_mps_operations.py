"""Every operation of a generation has a kernel for Apple's GPU, by torch's own list. We have no such device.

Run on the CPU without our kernels, which other devices do not have. That GPU has no float64, so no tensor may
be one; which other dtypes a kernel takes is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
import yaml
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dgemma
from dgemma import loading
from dgemma.cli.main import main
from dgemma.kernels import elementwise, forward_backward
from dgemma.model import quantized_linear
from dgemma.model.execution import Execution, default_execution
from dgemma.sampling import constrained

_LIST = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"


class Operations:
    """torch's list: for each operation the devices that have a kernel."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, Any]] = {}
        for entry in yaml.load(_LIST.read_text(), Loader=yaml.CSafeLoader):
            self._entries[entry["func"].partition("(")[0]] = entry

    def has_mps(self, name: str) -> bool:
        entry = self._entries[name]
        if "structured_delegate" in entry:
            return self.has_mps(entry["structured_delegate"])
        keys = {key.strip() for keys in entry.get("dispatch", {}) for key in keys.split(",")}
        if not keys or "MPS" in keys or "CompositeImplicitAutograd" in keys:
            return True
        if not any(key.startswith("CompositeExplicitAutograd") for key in keys):
            return False
        # Of C++ for all devices, but it may call the variant that writes to `out`.
        out = name + "_out" if "." in name else name + ".out"
        return out not in self._entries or self.has_mps(out)


@cache
def torchs_list() -> Operations:
    return Operations()


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.functions: set[Any] = set()
        self.in_float64: set[Any] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.functions.add(func)
        found = func(*args, **(kwargs or {}))
        if any(isinstance(x, Tensor) and x.dtype is torch.float64 for x in tree_leaves((args, found))):
            self.in_float64.add(func)
        return found

    @property
    def names(self) -> set[str]:
        return {f._schema.name.removeprefix("aten::") + "." + f._overloadname for f in self.functions}


def missing(names: set[str]) -> set[str]:
    operations = torchs_list()
    return {name for name in names if not operations.has_mps(name.removesuffix(".default"))}


@pytest.fixture
def as_another_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """The operations of what runs here, without kernels of ours, with the execution that MPS gets."""
    monkeypatch.setattr(elementwise, "elementwise", lambda: None)
    monkeypatch.setattr(forward_backward, "kernel", lambda: None)
    monkeypatch.setattr(quantized_linear, "quantized_matmul", lambda: None)
    mps = default_execution(torch.device("mps"), torch.bfloat16)
    monkeypatch.setattr(loading, "default_execution", lambda *_, **__: mps)
    assert mps == Execution(grouped_experts=False)
    monkeypatch.setattr(constrained, "DTYPE_OF_SUMS", {"cpu": constrained.DTYPE_OF_SUMS["mps"]})
    with Recorder() as recorder:
        yield recorder


def test_each_operation_of_a_generation_has_a_kernel_for_mps(
    as_another_device: Recorder, tmp_path: Path
) -> None:
    assert main(["new", str(tmp_path / "model"), "--preset", "tiny"]) == 0
    as_another_device.functions.clear()  # weights are made on the CPU
    lm = dgemma.load(tmp_path / "model", dtype="bfloat16")
    short: dict[str, Any] = {"max_tokens": 8, "seed": 1, "max_denoising_steps": 3}
    lm.generate("On Sunday Emma", **short)
    lm.generate(["On Sunday", "A dog and"], top_k=5, top_p=0.9, **short)
    lm.generate("The day is ", regex="(Mon|Sun)day", **short)
    lm.generate("On Sunday Emma", pins={0: 5, 2: [7, 8]}, **short)
    for decode in ("causal", "lossless"):
        lm.generate("On Sunday Emma", decode=decode, **short)
    assert len(as_another_device.names) > 80
    assert missing(as_another_device.names) == set()
    assert as_another_device.in_float64 == set()


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_each_operation_of_quantized_weights_has_a_kernel_for_mps(
    form: str, as_another_device: Recorder, tmp_path: Path
) -> None:
    assert main(["new", str(tmp_path / "model"), "--preset", "tiny", "--quantize", form]) == 0
    as_another_device.functions.clear()  # weights are made on the CPU
    lm = dgemma.load(tmp_path / "model", dtype="bfloat16")
    lm.generate([5, 6, 7], max_tokens=8, seed=1, max_denoising_steps=2)
    assert missing(as_another_device.names) == set()
    assert as_another_device.in_float64 == set()


def test_an_operation_without_a_kernel_is_seen() -> None:
    with Recorder() as recorder:
        torch.frexp(torch.ones(3))  # of CPU and CUDA alone, in torch 2.13
        torch.ones(3).sum()
        torch.ones(3).double()
    assert missing(recorder.names) == {"frexp.Tensor"}
    assert {function._schema.name for function in recorder.in_float64} == {"aten::_to_copy"}
