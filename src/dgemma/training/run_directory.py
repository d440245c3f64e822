"""The directory of a run: its recipe, log, curves, saved states and result. No pickle.

recipe.json  log.jsonl  curves.svg  tensorboard/
states/step-00000200/{state.json, state.safetensors}
adapter/ or model/      the result
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgemma.checkpoint.load import TORCH_DTYPES
from dgemma.checkpoint.safetensors_file import TensorToWrite, read_entries, read_into, write_file
from dgemma.checkpoint.save import write_json
from dgemma.checkpoint.source import read_json
from dgemma.errors import CheckpointError, InputError

_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_PREFIX = "step-"


class RunDirectory:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def result(self) -> dict[str, Path]:
        """The directory of the trained weights, by the recipe's `train`."""
        return {"lora": self.path / "adapter", "all": self.path / "model"}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second process from training into the same directory."""
        try:
            import fcntl
        except ImportError:  # Windows
            yield
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / ".lock").open("w")
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be written: {error.strerror}.") from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(
                    f"{self.path} is in use by another run; wait for it, or give another out.", field="out"
                ) from None
            yield

    def write_recipe(self, recipe: dict[str, Any]) -> None:
        try:
            write_json(self.path / "recipe.json", recipe)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be written: {error.strerror}.") from None

    def states(self) -> list[int]:
        """The steps of all saved states, in order."""
        found = (self.path / "states").glob(f"{_PREFIX}*/state.json")
        names = (file.parent.name.removeprefix(_PREFIX) for file in found)
        return sorted(int(name) for name in names if name.isdecimal())  # without partly written ones

    def save_state(self, step: int, facts: dict[str, Any], tensors: Mapping[str, Tensor], keep: int) -> None:
        """Save a state, atomically. Only the last `keep` states stay."""
        target = self._state(step)
        partial_dir = target.with_name(target.name + ".partial")
        try:
            shutil.rmtree(partial_dir, ignore_errors=True)
            partial_dir.mkdir(parents=True)
            write_file(partial_dir / "state.safetensors", map(_to_write, tensors.items()))
            write_json(partial_dir / "state.json", facts)
            shutil.rmtree(target, ignore_errors=True)
            partial_dir.rename(target)
        except OSError as error:
            raise CheckpointError(f"{target} cannot be written: {error.strerror}.") from None
        for old in self.states()[:-keep]:
            shutil.rmtree(self._state(old), ignore_errors=True)

    def load_state(self, step: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        directory = self._state(step)
        facts = read_json(directory / "state.json")
        tensors = {}
        for entry in read_entries(directory / "state.safetensors"):
            if entry.dtype not in TORCH_DTYPES:
                raise CheckpointError(
                    f"{entry.file}: tensor {entry.name!r} is {entry.dtype}; it is no state."
                )
            tensor = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
            read_into(entry, tensor.view(-1).view(torch.uint8).numpy())
            tensors[entry.name] = tensor
        return facts, tensors

    def _state(self, step: int) -> Path:
        return self.path / "states" / f"{_PREFIX}{step:08d}"


def _to_write(item: tuple[str, Tensor]) -> TensorToWrite:
    name, tensor = item
    return TensorToWrite(name, _DTYPES[tensor.dtype], tuple(tensor.shape), partial(_bytes, tensor))


def _bytes(tensor: Tensor) -> list[Any]:
    return [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()]


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Names of recipe entries that differ, with both values."""
    found = []
    for name in {**before, **now}:
        a, b = before.get(name), now.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{prefix}{name}.")
        elif a != b:
            found.append(f"{prefix}{name} was {json.dumps(a)} and is {json.dumps(b)}")
    return found
