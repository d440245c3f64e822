"""The directory of a run: its recipe, log, curves, saved states and result. No pickle.

recipe.json  log.jsonl  curves.svg  tensorboard/
states/step-00000200/{state.json, state.safetensors}
adapter/ or model/      the result
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgemma.checkpoint.load import TORCH_DTYPES
from dgemma.checkpoint.safetensors_file import TensorToWrite, read_entries, read_into, write_file
from dgemma.checkpoint.save import write_json
from dgemma.checkpoint.source import read_json
from dgemma.durable_files import locked, sha256_of, sync_directory
from dgemma.errors import CheckpointError

_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_PREFIX = "step-"


class RunDirectory:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def result(self) -> dict[str, Path]:
        """The directory of the trained weights, by the recipe's `train`."""
        return {"lora": self.path / "adapter", "all": self.path / "model"}

    def locked(self) -> AbstractContextManager[None]:
        """Keep a second process from training into the same directory."""
        return locked(self.path)

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
            sha256 = write_file(partial_dir / "state.safetensors", map(_to_write, tensors.items()))
            write_json(partial_dir / "state.json", {**facts, "sha256": sha256})
            shutil.rmtree(target, ignore_errors=True)
            partial_dir.rename(target)
            sync_directory(target.parent)
        except OSError as error:
            raise CheckpointError(f"{target} cannot be written: {error.strerror}.") from None
        for old in self.states()[:-keep]:
            shutil.rmtree(self._state(old), ignore_errors=True)

    def drop_after(self, step: int) -> None:
        """Remove the states after `step`, which are damaged, and what a killed process left half written."""
        for newer in self.states():
            if newer > step:
                shutil.rmtree(self._state(newer), ignore_errors=True)
        for left in (self.path / "states").glob(f"{_PREFIX}*.partial"):
            shutil.rmtree(left, ignore_errors=True)

    def load_newest(self) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
        """The newest whole state, and what is wrong with the states after it. Empty if there is no state."""
        damaged: list[str] = []
        for step in reversed(self.states()):
            try:
                return *self.load_state(step), damaged
            except CheckpointError as error:
                damaged.append(str(error))
        if damaged:
            raise CheckpointError(
                f"no state of {self.path} can be read: {' '.join(damaged)} Remove {self.path / 'states'} to "
                "begin anew."
            )
        return {}, {}, damaged

    def load_state(self, step: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        directory = self._state(step)
        facts = read_json(directory / "state.json")
        weights = directory / "state.safetensors"
        entries = read_entries(weights)
        sha256 = facts.pop("sha256", None)  # None: of a version that wrote none
        if sha256 not in (None, sha256_of(weights)):
            raise CheckpointError(
                f"{weights} is not what was written: its SHA-256 is not that of state.json."
            )
        tensors = {}
        for entry in entries:
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
