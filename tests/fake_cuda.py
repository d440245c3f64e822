"""Fake CUDA on a build of torch without CUDA.

`FakeTensorMode` accepts a CUDA device there, but Python indexing (`x[:2]`) asks for a device guard
that only a CUDA build has. `FakeCuda` spells indexing as the same aten operations.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cuda:0")


class FakeCuda(ExitStack):
    def __enter__(self) -> FakeCuda:
        super().__enter__()
        self.enter_context(FakeTensorMode())
        self.enter_context(_SpelledIndexing())
        return self


class _SpelledIndexing(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__getitem__:
            return _get(*args)
        if func is Tensor.__setitem__:  # by slices only: what `_get` then gives is a view
            target, index, value = args
            return torch.ops.aten.copy_(_get(target, index), value)
        return func(*args, **(kwargs or {}))


def _get(x: Tensor, index: Any) -> Tensor:
    index = index if isinstance(index, tuple) else (index,)
    used = sum(item is not None and item is not Ellipsis for item in index)
    dim = 0
    advanced: list[Tensor | None] = []
    for item in index:
        if item is Ellipsis:
            skipped = x.dim() - dim - (used - dim)
            dim += skipped
            advanced += [None] * skipped
        elif item is None:
            x = x.unsqueeze(dim)
            dim += 1
            advanced.append(None)
        elif isinstance(item, int):
            x = x.select(dim, item)
        elif isinstance(item, slice):
            x = torch.ops.aten.slice(x, dim, item.start, item.stop, item.step or 1)
            dim += 1
            advanced.append(None)
        else:
            advanced.append(item)
            dim += 1
    if any(item is not None for item in advanced):
        return torch.ops.aten.index(x, advanced)
    return x
