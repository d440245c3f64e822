"""The directory of a run: its recipe, log, curves, saved states and result. No pickle.

recipe.json  log.jsonl  curves.svg  tensorboard/
states/step-00000200/{state.json, state.safetensors}    of several processes: a file of each
adapter/ or model/      the result
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
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
from dgemma.model.ranks import ALONE, Ranks

_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_PREFIX = "step-"
WEIGHTS = "state.safetensors"


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

        def write(directory: Path) -> dict[str, str]:
            return {WEIGHTS: write_file(directory / WEIGHTS, map(_to_write, tensors.items()))}

        self.save_state_by(step, facts, write, keep, ALONE)

    def save_state_by(
        self,
        step: int,
        facts: dict[str, Any],
        write: Callable[[Path], dict[str, str]],
        keep: int,
        ranks: Ranks,
    ) -> None:
        """`save_state` with the files that `write` makes -> their SHA-256. All ranks call it."""
        target = self._state(step)
        partial_dir = target.with_name(target.name + ".partial")
        try:
            if ranks.leads:
                shutil.rmtree(partial_dir, ignore_errors=True)
                partial_dir.mkdir(parents=True)
            ranks.wait()
            sha256 = write(partial_dir)
            if ranks.leads:
                write_json(partial_dir / "state.json", {**facts, "sha256": sha256})
                shutil.rmtree(target, ignore_errors=True)
                partial_dir.rename(target)
                sync_directory(target.parent)
        except OSError as error:
            raise CheckpointError(f"{target} cannot be written: {error.strerror}.") from None
        if ranks.leads:
            for old in self.states()[:-keep]:
                shutil.rmtree(self._state(old), ignore_errors=True)
        ranks.wait()

    def drop_after(self, step: int) -> None:
        """Remove the states after `step`, which are damaged, and what a killed process left half written."""
        for newer in self.states():
            if newer > step:
                shutil.rmtree(self._state(newer), ignore_errors=True)
        for left in (self.path / "states").glob(f"{_PREFIX}*.partial"):
            shutil.rmtree(left, ignore_errors=True)

    def newest(self) -> tuple[dict[str, Any], list[str]]:
        """The facts of the newest whole state, and what is wrong with those after it. Empty without any."""
        damaged: list[str] = []
        for step in reversed(self.states()):
            try:
                return self.check_state(step), damaged
            except CheckpointError as error:
                damaged.append(str(error))
        if damaged:
            raise CheckpointError(
                f"no state of {self.path} can be read: {' '.join(damaged)} Remove {self.path / 'states'} to "
                "begin anew."
            )
        return {}, damaged

    def check_state(self, step: int) -> dict[str, Any]:
        """The facts of a state whose files are what was written."""
        facts = read_json(self._state(step) / "state.json")
        sums = facts.pop("sha256", None)
        if not isinstance(sums, dict):  # of a version with one file; None: of one that wrote no sums
            sums = {WEIGHTS: sums}
        for name, sha256 in sums.items():
            file = self._state(step) / name
            for entry in read_entries(file):
                if entry.dtype not in TORCH_DTYPES:
                    raise CheckpointError(
                        f"{entry.file}: tensor {entry.name!r} is {entry.dtype}; it is no state."
                    )
            if sha256 not in (None, sha256_of(file)):
                raise CheckpointError(
                    f"{file} is not what was written: its SHA-256 is not that of state.json."
                )
        return facts

    def load_state(
        self, step: int, masters: Mapping[str, Tensor] | None = None, ranks: Ranks = ALONE
    ) -> dict[str, Tensor]:
        """The tensors of a checked state, divided as `masters` are. All ranks call it."""
        directory = self._state(step)
        file = directory / WEIGHTS
        if ranks.size > 1 or not file.exists():
            from dgemma.training.sharded_state import read_sharded

            return read_sharded(directory, masters or {}, ranks)
        tensors = {}
        for entry in read_entries(file):
            tensor = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
            read_into(entry, tensor.view(-1).view(torch.uint8).numpy())
            tensors[entry.name] = tensor
        return tensors

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
